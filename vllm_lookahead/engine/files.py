"""Small JSON files in the cache folder that a later start may find, or not."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_lookahead.machine import cache_folder

logger = init_logger("vllm.lookahead")


def cache_file(kind: str, key: Sequence[object]) -> Path:
    """The file of a kind for all that its content depends on, which JSON can hold."""
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache_folder() / kind / f"{name}.json"


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
