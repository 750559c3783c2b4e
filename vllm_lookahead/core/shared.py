"""Texts of finished requests, in which later ones may find what comes next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from vllm_lookahead.core.suffix import SuffixIndex


class SharedTexts:
    """Bounded texts by key; what has one key never shows in what has another.

    The keys used longest ago leave first; within a key the older half.
    """

    def __init__(self, capacity: int, vocab_size: int | None = None) -> None:
        """
        Args:
            capacity: tokens kept in all.
            vocab_size: as for `SuffixIndex`.
        """
        self._capacity = capacity
        self._vocab_size = vocab_size
        # In the order of their last use.
        self._indices: dict[Hashable, SuffixIndex] = {}

    def __len__(self) -> int:
        """Number of tokens held."""
        return sum(map(len, self._indices.values()))

    def add(self, key: Hashable, text: Sequence[int]) -> None:
        """Keep ``text``, of which no more than the capacity's last tokens."""
        index = self._indices.pop(key, None)
        if index is None:
            # It holds up to twice its own capacity.
            index = SuffixIndex(max(1, self._capacity // 2), self._vocab_size)
        index.extend(text[-self._capacity :], 0)
        self._indices[key] = index
        while len(self) > self._capacity and len(self._indices) > 1:
            del self._indices[next(iter(self._indices))]

    def get(self, key: Hashable) -> SuffixIndex | None:
        """What the texts of a key say comes next; None if there is no text."""
        return self._indices.get(key)
