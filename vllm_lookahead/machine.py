"""What this machine is, and where the plugin keeps its files on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_model() -> str:
    """Name of the processor, at least that of its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def cache_folder() -> Path:
    """Where files lie that can be made again (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-lookahead"
