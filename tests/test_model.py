"""End to end on the real model: the commands that users and benchmarks run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.prompts import DEFAULT_DATA

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.model


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(command),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )


@pytest.mark.skipif(not DEFAULT_DATA.is_dir(), reason=f"no prompt sets in {DEFAULT_DATA}")
def test_real_text_is_identical_greedy_and_seeded() -> None:
    result = run(
        *(sys.executable, "-m", "benchmarks.exactness", "--sizes", "7,5,7", "--max-num-seqs", "8"),
        *("--block-size", "32", "--per-set", "4", "--max-tokens", "64"),
    )
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    assert "(7,5,7) max_num_seqs=8 block=32: ['12/12', '12/12']" in result.stdout


def test_demo_shows_identical_answers() -> None:
    result = run(str(Path(sys.executable).parent / "vllm-lookahead"), "demo", "--max-tokens", "48")
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    assert "tokens/step" in result.stdout
