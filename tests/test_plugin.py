"""What vLLM is told, and what it is left alone with: loading, spellings, configuration errors."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.engine_options import OPTIONS, engine_args, serve_flags
from vllm_lookahead import plugin, register
from vllm_lookahead.cli_args import modern_spelling
from vllm_lookahead.config import LookaheadConfigError
from vllm_lookahead.engine.speculative import LookaheadSpeculativeConfig

DEFAULTS = {
    "window_size": "auto",
    "ngram_size": "auto",
    "verification_set_size": "auto",
    "draft_length": "auto",
    "controller": True,
    "step_cost": "measured",
    "sources": ["suffix", "model", "window"],
    "verify_window": True,
    "pool_capacity": 16384,
    "model_text_tokens": 204800,
    "model_text_seconds": 20,
    "shared_capacity": 65536,
    "scratch_fraction": 0.1,
    "seed": 0,
}
"""Parameters of an engine that is asked for lookahead and nothing else."""


def run_python(script: str, *args: str, **env: str) -> str:
    """The last line that ``script`` prints in a new interpreter; vLLM logs before it."""
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


# Loading


def test_importing_the_package_imports_no_vllm_and_no_torch() -> None:
    script = (
        "import sys; before = set(sys.modules); import vllm_lookahead; "
        "print(*sorted(set(sys.modules) - before))"
    )
    assert run_python(script).split() == ["vllm_lookahead"]


def test_registering_again_changes_nothing() -> None:
    register()
    first = {name: vars(EngineArgs)[name] for name in ("add_cli_args", "create_speculative_config")}
    register()
    assert {name: vars(EngineArgs)[name] for name in first} == first


class VllmWithoutTheFunction:
    pass


class VllmOfTests:
    @staticmethod
    def make(value: int) -> Any:
        return value

    def get(self, value: int) -> Any:
        return self, value


def double(original: Any) -> Any:
    return lambda *args: (original(*args), original(*args))


def test_wrapping_a_function_that_vllm_has_not_got_says_which() -> None:
    with pytest.raises(RuntimeError, match=r"VllmWithoutTheFunction\.make\b"):
        plugin._wrap(VllmWithoutTheFunction, "make", double)


def test_wraps_apply_once_and_keep_static_methods_static_and_methods_bound() -> None:
    plugin._wrap(VllmOfTests, "make", double)
    plugin._wrap(VllmOfTests, "get", double)
    plugin._wrap(VllmOfTests, "make", double)
    owner = VllmOfTests()
    assert VllmOfTests.make(1) == owner.make(1) == (1, 1)
    assert owner.get(2) == ((owner, 2), (owner, 2))


# Not asked for

PROBE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.config import VllmConfig

model, options = sys.argv[1], json.loads(sys.argv[2])
config = EngineArgs(model=model, **options).create_engine_config()
report = {
    "config": str(config),
    "hash": config.compute_hash(),
    "worker_cls": config.parallel_config.worker_cls,
    "scheduler_cls": str(config.scheduler_config.scheduler_cls),
    "async_scheduling": config.scheduler_config.async_scheduling,
    "additional_config": config.additional_config,
    "speculative_config": config.speculative_config,
    "ours": sorted(name for name in sys.modules if name.startswith("vllm_lookahead")),
    "error": None,
}
try:
    lookahead = {"method": "lookahead"}
    EngineArgs(model=model, speculative_config=lookahead, **options).create_engine_config()
except ValueError as error:
    report["error"] = str(error)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def without_plugin(tiny_llama: Path) -> dict[str, Any]:
    return json.loads(run_python(PROBE, str(tiny_llama), json.dumps(OPTIONS), VLLM_PLUGINS=""))


@pytest.fixture(scope="module")
def with_plugin(tiny_llama: Path) -> dict[str, Any]:
    return json.loads(run_python(PROBE, str(tiny_llama), json.dumps(OPTIONS)))


def test_without_being_asked_the_engine_configuration_stays_as_it_is(
    with_plugin: dict[str, Any], without_plugin: dict[str, Any]
) -> None:
    process_state = ("ours", "error")
    assert {k: v for k, v in with_plugin.items() if k not in process_state} == {
        k: v for k, v in without_plugin.items() if k not in process_state
    }
    assert with_plugin["additional_config"] == {}
    assert with_plugin["speculative_config"] is None


def test_without_being_asked_no_engine_code_is_imported(with_plugin: dict[str, Any]) -> None:
    assert "vllm_lookahead.plugin" in with_plugin["ours"]
    touched = ("vllm_lookahead.engine", "vllm_lookahead.attention", "vllm_lookahead.cli.")
    assert [name for name in with_plugin["ours"] if name.startswith(touched)] == []


def test_asking_for_lookahead_where_vllm_plugins_excludes_it_is_an_error(
    without_plugin: dict[str, Any],
) -> None:
    assert without_plugin["ours"] == []
    assert "method" in without_plugin["error"]


# Asked for


def lookahead_config(folder: Path, **parameters: Any) -> VllmConfig:
    spec = {"method": "lookahead", **parameters}
    return engine_args(folder, speculative_config=spec).create_engine_config()


def assert_lookahead(config: VllmConfig, **parameters: Any) -> None:
    """``config`` is that of lookahead with ``parameters`` beside the defaults."""
    assert isinstance(config.speculative_config, LookaheadSpeculativeConfig)
    assert config.speculative_config.lookahead == DEFAULTS | parameters
    assert pickle.loads(pickle.dumps(config)).speculative_config.lookahead == DEFAULTS | parameters
    assert config.parallel_config.worker_cls == plugin.WORKER
    assert config.scheduler_config.scheduler_cls == plugin.SCHEDULER
    assert config.scheduler_config.async_scheduling is False


@pytest.mark.parametrize(
    ("parameters", "num_draft_tokens"),
    [
        pytest.param({}, 12, id="by default"),
        pytest.param({"ngram_size": 2}, 1, id="N=2"),
        pytest.param({"ngram_size": 8, "window_size": 3}, 7, id="N=8"),
        pytest.param(
            {"ngram_size": 2, "verification_set_size": 0, "window_size": 6}, 5, id="Jacobi, W=6"
        ),
    ],
)
def test_method_sets_worker_scheduler_parameters_and_draft_length(
    tiny_llama: Path, parameters: dict[str, int], num_draft_tokens: int
) -> None:
    config = lookahead_config(tiny_llama, **parameters)
    assert_lookahead(config, **parameters)
    assert config.speculative_config is not None
    assert config.speculative_config.num_speculative_tokens == num_draft_tokens


def test_one_engine_args_makes_the_same_configuration_twice(tiny_llama: Path) -> None:
    args = engine_args(tiny_llama, speculative_config={"method": "lookahead", "window_size": 3})
    first, second = args.create_engine_config(), args.create_engine_config()
    assert_lookahead(first, window_size=3)
    assert_lookahead(second, window_size=3)


def test_dictionary_of_the_caller_is_not_changed(tiny_llama: Path) -> None:
    spec = {"method": "lookahead", "window-size": 3}
    engine_args(tiny_llama, speculative_config=spec).create_engine_config()
    assert spec == {"method": "lookahead", "window-size": 3}


@pytest.mark.parametrize(
    "spec",
    [
        {"method": "lookahead", "window_size": 3, "pool_capacity": 9},
        {"method": "[lookahead]", "window_size": 3, "pool_capacity": 9},
        {"method": "lookahead", "window-size": 3, "pool-capacity": 9},
    ],
)
def test_spellings_of_the_method_and_of_its_keys(tiny_llama: Path, spec: dict[str, Any]) -> None:
    config = engine_args(tiny_llama, speculative_config=spec).create_engine_config()
    assert_lookahead(config, window_size=3, pool_capacity=9)


# Command line


def parse(*argv: str) -> AsyncEngineArgs:
    """``argv`` as `vllm serve` reads it."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    return AsyncEngineArgs.from_cli_args(parser.parse_args([*serve_flags(), *argv]))


