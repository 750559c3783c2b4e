"""What followed the last few tokens in texts that don't change, and how surely."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

from vllm_lookahead.core.suffix import longest_match, suffix_keys

MOST_FOLLOWERS = 6
"""Tokens that are kept of those that followed the same tokens, the most frequent ones."""
_TOTALS = (1, 2, 4, 9)
_SHARES = (0.06, 0.12, 0.25, 0.45, 0.7, 0.999)
NUM_TOTALS = 1 + len(_TOTALS)
NUM_SHARES = 1 + len(_SHARES)
NUM_EVIDENCES = NUM_TOTALS * NUM_SHARES
_ONCE = NUM_SHARES - 1
"""Evidence of what followed once, and nothing else did."""
_EVIDENCE_BITS = 8
_EVIDENCE_MASK = (1 << _EVIDENCE_BITS) - 1

Evidences = Sequence[tuple[int, int]]
"""(token, evidence)."""


def evidence_of(count: int, total: int) -> int:
    """Class of what followed ``count`` of ``total`` times, 0 to ``NUM_EVIDENCES - 1``.

    By the total first; of one total, the larger share comes later.
    """
    return bisect_left(_TOTALS, total) * NUM_SHARES + bisect_right(_SHARES, count / total)


class FollowerTable:
    """For every n-gram of `MATCH_LENGTHS` in some texts, the tokens that followed it most often."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        """
        Args:
            texts: token ids of each text.
        """
        # By `suffix_keys`. Most n-grams are followed by one token once: that token alone, to save
        # memory.
        self._table: dict[int, int | tuple[int, ...]] = {
            key: found if isinstance(found, int) else _most_frequent(found)
            for key, found in _count(texts).items()
        }

    def followers(self, tail: tuple[int, ...]) -> tuple[int, Evidences]:
        """What followed the longest match of the end of a text.

        Args:
            tail: the text's end, of which at most `LONGEST_MATCH` tokens are looked at.

        Returns:
            (k, followers) of a match of ``MATCH_LENGTHS[k]`` tokens; (-1, ()) if there is none.
        """
        k, found = longest_match(tail, self._table)
        if found is None:
            return k, ()
        if isinstance(found, int):
            return k, ((found, _ONCE),)
        return k, [(packed >> _EVIDENCE_BITS, packed & _EVIDENCE_MASK) for packed in found]


def _count(texts: Sequence[Sequence[int]]) -> dict[int, int | Counter[int]]:
    """By `suffix_keys` what followed: a token, if it was there once, or how often each did."""
    counts: dict[int, int | Counter[int]] = {}
    for text in texts:
        for position in range(1, len(text)):
            token = text[position]
            for key in suffix_keys(text, position):
                known = counts.get(key)
                if known is None:
                    counts[key] = token
                elif isinstance(known, int):
                    counts[key] = Counter((known, token))
                else:
                    known[token] += 1
    return counts


def _most_frequent(counts: Counter[int]) -> tuple[int, ...]:
    total = counts.total()
    return tuple(
        token << _EVIDENCE_BITS | evidence_of(count, total)
        for token, count in counts.most_common(MOST_FOLLOWERS)
    )
