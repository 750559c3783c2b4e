"""What followed a suffix, against a naive scan of the text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lookahead.core.suffix import LONGEST_MATCH, MATCH_LENGTHS, MAX_FOLLOWERS, SuffixIndex

PLENTY = 1000

TEXTS = st.lists(st.integers(0, 2), max_size=40) | st.lists(
    st.integers(0, 2), min_size=LONGEST_MATCH, max_size=14
).map(lambda part: 3 * part)
"""Few tokens or a repeated part, so that suffixes of all lengths recur."""
WIDE_TEXTS = st.lists(st.integers(0, MAX_FOLLOWERS + 2), max_size=80)
"""More tokens than are remembered to have followed a suffix."""


def index_of(
    tokens: list[int], capacity: int = PLENTY, vocab_size: int | None = None
) -> SuffixIndex:
    index = SuffixIndex(capacity, vocab_size)
    index.extend(tokens, 0)
    return index


def followed(tokens: list[int], suffix: list[int], first: int = 0) -> list[int]:
    """All that followed ``suffix`` in the text from ``first`` on, the newest last."""
    size = len(suffix)
    positions = range(max(first, size), len(tokens))
    return [tokens[end] for end in positions if tokens[end - size : end] == suffix]


def remembered(following: list[int]) -> list[tuple[int, int]]:
    """The newest different tokens; each counts since so many others made it forgotten."""
    newest = list(dict.fromkeys(reversed(following)))[:MAX_FOLLOWERS]
    counts = []
    for token in reversed(newest):
        count, others = 0, set[int]()
        for each in reversed(following):
            if each != token:
                others.add(each)
            elif len(others) >= MAX_FOLLOWERS:
                break
            else:
                count, others = count + 1, set()
        counts.append((token, count))
    return counts


def scan(
    tokens: list[int], tail: list[int], first: int = 0, vocab_size: int = PLENTY
) -> tuple[int, Sequence[tuple[int, int]]]:
    """What `SuffixIndex.followers` promises, of the text from ``first`` on."""
    for k, length in reversed(list(enumerate(MATCH_LENGTHS))):
        if length <= len(tail):
            following = followed(tokens, tail[-length:], first)
            known = remembered([token for token in following if token < vocab_size])
            if known:
                return k, tuple(known)
    return -1, ()


# Matches


@pytest.mark.parametrize(
    ("tokens", "length", "follower"),
    [
        ([5, 5], 1, 5),
        ([1, 2, 3, 1], 1, 2),
        ([1, 2, 3, 1, 2], 2, 3),
        # Three tokens agree, but only two and four are indexed.
        ([1, 2, 3, 4, 1, 2, 3], 2, 4),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], 4, 9),
        ([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5, 6, 7], 4, 9),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8], 8, 9),
    ],
)
def test_longest_match_is_found_with_what_followed_it(
    tokens: list[int], length: int, follower: int
) -> None:
    k, followers = index_of(tokens).followers(tuple(tokens))
    assert (MATCH_LENGTHS[k], followers) == (length, ((follower, 1),))


def test_followers_come_newest_last_with_how_often_they_followed() -> None:
    # After 1: 2, 3, 2, 4, 3.
    assert index_of([1, 2, 1, 3, 1, 2, 1, 4, 1, 3, 1]).followers((1,)) == (
        0,
        ((2, 2), (4, 1), (3, 2)),
    )


def test_longer_match_counts_more_than_a_later_one() -> None:
    tokens = [1, 2, 3, 9, 2, 4, 1, 2]
    assert index_of(tokens).followers((1, 2)) == (1, ((3, 1),))


def test_only_the_newest_of_many_followers_are_remembered() -> None:
    tokens = [each for follower in (2, 3, 4, 5, 2, 6) for each in (1, follower)]
    # 3 was the one that followed longest ago when 6 came as the fifth.
    assert index_of(tokens).followers((1,)) == (0, ((4, 1), (5, 1), (2, 2), (6, 1)))


def test_follower_that_comes_back_counts_anew() -> None:
    tokens = [each for follower in (2, 2, 3, 4, 5, 6, 2) for each in (1, follower)]
    assert index_of(tokens).followers((1,)) == (0, ((4, 1), (5, 1), (6, 1), (2, 1)))


@pytest.mark.parametrize(("size", "count"), [(255, 254), (256, 255), (1000, 255)])
def test_count_of_an_only_follower_ends_at_255(size: int, count: int) -> None:
    index = index_of([5] * size, capacity=2000)
    assert index.followers((5,)) == (0, ((5, count),))
    # The full count has not run over into the token or the count of another one.
    index.extend([*[5] * size, 6], size)
    assert index.followers((5,)) == (0, ((5, count), (6, 1)))


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_text_whose_last_token_is_new_has_no_match(tokens: list[int]) -> None:
    assert index_of(tokens).followers(tuple(tokens)) == (-1, ())


def test_what_follows_may_be_asked_of_an_end_that_the_text_has_not() -> None:
    assert index_of([1, 2, 3, 4]).followers((9, 9, 2, 3)) == (1, ((4, 1),))


@given(TEXTS)
def test_followers_of_a_texts_end_are_what_a_scan_of_the_text_finds(tokens: list[int]) -> None:
    assert index_of(tokens).followers(tuple(tokens)) == scan(tokens, tokens)


@given(WIDE_TEXTS, st.lists(st.integers(0, MAX_FOLLOWERS + 2), max_size=8))
def test_followers_of_any_end_are_what_a_scan_of_the_text_finds(
    tokens: list[int], tail: list[int]
) -> None:
    assert index_of(tokens).followers(tuple(tail)) == scan(tokens, tail)


@given(TEXTS, st.lists(st.integers(0, 2), min_size=LONGEST_MATCH, max_size=12))
def test_no_more_than_the_longest_match_is_looked_at(tokens: list[int], tail: list[int]) -> None:
    index = index_of(tokens)
    assert index.followers(tuple(tail)) == index.followers(tuple(tail[-LONGEST_MATCH:]))


@given(WIDE_TEXTS, st.lists(st.integers(0, 80), max_size=5))
def test_text_indexed_in_any_pieces_has_the_followers_of_the_whole_text(
    tokens: list[int], cuts: list[int]
) -> None:
    index = SuffixIndex(PLENTY)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for first, last in pairwise(edges):
        index.extend(tokens[:last], first)
        assert index.followers(tuple(tokens[:last])) == scan(tokens[:last], tokens[:last])
    assert len(index) == len(tokens)


# The vocabulary


def test_token_outside_of_the_vocabulary_follows_nothing() -> None:
    index = index_of([1, 2, 300, 3, 1], vocab_size=300)
    assert index.followers((1, 2)) == (-1, ())
    assert index.followers((2, 300)) == (1, ((3, 1),))


@given(TEXTS, st.lists(st.integers(0, 2), max_size=8))
def test_followers_are_those_of_a_scan_that_are_in_the_vocabulary(
    tokens: list[int], tail: list[int]
) -> None:
    index = index_of(tokens, vocab_size=2)
    assert index.followers(tuple(tail)) == scan(tokens, tail, vocab_size=2)


# Bounds


@given(TEXTS, st.integers(1, 12))
def test_at_least_the_newest_tokens_are_known(tokens: list[int], capacity: int) -> None:
    k, followers = index_of(tokens, capacity).followers(tuple(tokens))
    assert k >= scan(tokens, tokens, first=len(tokens) - capacity)[0]
    if k >= 0:
        following = followed(tokens, tokens[-MATCH_LENGTHS[k] :])
        assert followers[-1][0] == following[-1]
        assert all(1 <= count <= following.count(token) for token, count in followers)


def test_oldest_tokens_are_forgotten() -> None:
    tokens = [0, 1, *range(100, 150), 0]
    assert index_of(tokens).followers((0,)) == (0, ((1, 1),))
    assert index_of(tokens, capacity=10).followers((0,)) == (-1, ())


def test_followers_of_the_older_half_are_known_until_the_newer_has_some() -> None:
    # Two halves of 4 tokens: 1 was followed by 2 twice in the older one.
    index = index_of([1, 2, 1, 2, 9, 1], capacity=4)
    assert index.followers((1,)) == (0, ((2, 2),))
    index.extend([1, 2, 1, 2, 9, 1, 3], 6)
    assert index.followers((1,)) == (0, ((3, 1),))


@given(st.integers(1, 20), st.integers(0, 300))
def test_index_holds_at_most_twice_its_capacity(capacity: int, size: int) -> None:
    # No token twice, and all but the last one are followed by something.
    index = index_of(list(range(size)), capacity)
    assert min(capacity, size) <= len(index) <= 2 * capacity
    known = sum(index.followers((token,))[0] >= 0 for token in range(size))
    assert min(capacity, size - 1) <= known <= len(index)