SPEC = '{"window_size": 3}'


@pytest.mark.parametrize(
    ("argv", "parameters"),
    [
        (["--speculative-model", "[lookahead]"], {}),
        (["--speculative-model", "lookahead"], {}),
        (["--speculative_model=[lookahead]"], {}),
        (["--spec-method", "lookahead"], {}),
        (["--speculative-config", '{"method": "lookahead", "window_size": 3}'], {"window_size": 3}),
        (["--speculative-model", "[lookahead]", "--speculative-config", SPEC], {"window_size": 3}),
        (["--speculative-config", SPEC, "--speculative-model", "[lookahead]"], {"window_size": 3}),
        (
            ["--speculative-model=lookahead", '--speculative-config={"method": "lookahead"}'],
            {},
        ),
        (
            ["--speculative-model=lookahead", "--speculative-config.window_size", "3"],
            {"window_size": 3},
        ),
    ],
    ids=" ".join,
)
def test_spellings_on_the_command_line(
    tiny_llama: Path, argv: list[str], parameters: dict[str, int]
) -> None:
    args = parse("--model", str(tiny_llama), *argv)
    assert_lookahead(args.create_engine_config(), **parameters)


def refused_by_parser(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the parser says when it exits with status 2, as all argument errors do."""
    with pytest.raises(SystemExit) as exit_info:
        parse(*argv)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "modern"),
    [
        ("[ngram]", {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}),
        ("[suffix]", {"method": "suffix"}),
        ("Qwen/Qwen3-0.6B", {"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5}),
    ],
)
def test_other_speculative_models_are_answered_with_their_modern_spelling(
    capsys: pytest.CaptureFixture[str], model: str, modern: dict[str, Any]
) -> None:
    error = refused_by_parser(capsys, "--speculative-model", model)
    assert f"--speculative-model takes only [lookahead] (or lookahead), got {model!r}" in error
    assert f"--speculative-config '{json.dumps(modern)}'" in error
    assert parse("--speculative-config", json.dumps(modern)).speculative_config == modern


def test_modern_spelling_of_ngram_is_one_that_vllm_takes(tiny_llama: Path) -> None:
    spec = json.loads(modern_spelling("[ngram]").partition("'")[2].rstrip("'"))
    config = engine_args(tiny_llama, speculative_config=spec).create_engine_config()
    assert config.speculative_config is not None
    assert config.speculative_config.method == "ngram"
    assert not isinstance(config.speculative_config, LookaheadSpeculativeConfig)


@pytest.mark.parametrize(
    "argv",
    [
        ["--speculative-model", "lookahead", "--spec-method", "ngram"],
        ["--spec-method", "ngram", "--speculative-model", "lookahead"],
    ],
    ids=" ".join,
)
def test_speculative_model_beside_spec_method_is_refused_in_either_order(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    error = refused_by_parser(capsys, *argv)
    assert f"argument {argv[2]}: not allowed with argument {argv[0]}" in error


def test_malformed_json_names_the_flag_and_the_value(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused_by_parser(capsys, "--speculative-config", '{"method": "lookahead"')
    assert "--speculative-config" in error
    assert '{"method": "lookahead"' in error


# Configuration errors


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"window_sise": 7}, ["'window_sise'", "'window_size'?", "ngram_size"]),
        ({"model": "x"}, ["'model'.", "ngram_size"]),
        ({"window_size": "7"}, ["window_size", "'7'", "integer from 0 to 128"]),
        ({"ngram_size": 5.0}, ["ngram_size", "5.0", "integer from 2 to 32"]),
        ({"ngram_size": 1}, ["ngram_size", "got 1", "from 2 to 32"]),
        ({"ngram_size": 33}, ["ngram_size", "got 33", "from 2 to 32"]),
        (
            {"window_size": 0, "verification_set_size": 0},
            ["window_size=0", "verification_set_size=0", "1 to 128"],
        ),
        ({"num_speculative_tokens": 4}, ["num_speculative_tokens", "ngram_size"]),
        ({"num-speculative-tokens": 4}, ["num_speculative_tokens", "ngram_size"]),
        ({"sources": ["promt"]}, ["'promt'", "'prompt'?", "window, output, prompt"]),
        ({"sources": ["lexicon"]}, ["'lexicon'.", "window, output, prompt", "module:Class"]),
        ({"sources": ["no_such_module:C"]}, ["'no_such_module:C'", "no_such_module"]),
        ({"scratch_fraction": 0.9}, ["scratch_fraction", "0.9", "at most 0.5"]),
    ],
    ids=str,
)
def test_configuration_errors_name_key_value_and_range(
    tiny_llama: Path, parameters: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(LookaheadConfigError) as error:
        lookahead_config(tiny_llama, **parameters)
    assert [part for part in expected if part not in str(error.value)] == []


@pytest.mark.parametrize("method", ["lookahed", "Lookahead", "[lookahead", "look-ahead"])
def test_misspelt_method_gets_the_right_spelling(tiny_llama: Path, method: str) -> None:
    args = engine_args(tiny_llama, speculative_config={"method": method})
    with pytest.raises(LookaheadConfigError, match="did you mean 'lookahead'") as error:
        args.create_engine_config()
    assert repr(method) in str(error.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["--speculative-model=lookahead", '--speculative-config={"method": "ngram"}'],
        ["--spec-method=ngram", '--speculative-config={"method": "lookahead"}'],
    ],
    ids=" ".join,
)
def test_two_methods_are_a_conflict_that_names_both_flags(
    tiny_llama: Path, argv: list[str]
) -> None:
    args = parse("--model", str(tiny_llama), *argv)
    with pytest.raises(LookaheadConfigError) as error:
        args.create_engine_config()
    flag = argv[0].partition("=")[0]
    assert f"{flag} names" in str(error.value)
    assert "--speculative-config names the method" in str(error.value)
    assert "'ngram'" in str(error.value)
    assert "'lookahead'" in str(error.value)
