"""Texts of finished requests, in which later ones may find what comes next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from vllm_lookahead.core.suffix import SuffixIndex

_END = -1
"""Stands behind each text: no token, so it matches nothing."""


class _Corpus:
    """Texts one after the other, with their suffix index."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._index = SuffixIndex(1 << 62)

    def add(self, text: Sequence[int]) -> None:
        first = len(self.tokens)
        self.tokens += text
        self.tokens.append(_END)
        self._index.extend(self.tokens, first)

    def find(self, tokens: Sequence[int], length: int) -> tuple[int, tuple[int, ...]]:
        match, position = self._index.longest(tokens)
        if match < 0:
            return -1, ()
        chain = self.tokens[position : position + length]
        if _END in chain:
            chain = chain[: chain.index(_END)]
        return match, tuple(chain)


class SharedTexts:
    """Bounded texts by key; what has one key never shows in what has another.

    About 0.7 kB per token. The keys used longest ago leave first; within a key the older half.
    """

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: tokens kept in all, plus at most the last text.
        """
        self._capacity = capacity
        # Young and old half of each key, in the order of their last use.
        self._corpora: dict[Hashable, tuple[_Corpus, _Corpus]] = {}

    def __len__(self) -> int:
        """Number of tokens held."""
        return sum(len(half.tokens) for halves in self._corpora.values() for half in halves)

    def add(self, key: Hashable, text: Sequence[int]) -> None:
        """Keep ``text``, of which no more than the capacity's last tokens."""
        halves = (_Corpus(), _Corpus())
        young, old = self._corpora.pop(key, halves)
        if len(young.tokens) >= self._capacity // 2:
            young, old = _Corpus(), young
        young.add(text[-self._capacity :])
        self._corpora[key] = young, old
        while len(self) > self._capacity and len(self._corpora) > 1:
            del self._corpora[next(iter(self._corpora))]
        if len(self) > self._capacity:
            self._corpora[key] = young, _Corpus()

    def find(
        self, key: Hashable, tokens: Sequence[int], length: int
    ) -> tuple[int, tuple[int, ...]]:
        """What followed the longest match of the end of ``tokens``.

        Returns:
            (k, chain): a match of ``MATCH_LENGTHS[k]`` tokens and up to ``length`` tokens that
            followed it; k is -1 if there is none.
        """
        halves = self._corpora.get(key)
        if halves is None:
            return -1, ()
        young, old = (half.find(tokens, length) for half in halves)
        return young if young[0] >= old[0] else old
