"""Texts of finished requests: what is found, under which key, and how much is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_lookahead.core.shared import SharedTexts
from vllm_lookahead.core.suffix import MATCH_LENGTHS


def test_what_followed_the_longest_match_is_found() -> None:
    shared = SharedTexts(100)
    shared.add("a", [1, 2, 3, 4, 5, 9, 3, 7])
    # "2 3" was followed by 4, the newer "3" alone by 7.
    match, chain = shared.find("a", [8, 2, 3], 2)
    assert MATCH_LENGTHS[match] == 2
    assert chain == (4, 5)
    assert shared.find("a", [8, 3], 5) == (0, (7,))


def test_nothing_is_found_across_the_end_of_a_text() -> None:
    shared = SharedTexts(100)
    shared.add("a", [1, 2])
    shared.add("a", [3, 4])
    assert shared.find("a", [2], 5) == (0, ())
    assert shared.find("a", [1], 5) == (0, (2,))


def test_nothing_is_found_under_another_key() -> None:
    shared = SharedTexts(100)
    shared.add(("adapter", None), [1, 2])
    assert shared.find((None, None), [1], 5) == (-1, ())
    assert shared.find(("adapter", "salt"), [1], 5) == (-1, ())


def test_key_used_longest_ago_leaves_first() -> None:
    shared = SharedTexts(10)
    for key in ("a", "b", "a", "c"):
        shared.add(key, [1, 2, 3])
    # Four tokens with the end each: a has 8, c 4; b was used longest ago.
    assert shared.find("b", [1], 5) == (-1, ())
    assert shared.find("c", [1], 5) == (0, (2, 3))


def test_older_half_of_a_key_leaves() -> None:
    shared = SharedTexts(8)
    for first in (10, 20, 30):
        shared.add("a", [first, first + 1, first + 2])
    assert shared.find("a", [30], 1) == (0, (31,))
    assert shared.find("a", [10], 1) == (-1, ())


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), max_size=60)), max_size=30),
)
def test_no_more_is_kept_than_the_capacity_and_one_text(
    capacity: int, texts: list[tuple[int, list[int]]]
) -> None:
    shared = SharedTexts(capacity)
    for key, text in texts:
        shared.add(key, text)
        assert len(shared) <= capacity + min(capacity, len(text)) + 1
