"""Where the end of a text occurred before: the longest match, without a scan of the text."""

from __future__ import annotations

from collections.abc import Sequence

MATCH_LENGTHS = (1, 2, 3, 4, 6)
"""Lengths of the suffixes that are indexed, in tokens."""


class SuffixIndex:
    """For every suffix of `MATCH_LENGTHS`, what followed its last occurrence.

    Five dictionary entries (about 0.6 kB) per token. Hashes stand for suffixes: a collision
    proposes a wrong candidate, which costs a little time and no more.
    """

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: tokens after which the oldest half of the entries may leave. Between one
                and two times as many are indexed.
        """
        self._capacity = capacity * len(MATCH_LENGTHS)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of entries held."""
        return len(self._young) + len(self._old)

    def extend(self, tokens: Sequence[int], first: int) -> None:
        """Index what precedes each of ``tokens[first:]``, all of ``tokens[:first]`` being done."""
        young = self._young
        for position in range(first, len(tokens)):
            for length in MATCH_LENGTHS:
                if length > position:
                    break
                young[hash(tuple(tokens[position - length : position]))] = position
            if len(young) >= self._capacity:
                self._old = young
                young = self._young = {}

    def longest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The longest indexed match of the end of ``tokens``.

        Returns:
            (k, position): the match has ``MATCH_LENGTHS[k]`` tokens and the last text that
            followed it starts at ``position``; (-1, 0) if there is none.
        """
        size = len(tokens)
        for k in range(len(MATCH_LENGTHS) - 1, -1, -1):
            length = MATCH_LENGTHS[k]
            if length > size:
                continue
            key = hash(tuple(tokens[size - length :]))
            position = self._young.get(key)
            if position is None:
                position = self._old.get(key)
            if position is not None:
                return k, position
        return -1, 0


def continuation(tokens: Sequence[int], position: int, length: int) -> tuple[int, ...]:
    """``length`` tokens of the text from ``position`` on, which repeats at its end.

    A text that has come round to ``position`` goes on as it did from there.
    """
    chain = list(tokens[position : position + length])
    period = len(chain)
    while len(chain) < length:
        chain.append(chain[len(chain) - period])
    return tuple(chain)
