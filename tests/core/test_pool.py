"""The n-gram pool: order, bounds and what text puts in."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lookahead.core.pool import Ngram, NgramPool


def pairs(pool: NgramPool, key: int) -> list[Ngram]:
    """All values of ``key``, for pools of far fewer than 100."""
    return list(pool.lookup(key, 100))


def test_lookup_yields_the_newest_first() -> None:
    pool = NgramPool(value_size=2, per_key=3, capacity=10)
    for value in [(1, 1), (2, 2), (3, 3)]:
        pool.insert(7, value)
    assert pairs(pool, 7) == [(3, 3), (2, 2), (1, 1)]


def test_lookup_yields_at_most_the_limit() -> None:
    pool = NgramPool(value_size=1, per_key=3, capacity=10)
    for token in (1, 2, 3):
        pool.insert(7, (token,))
    assert list(pool.lookup(7, 2)) == [(3,), (2,)]
    assert list(pool.lookup(7, 0)) == []


def test_text_outside_of_the_vocabulary_is_in_no_value() -> None:
    pool = NgramPool(value_size=2, per_key=3, capacity=10)
    pool.insert_text([1, 2, 300, 3, 4, 5], 0, 6, vocab_size=300)
    # 300 may stand before a value, as its key, but not in one.
    assert len(pool) == 2
    assert pairs(pool, 300) == [(3, 4)]
    assert pairs(pool, 3) == [(4, 5)]


def test_lookup_of_an_unknown_key_is_empty() -> None:
    assert pairs(NgramPool(value_size=1, per_key=1, capacity=1), 7) == []


def test_repeated_value_moves_up_instead_of_being_kept_twice() -> None:
    pool = NgramPool(value_size=1, per_key=3, capacity=10)
    for token in (1, 2, 3, 1):
        pool.insert(7, (token,))
    assert pairs(pool, 7) == [(1,), (3,), (2,)]
    assert len(pool) == 3


def test_oldest_value_of_a_full_key_leaves() -> None:
    pool = NgramPool(value_size=1, per_key=2, capacity=10)
    for token in (1, 2, 3):
        pool.insert(7, (token,))
    assert pairs(pool, 7) == [(3,), (2,)]
    assert len(pool) == 2


def test_full_pool_drops_the_key_unused_for_longest_whole() -> None:
    pool = NgramPool(value_size=1, per_key=2, capacity=4)
    for key, token in [(1, 10), (1, 11), (2, 20), (2, 21), (3, 30)]:
        pool.insert(key, (token,))
    assert pairs(pool, 1) == []
    assert pairs(pool, 2) == [(21,), (20,)]
    assert pairs(pool, 3) == [(30,)]
    assert len(pool) == 3


def test_repeating_a_value_counts_as_use_of_its_key() -> None:
    pool = NgramPool(value_size=1, per_key=2, capacity=2)
    for key in (1, 2, 1, 3):
        pool.insert(key, (0,))
    assert (pairs(pool, 1), pairs(pool, 2), pairs(pool, 3)) == ([(0,)], [], [(0,)])


def test_pool_smaller_than_one_key_keeps_the_newest() -> None:
    pool = NgramPool(value_size=1, per_key=5, capacity=2)
    for token in (1, 2, 3):
        pool.insert(7, (token,))
    assert pairs(pool, 7) == [(3,), (2,)]


@pytest.mark.parametrize("value", [(), (1,), (1, 2, 3)])
def test_value_of_another_length_is_refused(value: Ngram) -> None:
    pool = NgramPool(value_size=2, per_key=1, capacity=1)
    with pytest.raises(ValueError, match=f"{len(value)} tokens, not 2"):
        pool.insert(7, value)


# Text


class Recorder(NgramPool):
    """A pool that writes down what it is given."""

    def __init__(self, value_size: int) -> None:
        super().__init__(value_size, per_key=10, capacity=100)
        self.inserted: list[tuple[int, Ngram]] = []

    def insert(self, key: int, value: Ngram) -> None:
        self.inserted.append((key, value))
        super().insert(key, value)


def test_text_yields_every_ngram_once_in_order() -> None:
    pool = Recorder(value_size=2)
    pool.insert_text([5, 6, 7, 8, 9], 0, 5)
    assert pool.inserted == [(5, (6, 7)), (6, (7, 8)), (7, (8, 9))]


def test_text_in_pieces_yields_the_ngrams_across_the_cut_with_the_later_piece() -> None:
    pool = Recorder(value_size=2)
    pool.insert_text([5, 6, 7], 0, 3)
    assert pool.inserted == [(5, (6, 7))]
    pool.insert_text([5, 6, 7, 8, 9], 3, 5)
    assert pool.inserted[1:] == [(6, (7, 8)), (7, (8, 9))]


def test_text_shorter_than_an_ngram_yields_none() -> None:
    pool = Recorder(value_size=2)
    pool.insert_text([5, 6], 0, 2)
    assert pool.inserted == []


@given(
    st.lists(st.integers(0, 3), max_size=20),
    st.integers(1, 4),
    st.lists(st.integers(0, 20), max_size=4),
)
def test_text_in_any_pieces_yields_what_the_whole_text_yields(
    tokens: list[int], value_size: int, cuts: list[int]
) -> None:
    pool = Recorder(value_size)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for first, last in pairwise(edges):
        pool.insert_text(tokens[:last], first, last)
    assert pool.inserted == [
        (tokens[start], tuple(tokens[start + 1 : start + 1 + value_size]))
        for start in range(len(tokens) - value_size)
    ]


# Bounds


class NaivePool:
    """The same pool as one flat list of (key, value), newest last, without a size to keep."""

    def __init__(self, per_key: int, capacity: int) -> None:
        self.per_key = per_key
        self.capacity = capacity
        self.entries: list[tuple[int, Ngram]] = []

    def insert(self, key: int, value: Ngram) -> None:
        self.entries = [entry for entry in self.entries if entry != (key, value)] + [(key, value)]
        own = [entry for entry in self.entries if entry[0] == key]
        for entry in own[: -min(self.per_key, self.capacity)]:
            self.entries.remove(entry)
        while len(self.entries) > self.capacity:
            last_use = {each: index for index, (each, _) in enumerate(self.entries)}
            oldest = min(last_use, key=lambda each: last_use[each])
            self.entries = [entry for entry in self.entries if entry[0] != oldest]

    def lookup(self, key: int) -> list[Ngram]:
        return [value for each, value in reversed(self.entries) if each == key]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.tuples(st.integers(0, 3))), max_size=60),
    st.integers(1, 4),
    st.integers(1, 10),
)
def test_pool_holds_what_a_naive_pool_holds(
    inserted: list[tuple[int, Ngram]], per_key: int, capacity: int
) -> None:
    pool, naive = NgramPool(1, per_key, capacity), NaivePool(per_key, capacity)
    for key, value in inserted:
        pool.insert(key, value)
        naive.insert(key, value)
        assert [pairs(pool, each) for each in range(5)] == [naive.lookup(each) for each in range(5)]
        assert len(pool) == len(naive.entries) <= capacity
