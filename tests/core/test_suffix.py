"""Suffix matches against a naive scan of the text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lookahead.core.suffix import MATCH_LENGTHS, SuffixIndex, continuation

PLENTY = 1000

TEXTS = st.lists(st.integers(0, 2), max_size=40)
"""Few tokens, so that suffixes of all lengths recur."""


def index_of(tokens: list[int], capacity: int = PLENTY) -> SuffixIndex:
    index = SuffixIndex(capacity)
    index.extend(tokens, 0)
    return index


def scan(tokens: list[int], first: int = 0) -> tuple[int, int]:
    """The longest match of the end among the texts that start at ``first`` or later."""
    for length in sorted(MATCH_LENGTHS, reverse=True):
        for position in range(len(tokens) - 1, max(first, length) - 1, -1):
            if tokens[position - length : position] == tokens[len(tokens) - length :]:
                return MATCH_LENGTHS.index(length), position
    return -1, 0


# Matches


@pytest.mark.parametrize(
    ("tokens", "length", "position"),
    [
        ([5, 5], 1, 1),
        ([1, 2, 3, 1], 1, 1),
        ([1, 2, 3, 1, 2], 2, 2),
        ([1, 2, 3, 4, 1, 2, 3], 3, 3),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], 4, 4),
        # Five tokens agree, but only four and six are indexed.
        ([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], 4, 5),
        ([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5, 6], 6, 6),
    ],
)
def test_longest_match_is_found_with_what_followed_it(
    tokens: list[int], length: int, position: int
) -> None:
    assert index_of(tokens).longest(tokens) == (MATCH_LENGTHS.index(length), position)


def test_last_occurrence_counts() -> None:
    tokens = [1, 2, 1, 3, 1, 4, 1]
    assert index_of(tokens).longest(tokens) == (0, 5)


def test_longer_match_counts_more_than_a_later_one() -> None:
    tokens = [1, 2, 3, 9, 2, 4, 1, 2]
    assert index_of(tokens).longest(tokens) == (1, 2)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_text_whose_last_token_is_new_has_no_match(tokens: list[int]) -> None:
    assert index_of(tokens).longest(tokens) == (-1, 0)


def test_end_of_the_text_is_no_match_of_itself() -> None:
    index = index_of([1, 2, 3])
    assert len(index) > 0
    assert index.longest([1, 2, 3]) == (-1, 0)


@given(TEXTS)
def test_match_is_what_a_scan_of_the_text_finds(tokens: list[int]) -> None:
    assert index_of(tokens).longest(tokens) == scan(tokens)


@given(TEXTS, st.lists(st.integers(0, 40), max_size=5))
def test_text_indexed_in_any_pieces_has_the_matches_of_the_whole_text(
    tokens: list[int], cuts: list[int]
) -> None:
    index = SuffixIndex(PLENTY)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for first, last in pairwise(edges):
        index.extend(tokens[:last], first)
        assert index.longest(tokens[:last]) == scan(tokens[:last])
    assert len(index) == len(index_of(tokens))


# Bounds


@given(TEXTS, st.integers(1, 12))
def test_at_least_the_newest_tokens_are_known(tokens: list[int], capacity: int) -> None:
    match, position = index_of(tokens, capacity).longest(tokens)
    newest = scan(tokens, first=len(tokens) - capacity)
    assert (match, position) >= newest
    if match >= 0:
        length = MATCH_LENGTHS[match]
        assert tokens[position - length : position] == tokens[len(tokens) - length :]


def test_oldest_tokens_are_forgotten() -> None:
    tokens = [0, 1, *range(100, 150), 0]
    assert index_of(tokens).longest(tokens) == (0, 1)
    assert index_of(tokens, capacity=10).longest(tokens) == (-1, 0)


@given(st.integers(1, 20), st.integers(0, 300))
def test_index_holds_entries_of_at_most_twice_its_capacity(capacity: int, size: int) -> None:
    # No token twice: five entries each. The last one before a turn may come with four others.
    index = index_of(list(range(size)), capacity)
    assert len(index) <= 2 * 5 * capacity + 4
    assert len(index) >= min(5 * capacity, 5 * size - 5 * 6)


# Continuations


def test_continuation_is_the_text_behind_the_match() -> None:
    assert continuation([1, 2, 3, 4, 5], 1, 3) == (2, 3, 4)


def test_continuation_beyond_the_end_comes_round() -> None:
    assert continuation([1, 2, 3, 4, 5], 3, 5) == (4, 5, 4, 5, 4)
    assert continuation([1, 2, 3], 2, 3) == (3, 3, 3)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=10), st.integers(0, 9), st.integers(1, 12))
def test_continuation_is_what_copying_token_by_token_yields(
    tokens: list[int], position: int, length: int
) -> None:
    position %= len(tokens)
    text = list(tokens)
    copied = []
    for each in range(position, position + length):
        copied.append(text[each])
        text.append(text[each])
    assert continuation(tokens, position, length) == tuple(copied)
