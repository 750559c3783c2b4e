"""`LookaheadConfig`: every knob of lookahead decoding, validated before weights load."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

BUILTIN_SOURCES = ("window", "output", "prompt")


class LookaheadConfigError(ValueError):
    """A lookahead parameter is unknown, of the wrong type or out of range."""


@dataclass(frozen=True, slots=True)
class LookaheadConfig:
    """Parameters of lookahead decoding (names of the paper, arXiv 2402.02057, section 3).

    Raises `LookaheadConfigError`, naming key, value and range, when constructed out of range.
    """

    window_size: int = 7
    """W: columns of the lookahead window, 0 to 128. 0 turns the lookahead branch off."""

    ngram_size: int = 5
    """N: tokens of an n-gram with its key, 2 to 32. A step yields at most N tokens."""

    verification_set_size: int = 7
    """G: candidates verified per step, 0 to 128. 0 turns the n-gram pool off."""

    sources: tuple[str, ...] = BUILTIN_SOURCES
    """Where candidates come from, best first: built-in names fill the n-gram pool (``window``:
    the window's trajectory, ``output``: generated text, ``prompt``), ``module:Class`` names a
    `vllm_lookahead.core.sources.CandidateSource`."""

    verify_window: bool = True
    """Whether paths of the lookahead window may be accepted, too."""

    pool_capacity: int = 16384
    """N-grams kept per sequence, 1 to 1048576; the keys inserted longest ago leave first."""

    scratch_fraction: float = 0.1
    """Share of the KV cache memory, over 0 to 0.5, that branches of token trees may take."""

    seed: int = 0
    """Seed of the guesses that fill a new window, 0 to 2**32 - 1. Never changes the output."""

    def __post_init__(self) -> None:
        _check_int("window_size", self.window_size, 0, 128)
        _check_int("ngram_size", self.ngram_size, 2, 32)
        _check_int("verification_set_size", self.verification_set_size, 0, 128)
        _check_int("pool_capacity", self.pool_capacity, 1, 1 << 20)
        _check_int("seed", self.seed, 0, (1 << 32) - 1)
        if not isinstance(self.verify_window, bool):
            raise LookaheadConfigError(
                f"verify_window must be true or false, got {self.verify_window!r}."
            )
        fraction = self.scratch_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            raise LookaheadConfigError(f"scratch_fraction must be a number, got {fraction!r}.")
        if not 0 < fraction <= 0.5:
            raise LookaheadConfigError(
                f"scratch_fraction must be over 0 and at most 0.5, got {fraction!r}."
            )
        if self.window_size == 0 and self.verification_set_size == 0:
            raise LookaheadConfigError(
                "window_size=0 and verification_set_size=0 leave nothing to verify: "
                "set window_size (1 to 128) or verification_set_size (1 to 128)."
            )
        object.__setattr__(self, "sources", _check_sources(self.sources))
        if self.window_size == 0 and not set(self.sources) - {"window"}:
            raise LookaheadConfigError(
                f"window_size=0 with sources={list(self.sources)} leaves nothing to propose: set "
                "window_size (1 to 128) or add 'output', 'prompt' or a 'module:Class' to sources."
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> LookaheadConfig:
        """Build from user input; unknown keys raise and name the nearest known one."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key in known:
                continue
            raise LookaheadConfigError(
                f"unknown lookahead parameter {key!r}{nearest_hint(str(key), known)} "
                f"Known parameters: {', '.join(known)}."
            )
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """JSON-able form that `from_mapping` accepts."""
        return asdict(self) | {"sources": list(self.sources)}

    @property
    def is_jacobi(self) -> bool:
        """Plain Jacobi decoding (paper, section 2): one row of guesses, no n-grams."""
        return self.ngram_size == 2 and self.verification_set_size == 0

    @property
    def num_draft_tokens(self) -> int:
        """Most draft tokens that a step may accept: N - 1, or W - 1 for Jacobi decoding."""
        if self.is_jacobi:
            return max(1, self.window_size - 1)
        return self.ngram_size - 1

    @property
    def max_branches(self) -> int:
        """Most branches of a token tree: candidates, window columns, window row 0."""
        return self.verification_set_size + self.window_size + 1

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node that a token tree can have."""
        window_depth = self.window_size + self.ngram_size - 3 if self.window_size else 0
        return max(window_depth, self.num_draft_tokens)

    @property
    def uses_pool(self) -> bool:
        """Whether n-grams are pooled at all."""
        return self.verification_set_size > 0 and any(s in BUILTIN_SOURCES for s in self.sources)


def nearest_hint(word: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown ``word``: a suggestion if there is a near one."""
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else "."


def _check_int(key: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise LookaheadConfigError(
            f"{key} must be an integer from {low} to {high}, got {value!r} "
            f"({type(value).__name__})."
        )
    if not low <= value <= high:
        raise LookaheadConfigError(f"{key} must be from {low} to {high}, got {value}.")


def _check_sources(sources: object) -> tuple[str, ...]:
    if isinstance(sources, str) or not isinstance(sources, list | tuple):
        raise LookaheadConfigError(f"sources must be a list of names, got {sources!r}.")
    for name in sources:
        if not isinstance(name, str):
            raise LookaheadConfigError(f"sources must be names, got {name!r}.")
        if name in BUILTIN_SOURCES:
            continue
        module, colon, attribute = name.partition(":")
        if not (colon and module and attribute):
            hint = nearest_hint(name, BUILTIN_SOURCES)
            raise LookaheadConfigError(
                f"sources has {name!r}{hint} Give {', '.join(BUILTIN_SOURCES)} or 'module:Class'."
            )
    if len(set(sources)) != len(sources):
        raise LookaheadConfigError(f"sources repeats a name: {list(sources)!r}.")
    return tuple(sources)
