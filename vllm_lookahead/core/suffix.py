"""What followed the end of a text before: the longest match, without a scan of the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

Known = TypeVar("Known")

MATCH_LENGTHS = (1, 2, 4, 8)
"""Lengths of the suffixes that are indexed, in tokens."""
LONGEST_MATCH = MATCH_LENGTHS[-1]
MAX_FOLLOWERS = 4
"""Different tokens that are remembered to have followed a suffix, the newest ones."""
_COUNT_BITS = 8
_MAX_COUNT = (1 << _COUNT_BITS) - 1

Followers = Sequence[tuple[int, int]]
"""(token, how often it followed), the newest last."""


def suffix_keys(tokens: Sequence[int], end: int) -> list[int]:
    """Hashes of the suffixes of ``tokens[:end]`` that are indexed, the shortest first.

    They stand for the suffixes: a collision proposes a wrong candidate, which costs a little time
    and no more.
    """
    tail = tuple(tokens[max(0, end - LONGEST_MATCH) : end])
    return [hash(tail[-length:]) for length in MATCH_LENGTHS if length <= len(tail)]


def longest_match(tail: tuple[int, ...], *tables: Mapping[int, Known]) -> tuple[int, Known | None]:
    """What the first table that has it holds of the longest suffix that any of them has.

    Args:
        tail: the end of a text, of which at most `LONGEST_MATCH` tokens are looked at.
        tables: by `suffix_keys`.

    Returns:
        (k, what is held) of a suffix of ``MATCH_LENGTHS[k]`` tokens; (-1, None) if there is none.
    """
    size = len(tail)
    for k in range(len(MATCH_LENGTHS) - 1, -1, -1):
        length = MATCH_LENGTHS[k]
        if length > size:
            continue
        key = hash(tail[-length:])
        for table in tables:
            known = table.get(key)
            if known is not None:
                return k, known
    return -1, None


class SuffixIndex:
    """For every suffix of `MATCH_LENGTHS`, the tokens that followed it and how often.

    A dictionary entry per length and token, by `suffix_keys`.
    """

    def __init__(self, capacity: int, vocab_size: int | None = None) -> None:
        """
        Args:
            capacity: tokens after which the oldest half of the entries may leave. Between one
                and two times as many are indexed.
            vocab_size: when given, tokens outside of it (placeholders of images) follow nothing.
        """
        self._capacity = capacity
        self._vocab_size = vocab_size
        # Most suffixes are followed by one token only: token << 8 | count, to save memory.
        self._young: dict[int, int | dict[int, int]] = {}
        self._old: dict[int, int | dict[int, int]] = {}
        self._young_tokens = 0
        self._old_tokens = 0

    def __len__(self) -> int:
        """Number of tokens indexed."""
        return self._young_tokens + self._old_tokens

    def extend(self, tokens: Sequence[int], first: int) -> None:
        """Index what precedes each of ``tokens[first:]``, all of ``tokens[:first]`` being done."""
        for position in range(first, len(tokens)):
            token = tokens[position]
            if self._vocab_size is None or token < self._vocab_size:
                self._insert(suffix_keys(tokens, position), token)
            self._young_tokens += 1
            if self._young_tokens >= self._capacity:
                self._old, self._old_tokens = self._young, self._young_tokens
                self._young, self._young_tokens = {}, 0

    def _insert(self, keys: Sequence[int], token: int) -> None:
        young = self._young
        for key in keys:
            known = young.get(key)
            if known is None:
                young[key] = token << _COUNT_BITS | 1
            elif isinstance(known, dict):
                known[token] = known.pop(token, 0) + 1
                if len(known) > MAX_FOLLOWERS:
                    del known[next(iter(known))]
            elif known >> _COUNT_BITS != token:
                young[key] = {known >> _COUNT_BITS: known & _MAX_COUNT, token: 1}
            elif known & _MAX_COUNT < _MAX_COUNT:
                young[key] = known + 1

    def followers(self, tail: tuple[int, ...]) -> tuple[int, Followers]:
        """What followed the longest indexed match of the end of a text.

        Args:
            tail: the text's end, of which at most `LONGEST_MATCH` tokens are looked at.

        Returns:
            (k, followers) of a match of ``MATCH_LENGTHS[k]`` tokens; (-1, ()) if there is none.
        """
        k, known = longest_match(tail, self._young, self._old)
        if known is None:
            return k, ()
        if isinstance(known, dict):
            return k, tuple(known.items())
        return k, ((known >> _COUNT_BITS, known & _MAX_COUNT),)
