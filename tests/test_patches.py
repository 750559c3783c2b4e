"""The diffs in patches/ fit the vLLM that is supported."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

PATCHES = sorted((Path(__file__).parents[1] / "patches").glob("vllm-*/*.patch"))


def test_ledger_names_every_patch() -> None:
    ledger = (Path(__file__).parents[1] / "patches" / "README.md").read_text()
    assert PATCHES
    assert [patch.stem for patch in PATCHES if f"`{patch.stem}`" not in ledger] == []


@pytest.mark.skipif(shutil.which("patch") is None, reason="the command patch isn't installed")
def test_patches_apply_in_order_to_the_installed_vllm(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    for patch in PATCHES:
        for line in patch.read_text().splitlines():
            if line.startswith("--- a/"):
                name = line.removeprefix("--- a/")
                target = tmp_path / name
                if not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(package.parent / name, target)
        result = subprocess.run(
            ["patch", "-p1", "--batch", "--fuzz=0", "--input", str(patch)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
