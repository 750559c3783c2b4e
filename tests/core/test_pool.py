"""The n-gram pool: order, bounds and what text puts in."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lookahead.core.pool import Entry, Ngram, NgramPool


def pairs(pool: NgramPool, key: int) -> list[Ngram]:
    """All values of ``key``."""
    return [value for value, _ in pool.lookup(key)]


def test_lookup_yields_the_newest_first() -> None:
    pool = NgramPool(value_size=2, per_key=3, capacity=10)
    for value in [(1, 1), (2, 2), (3, 3)]:
        pool.insert(7, value)
    assert pairs(pool, 7) == [(3, 3), (2, 2), (1, 1)]


def test_lookup_tells_the_token_before_the_key_and_whether_the_value_was_guessed() -> None:
    pool = NgramPool(value_size=1, per_key=3, capacity=10)
    pool.insert(7, (1,))
    pool.insert(7, (2,), previous=5)
    pool.insert(7, (3,), previous=6, guessed=True)
    assert pool.lookup(7) == [
        ((3,), Entry(previous=6, guessed=True)),
        ((2,), Entry(previous=5, guessed=False)),
        ((1,), Entry(previous=-1, guessed=False)),
    ]


def test_repeated_value_is_known_as_it_was_inserted_last() -> None:
    pool = NgramPool(value_size=1, per_key=3, capacity=10)
    pool.insert(7, (1,), previous=5, guessed=True)
    pool.insert(7, (1,), previous=6)
    assert pool.lookup(7) == [((1,), Entry(previous=6, guessed=False))]


def test_values_looked_up_are_not_those_of_later_insertions() -> None:
    pool = NgramPool(value_size=1, per_key=3, capacity=10)
    pool.insert(7, (1,))
    found = pool.lookup(7)
    pool.insert(7, (2,))
    assert [value for value, _ in found] == [(1,)]


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
        self.previous: list[int] = []

    def insert(self, key: int, value: Ngram, previous: int = -1, guessed: bool = False) -> None:
        assert not guessed
        self.inserted.append((key, value))
        self.previous.append(previous)
        super().insert(key, value, previous, guessed)


def test_text_yields_every_ngram_once_in_order() -> None:
    pool = Recorder(value_size=2)
    pool.insert_text([5, 6, 7, 8, 9], 0, 5)
    assert pool.inserted == [(5, (6, 7)), (6, (7, 8)), (7, (8, 9))]


def test_first_ngram_of_a_text_has_no_token_before_its_key() -> None:
    pool = Recorder(value_size=2)
    pool.insert_text([5, 6, 7, 8, 9], 0, 5)
    assert pool.previous == [-1, 5, 6]


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
    assert pool.previous == [-1, *tokens][: len(pool.inserted)]


# Bounds


Item = tuple[int, Ngram, Entry]


class NaivePool:
    """The same pool as one flat list of items, newest last, without a size to keep."""

    def __init__(self, per_key: int, capacity: int) -> None:
        self.per_key = per_key
        self.capacity = capacity
        self.items: list[Item] = []

    def insert(self, key: int, value: Ngram, entry: Entry) -> None:
        self.items = [item for item in self.items if item[:2] != (key, value)]
        self.items.append((key, value, entry))
        own = [item for item in self.items if item[0] == key]
        for item in own[: -min(self.per_key, self.capacity)]:
            self.items.remove(item)
        while len(self.items) > self.capacity:
            last_use = {item[0]: index for index, item in enumerate(self.items)}
            oldest = min(last_use, key=lambda each: last_use[each])
            self.items = [item for item in self.items if item[0] != oldest]

    def lookup(self, key: int) -> list[tuple[Ngram, Entry]]:
        return [(value, entry) for each, value, entry in reversed(self.items) if each == key]


def items() -> st.SearchStrategy[Item]:
    entries = st.builds(Entry, st.integers(-1, 2), st.booleans())
    return st.tuples(st.integers(0, 4), st.tuples(st.integers(0, 3)), entries)


@given(st.lists(items(), max_size=60), st.integers(1, 4), st.integers(1, 10))
def test_pool_holds_what_a_naive_pool_holds(
    inserted: list[Item], per_key: int, capacity: int
) -> None:
    pool, naive = NgramPool(1, per_key, capacity), NaivePool(per_key, capacity)
    for key, value, entry in inserted:
        pool.insert(key, value, *entry)
        naive.insert(key, value, entry)
        assert [pool.lookup(each) for each in range(5)] == [naive.lookup(each) for each in range(5)]
        assert len(pool) == len(naive.items) <= capacity
