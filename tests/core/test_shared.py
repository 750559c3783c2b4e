"""Texts of finished requests: what is found, under which key, and how much is kept."""

from __future__ import annotations

from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from vllm_lookahead.core.shared import SharedTexts
from vllm_lookahead.core.suffix import Followers


def found(shared: SharedTexts, key: Hashable, *tail: int) -> tuple[int, Followers]:
    index = shared.get(key)
    return (-1, ()) if index is None else index.followers(tail)


def test_what_followed_the_longest_match_is_found() -> None:
    shared = SharedTexts(100)
    shared.add("a", [1, 2, 3, 4, 5, 9, 3, 7])
    # "2 3" was followed by 4, the newer "3" alone by 7.
    assert found(shared, "a", 8, 2, 3) == (1, ((4, 1),))
    assert found(shared, "a", 8, 3) == (0, ((4, 1), (7, 1)))


def test_texts_of_a_key_count_together_the_newest_last() -> None:
    shared = SharedTexts(100)
    for text in ([1, 2], [1, 3], [1, 2]):
        shared.add("a", text)
    assert found(shared, "a", 1) == (0, ((3, 1), (2, 2)))


def test_nothing_is_found_across_the_end_of_a_text() -> None:
    shared = SharedTexts(100)
    shared.add("a", [1, 2])
    shared.add("a", [3, 4])
    assert found(shared, "a", 2) == (-1, ())
    assert found(shared, "a", 1) == (0, ((2, 1),))


def test_nothing_is_found_under_another_key() -> None:
    shared = SharedTexts(100)
    shared.add(("adapter", None), [1, 2])
    assert shared.get((None, None)) is None
    assert shared.get(("adapter", "salt")) is None


def test_tokens_outside_of_the_vocabulary_are_never_found() -> None:
    shared = SharedTexts(100, vocab_size=300)
    shared.add("a", [1, 300, 2, 1])
    assert found(shared, "a", 1) == (-1, ())
    assert found(shared, "a", 300) == (0, ((2, 1),))


def test_key_used_longest_ago_leaves_first() -> None:
    shared = SharedTexts(9)
    for key in ("a", "b", "a", "c"):
        shared.add(key, [1, 2])
    assert [shared.get(key) is None for key in "abc"] == [False] * 3
    # Eight tokens and two: b was used longest ago.
    shared.add("a", [1, 2])
    assert [shared.get(key) is None for key in "abc"] == [False, True, False]


def test_older_half_of_a_key_leaves() -> None:
    shared = SharedTexts(8)
    for first in (10, 20, 30):
        shared.add("a", [first, first + 1, first + 2])
    assert found(shared, "a", 30) == (0, ((31, 1),))
    assert found(shared, "a", 10) == (-1, ())


def test_end_of_a_text_longer_than_the_capacity_is_kept() -> None:
    shared = SharedTexts(8)
    shared.add("a", list(range(100)))
    assert found(shared, "a", 98) == (0, ((99, 1),))
    assert found(shared, "a", 50) == (-1, ())


TEXTS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), max_size=60)), max_size=30
)


@given(st.integers(1, 40), TEXTS)
def test_no_more_is_kept_than_the_capacity(
    capacity: int, texts: list[tuple[int, list[int]]]
) -> None:
    shared = SharedTexts(capacity)
    for key, text in texts:
        shared.add(key, text)
        assert len(shared) <= capacity
        # The newest text's end is there, whatever had to leave for it.
        assert shared.get(key) is not None


@given(st.integers(1, 200), TEXTS)
def test_nothing_is_found_but_what_followed_in_a_text_of_the_same_key(
    capacity: int, texts: list[tuple[int, list[int]]]
) -> None:
    shared = SharedTexts(capacity)
    for key, text in texts:
        shared.add(key, text)
    for key in range(4):
        for tail in range(10):
            _, followers = found(shared, key, tail)
            for token, count in followers:
                times = sum(
                    text[position : position + 2] == [tail, token]
                    for other, text in texts
                    if other == key
                    for position in range(len(text))
                )
                assert 1 <= count <= times
