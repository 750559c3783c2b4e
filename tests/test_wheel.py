"""The wheel, installed where no checkout and no editable install is in reach."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import vllm_lookahead
from tests.engine_options import OPTIONS

ROOT = Path(__file__).parents[1]
PROMPT = "one two three, one two three, one two"
NUM_TOKENS = 48


@dataclass(frozen=True)
class Installation:
    """A virtual environment with the wheel, vLLM coming from the tests' own environment."""

    wheel: Path
    prefix: Path

    def run(self, cwd: Path, command: str, *args: str) -> str:
        """Output of a command of the environment, run in ``cwd``."""
        done = subprocess.run(
            [str(self.prefix / "bin" / command), *args],
            cwd=cwd,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def pip(*args: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *map(str, args)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def build_wheel(folder: Path) -> Path:
    """Build from a copy: setuptools would put what an old ``build`` folder has into the wheel."""
    source = folder / "source"
    shutil.copytree(
        ROOT / "vllm_lookahead",
        source / "vllm_lookahead",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("pyproject.toml", "setup.cfg", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    # No isolation: that would download setuptools, which this environment has.
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(folder)
    prefix = folder / "venv"
    venv.create(prefix, symlinks=True)
    pip("--python", prefix / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    # Folders named in a .pth file come after the environment's own, and .pth files in them, such
    # as the one of an editable install, are not read.
    version = f"python{sysconfig.get_python_version()}"
    borrowed = prefix / "lib" / version / "site-packages" / "borrowed.pth"
    borrowed.write_text(sysconfig.get_path("purelib") + "\n")
    return Installation(wheel, prefix)


def test_wheel_holds_the_package_and_nothing_else(installation: Installation) -> None:
    package = ROOT / "vllm_lookahead"
    expected = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    expected.add("vllm_lookahead/py.typed")
    names = zipfile.ZipFile(installation.wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected


INSPECT = """
import json
from importlib.metadata import entry_points, version
import vllm_lookahead

found = entry_points(group="vllm.general_plugins", name="lookahead")
print(json.dumps({
    "entry_points": [point.value for point in found],
    "file": vllm_lookahead.__file__,
    "version": version("vllm-lookahead"),
}))
"""


def test_installed_wheel_is_a_vllm_plugin(installation: Installation, tmp_path: Path) -> None:
    seen = json.loads(installation.run(tmp_path, "python", "-c", INSPECT))
    assert seen["entry_points"] == ["vllm_lookahead:register"]
    assert seen["version"] == vllm_lookahead.__version__
    assert Path(seen["file"]).is_relative_to(installation.prefix)
    assert Path(seen["file"]).with_name("py.typed").exists()


def test_installed_command_tells_its_version(installation: Installation, tmp_path: Path) -> None:
    output = installation.run(tmp_path, "vllm-lookahead", "--version")
    assert vllm_lookahead.__version__ in output.split()


GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
import vllm_lookahead

model, prompt, num_tokens, options = sys.argv[1:]
llm = LLM(model, speculative_config={"method": "lookahead"}, **json.loads(options))
params = SamplingParams(temperature=0, max_tokens=int(num_tokens))
[request] = llm.generate(prompt, params, use_tqdm=False)
engine_module = sys.modules["vllm_lookahead.engine.worker"]
print(json.dumps({
    "token_ids": list(request.outputs[0].token_ids),
    "worker_cls": llm.llm_engine.vllm_config.parallel_config.worker_cls,
    "file": engine_module.__file__,
}))
"""


def greedy_tokens(model: Path) -> list[int]:
    """What transformers generates."""
    ids = AutoTokenizer.from_pretrained(model)(PROMPT, return_tensors="pt")
    output = AutoModelForCausalLM.from_pretrained(model).generate(
        **ids, do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0
    )
    return output[0, ids["input_ids"].shape[1] :].tolist()


def test_llm_of_the_installed_wheel_generates_with_lookahead_what_transformers_does(
    installation: Installation, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    arguments = (str(tiny_llama), PROMPT, str(NUM_TOKENS), json.dumps(OPTIONS))
    output = installation.run(tmp_path, "python", "-c", GENERATE, *arguments)
    seen: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert seen["worker_cls"] == "vllm_lookahead.engine.worker.LookaheadCPUWorker"
    assert Path(seen["file"]).is_relative_to(installation.prefix)
    assert seen["token_ids"] == greedy_tokens(tiny_llama)
