"""`LookaheadConfig`: every knob of lookahead decoding, validated before weights load."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from typing import Any, Literal, cast

BUILTIN_SOURCES = ("suffix", "model", "window", "output", "prompt", "shared")
DEFAULT_SOURCES = ("suffix", "model", "window")
TOKEN_SOURCES = ("suffix", "shared", "model")
"""Sources that know what follows the last few tokens, and so make candidates token by token."""
POOLED_SOURCES = ("window", "output", "prompt")
"""Sources that fill the n-gram pool."""
AUTO = "auto"
_AUTO_SIZE = cast(int, AUTO)
"""Typed as the number that `LookaheadConfig.sized` puts in its place."""
SIZE_RANGES = {
    "window_size": (0, 128),
    "ngram_size": (2, 32),
    "verification_set_size": (0, 128),
    "draft_length": (1, 127),
}
TREE_SIZES = ("window_size", "ngram_size", "verification_set_size")
"""W, N and G."""
AUTO_SHAPES = ((1, 2, 3, 8), (24, 4, 4, 8), (40, 7, 5, 8))
"""(free tokens, W, N, G): what "auto" sizes are where a step may feed that many tokens at about
the cost of one. The controller feeds a part of it."""
AUTO_DRAFT_LENGTH = 12
"""Draft tokens of a candidate when the n-gram size is chosen automatically."""

StepCostPoints = tuple[tuple[int, float], ...]


class LookaheadConfigError(ValueError):
    """A lookahead parameter is unknown, of the wrong type or out of range."""


@dataclass(frozen=True, slots=True)
class LookaheadConfig:
    """Parameters of lookahead decoding (names of the paper, arXiv 2402.02057, section 3).

    Raises `LookaheadConfigError`, naming key, value and range, when constructed out of range.
    """

    window_size: int = _AUTO_SIZE
    """W: most columns of the lookahead window, 0 to 128. 0 turns the lookahead branch off."""

    ngram_size: int = _AUTO_SIZE
    """N: tokens of an n-gram with its key, 2 to 32."""

    verification_set_size: int = _AUTO_SIZE
    """G: most candidates verified per step, 0 to 128. 0 turns all but the window off."""

    draft_length: int = _AUTO_SIZE
    """Most draft tokens that a step may accept, 1 to 127: by default N - 1 (W - 1 for Jacobi
    decoding), and 12 where N is "auto". Candidates of the n-gram pool have N - 1 at most."""

    controller: bool = True
    """Whether each step feeds only what is worth its cost. Without, it feeds all that the sizes
    allow, as the paper has it; "auto" sizes are then those of a machine whose tokens are free."""

    step_cost: Literal["measured", "flat"] | StepCostPoints = "measured"
    """What a step costs by its tokens: "measured" at start-up and corrected while running;
    "flat", any number costs the same; or pairs of (tokens, cost), linear in between."""

    sources: tuple[str, ...] = DEFAULT_SOURCES
    """Where candidates come from. ``suffix``: what followed the longest match of the text's end;
    ``model``: likewise, in text that the model wrote by itself at start-up;
    ``window`` (the window's trajectory), ``output`` (generated text) and ``prompt`` fill the
    n-gram pool; ``shared``: like ``suffix``, in the texts of finished requests; ``module:Class``
    names a `vllm_lookahead.core.sources.CandidateSource`."""

    verify_window: bool = True
    """Whether paths of the lookahead window may be accepted, too."""

    pool_capacity: int = 16384
    """N-grams kept per sequence, 1 to 1048576; the keys inserted longest ago leave first. Of the
    text, the suffix source knows at least as many tokens."""

    model_text_tokens: int = 204800
    """Tokens that the model writes at start-up for the source ``model``, 1 to 1048576. A worker
    holds up to 0.6 kB for each (tests/core/test_followers.py)."""

    model_text_seconds: float = 20
    """Most seconds that a start takes for it, 0 to 86400; the next start goes on from there."""

    shared_capacity: int = 65536
    """Tokens of finished requests that the ``shared`` source keeps, 1 to 16777216."""

    scratch_fraction: float = 0.1
    """Share of the KV cache memory, over 0 to 0.5, that branches of token trees may take."""

    seed: int = 0
    """Seed of the guesses that fill a new window, 0 to 2**32 - 1. Never changes the output."""

    def __post_init__(self) -> None:
        for key, (low, high) in SIZE_RANGES.items():
            if not _is_auto(getattr(self, key)):
                _check_int(key, getattr(self, key), low, high, ' (or "auto")')
        _check_int("pool_capacity", self.pool_capacity, 1, 1 << 20)
        _check_int("model_text_tokens", self.model_text_tokens, 1, 1 << 20)
        seconds = self.model_text_seconds
        if not _is_number(seconds) or not 0 <= seconds <= 86400:
            raise LookaheadConfigError(
                f"model_text_seconds must be a number from 0 to 86400, got {seconds!r}."
            )
        _check_int("shared_capacity", self.shared_capacity, 1, 1 << 24)
        _check_int("seed", self.seed, 0, (1 << 32) - 1)
        for key in ("verify_window", "controller"):
            if not isinstance(getattr(self, key), bool):
                raise LookaheadConfigError(
                    f"{key} must be true or false, got {getattr(self, key)!r}."
                )
        object.__setattr__(self, "step_cost", _check_step_cost(self.step_cost))
        fraction = self.scratch_fraction
        if not _is_number(fraction):
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
                "window_size (1 to 128) or add 'suffix', 'output' or a 'module:Class' to sources."
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
        cost = self.step_cost
        points = cost if isinstance(cost, str) else [list(point) for point in cost]
        return asdict(self) | {"sources": list(self.sources), "step_cost": points}

    def sized(self, free_tokens: int) -> LookaheadConfig:
        """The configuration with numbers for its "auto" sizes.

        Args:
            free_tokens: how many tokens a step may feed at about the cost of one.
        """
        shape = next(shape for shape in reversed(AUTO_SHAPES) if shape[0] <= free_tokens)
        chosen = dict(zip(TREE_SIZES, shape[1:], strict=True))
        sizes = {key: size for key, size in chosen.items() if _is_auto(getattr(self, key))}
        if _is_auto(self.draft_length) and _is_auto(self.ngram_size):
            sizes["draft_length"] = AUTO_DRAFT_LENGTH
        return replace(self, **cast(dict[str, Any], sizes))

    @property
    def largest(self) -> LookaheadConfig:
        """The configuration with the largest numbers that its "auto" sizes may get."""
        return self.sized(AUTO_SHAPES[-1][0])

    @property
    def is_jacobi(self) -> bool:
        """Plain Jacobi decoding (paper, section 2): one row of guesses, no n-grams."""
        return self.ngram_size == 2 and self.verification_set_size == 0

    # What follows wants numbers for all sizes: see `sized` and `largest`.

    @property
    def num_draft_tokens(self) -> int:
        """Most draft tokens that a step may accept."""
        if not _is_auto(self.draft_length):
            return self.draft_length
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
    def uses_model_text(self) -> bool:
        """Whether text that the model wrote by itself is wanted."""
        return self.verification_set_size != 0 and "model" in self.sources

    @property
    def uses_pool(self) -> bool:
        """Whether n-grams are pooled at all."""
        return self.verification_set_size > 0 and any(s in POOLED_SOURCES for s in self.sources)


def nearest_hint(word: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown ``word``: a suggestion if there is a near one."""
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else "."


def _is_auto(size: object) -> bool:
    return size == AUTO


def _check_int(key: str, value: object, low: int, high: int, other: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise LookaheadConfigError(
            f"{key} must be an integer from {low} to {high}{other}, got {value!r} "
            f"({type(value).__name__})."
        )
    if not low <= value <= high:
        raise LookaheadConfigError(f"{key} must be from {low} to {high}{other}, got {value}.")


def _check_step_cost(value: object) -> Any:
    if value in ("measured", "flat"):
        return value
    points = value if isinstance(value, list | tuple) else ()
    if not all(map(_is_step_cost_point, points)):
        points = ()
    tokens = [point[0] for point in points]
    if not tokens or tokens != sorted(set(tokens)):
        raise LookaheadConfigError(
            'step_cost must be "measured", "flat" or ascending pairs of tokens and cost, such as '
            f"[[1, 1.0], [16, 1.5]], got {value!r}."
        )
    return tuple((int(count), float(cost)) for count, cost in points)


def _is_step_cost_point(point: object) -> bool:
    return (
        isinstance(point, list | tuple)
        and len(point) == 2
        and all(_is_number(number) and 0 < number < inf for number in point)
        and point[0] == int(point[0])
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
