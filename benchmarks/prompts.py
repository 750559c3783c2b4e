"""Prompt sets of real text (see shared/data/README.md), as chat conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

DEFAULT_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
EXACTNESS_SETS = ("mt_bench", "humaneval", "gsm8k")

SIMULATOR_ROWS = {
    "mt_bench": range(0, 80, 10),
    "humaneval": range(0, 80, 10),
    "gsm8k": range(0, 96, 12),
}
"""The 24 prompts on which an independent simulator measured step compression ratios."""

SPEED_ROWS = {
    "mt_bench": range(5, 80, 8),
    "humaneval": range(5, 80, 8),
    "gsm8k": range(5, 100, 10),
}
"""Ten prompts of each set, other than `SIMULATOR_ROWS`, on which speeds are measured."""

HUMANEVAL_WRAPPER = "Complete the following Python function.\n```python\n{}\n```"

Conversation = list[dict[str, str]]


def load(
    data: Path, name: str, rows: Iterable[int] | None = None, turn: int = 0
) -> list[Conversation]:
    """A user turn of the given rows of a set (all by default), as one-message conversations."""
    lines = (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    if rows is None:
        rows = range(len(lines))
    turns = [json.loads(lines[row])["turns"][turn] for row in rows]
    if name == "humaneval":
        turns = [HUMANEVAL_WRAPPER.format(turn) for turn in turns]
    return [[{"role": "user", "content": turn}] for turn in turns]
