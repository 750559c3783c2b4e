"""Small JSON files that a later start may find, or not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

logger = init_logger("vllm.lookahead")


def load_json(path: Path) -> Any:
    """What the file holds, None if it isn't there or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def save_json(path: Path, value: Any) -> None:
    """Replace the file in one rename; the log is told if it can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(value), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        logger.warning("Can't keep %s for the next start: %s", path, error)
