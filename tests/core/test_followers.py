"""The table of what followed n-grams, against texts counted by hand."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lookahead.core.followers import (
    MOST_FOLLOWERS,
    NUM_EVIDENCES,
    NUM_SHARES,
    FollowerTable,
    evidence_of,
)
from vllm_lookahead.core.suffix import MATCH_LENGTHS

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=4)


def counted(texts: list[list[int]], ngram: tuple[int, ...]) -> Counter[int]:
    """How often each token followed the n-gram."""
    size = len(ngram)
    return Counter(
        text[end]
        for text in texts
        for end in range(size, len(text))
        if tuple(text[end - size : end]) == ngram
    )


@given(TEXTS, st.lists(st.integers(0, 3), max_size=10))
def test_followers_are_those_of_the_longest_ngram_that_ends_the_text(
    texts: list[list[int]], text: list[int]
) -> None:
    match, followers = FollowerTable(texts).followers(tuple(text))
    lengths = [length for length in MATCH_LENGTHS if length <= len(text)]
    known = [length for length in lengths if counted(texts, tuple(text[-length:]))]
    if not known:
        assert (match, list(followers)) == (-1, [])
        return
    assert MATCH_LENGTHS[match] == known[-1]
    counts = counted(texts, tuple(text[-known[-1] :]))
    expected = {token: evidence_of(count, counts.total()) for token, count in counts.items()}
    assert dict(followers) == expected


def test_most_frequent_followers_are_kept_the_most_frequent_first() -> None:
    counts = {token: 20 - token for token in range(10, 20)}
    texts = [[1, token] for token, count in counts.items() for _ in range(count)]
    match, followers = FollowerTable(texts).followers((1,))
    assert match == 0
    assert [token for token, _ in followers] == list(counts)[:MOST_FOLLOWERS]
    # Shares are of all that followed, also of what isn't kept.
    assert followers[0] == (10, evidence_of(10, sum(counts.values())))


def test_texts_do_not_run_into_each_other() -> None:
    table = FollowerTable([[1, 2], [3, 4]])
    assert table.followers((2,)) == (-1, ())
    assert table.followers((1, 2, 3)) == (0, ((4, evidence_of(1, 1)),))


@pytest.mark.parametrize("texts", [[], [[]], [[1]]])
def test_nothing_follows_in_texts_without_two_tokens(texts: list[list[int]]) -> None:
    assert FollowerTable(texts).followers((1,)) == (-1, ())


@pytest.mark.parametrize("size", [10_000, 22_000, 50_000])
@pytest.mark.parametrize("vocab_size", [200, 50_000])
def test_token_of_the_texts_takes_no_more_memory_than_documented(
    size: int, vocab_size: int
) -> None:
    rng = random.Random(0)
    tracemalloc.start()
    try:
        # Nothing follows anything twice, or everything does.
        table = FollowerTable([[rng.randrange(vocab_size) for _ in range(size)]])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del table
    assert held < 600 * size


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_evidence_grows_with_the_total_and_of_one_total_with_the_share(one: int, two: int) -> None:
    count, total = sorted((one, two))
    evidence = evidence_of(count, total)
    assert 0 <= evidence < NUM_EVIDENCES
    assert evidence <= evidence_of(total, total)
    assert evidence // NUM_SHARES <= evidence_of(count, 2 * total) // NUM_SHARES


def test_what_always_followed_is_told_apart_from_what_nearly_always_did() -> None:
    assert evidence_of(1000, 1000) > evidence_of(998, 1000)
