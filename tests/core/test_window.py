"""The lookahead window against the paper's figure and a naive rewrite of its update."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lookahead.core.pool import Ngram
from vllm_lookahead.core.window import LookaheadWindow


def full_window() -> LookaheadWindow:
    """W = 3, N = 4, filled by two steps:

    row 2   41 42 43
    row 1   31 32 33
    row 0   .. 21 22
    """
    window = LookaheadWindow(3, 4, [21, 22], jacobi=False)
    window.advance(10, [31, 32, 33], accepted=0)
    window.advance(11, [41, 42, 43], accepted=0)
    return window


def test_new_window_grows_one_row_per_step_and_yields_no_ngrams_until_full() -> None:
    window = LookaheadWindow(3, 4, [21, 22], jacobi=False)
    assert window.rows == [[21, 22]]
    assert not window.is_full
    assert window.advance(10, [31, 32, 33], accepted=0) == []
    assert window.rows == [[21, 22], [31, 32, 33]]
    assert not window.is_full
    assert window.advance(11, [41, 42, 43], accepted=2) == []
    assert window.rows == [[21, 22], [31, 32, 33], [41, 42, 43]]
    assert window.is_full


def test_full_window_yields_an_ngram_per_column_keyed_by_root_and_row_0() -> None:
    assert full_window().advance(12, [51, 52, 53], accepted=0) == [
        (12, (31, 41, 51)),
        (21, (32, 42, 52)),
        (22, (33, 43, 53)),
    ]


def test_rows_shift_up_and_the_new_root_replaces_column_0_of_row_0() -> None:
    window = full_window()
    window.advance(12, [51, 52, 53], accepted=0)
    assert window.rows == [[32, 33], [41, 42, 43], [51, 52, 53]]
    assert window.advance(13, [61, 62, 63], accepted=0)[0] == (13, (41, 51, 61))


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_window_moves_on_by_one_row_whatever_was_accepted(accepted: int) -> None:
    window = full_window()
    window.advance(12, [51, 52, 53], accepted)
    assert window.rows == [[32, 33], [41, 42, 43], [51, 52, 53]]


def test_window_of_one_column_hangs_on_the_root_alone() -> None:
    window = LookaheadWindow(1, 3, [], jacobi=False)
    assert window.rows == [[]]
    assert window.advance(10, [31], accepted=0) == []
    assert window.advance(11, [41], accepted=0) == [(11, (31, 41))]
    assert window.rows == [[], [41]]


def test_window_of_bigrams_is_full_from_the_start() -> None:
    window = LookaheadWindow(3, 2, [21, 22], jacobi=False)
    assert window.is_full
    assert window.advance(10, [31, 32, 33], accepted=0) == [(10, (31,)), (21, (32,)), (22, (33,))]
    assert window.rows == [[32, 33]]


# Jacobi decoding


def test_jacobi_row_keeps_every_guess_that_stands_after_the_new_root() -> None:
    window = LookaheadWindow(4, 2, [21, 22, 23], jacobi=True)
    # Outputs stand 1 to 4 after the old root; without acceptance the new root stands 1 after.
    window.advance(10, [31, 32, 33, 34], accepted=0)
    assert window.rows == [[32, 33, 34]]


@pytest.mark.parametrize(
    ("accepted", "row"), [(1, [33, 34, 34]), (2, [34, 34, 34]), (3, [34, 34, 34])]
)
def test_jacobi_row_is_padded_with_its_last_guess_after_an_acceptance(
    accepted: int, row: list[int]
) -> None:
    window = LookaheadWindow(4, 2, [21, 22, 23], jacobi=True)
    window.advance(10, [31, 32, 33, 34], accepted)
    assert window.rows == [row]


# Paths and misuse


def test_deepest_path_runs_along_row_0_and_up_the_last_column() -> None:
    assert full_window().deepest_path() == [21, 22, 33, 43]


def test_deepest_path_of_a_filling_window_ends_at_its_last_row() -> None:
    window = LookaheadWindow(3, 4, [21, 22], jacobi=False)
    assert window.deepest_path() == [21, 22]
    window.advance(10, [31, 32, 33], accepted=0)
    assert window.deepest_path() == [21, 22, 33]


def test_deepest_path_of_one_column_runs_straight_up() -> None:
    window = LookaheadWindow(1, 4, [], jacobi=False)
    window.advance(10, [31], accepted=0)
    window.advance(11, [41], accepted=0)
    assert window.deepest_path() == [31, 41]


@pytest.mark.parametrize("guesses", [[], [1], [1, 2, 3]])
def test_window_starts_from_one_guess_less_than_its_width(guesses: list[int]) -> None:
    with pytest.raises(ValueError, match="width 3 starts from 2 guesses"):
        LookaheadWindow(3, 4, guesses, jacobi=False)


@pytest.mark.parametrize("row", [[1, 2], [1, 2, 3, 4]])
def test_new_row_of_another_width_is_refused(row: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(row)} tokens, not 3"):
        full_window().advance(1, row, accepted=0)


# Against naive rewrites


class PastTokens:
    """The reference's ``past_tokens``: W tokens in every row, column 0 of row 0 the root."""

    def __init__(self, guesses: list[int], num_rows: int) -> None:
        self.num_rows = num_rows
        self.rows = [[-1, *guesses]]

    def step(self, root: int, outputs: list[int]) -> list[tuple[int, Ngram]]:
        self.rows[0][0] = root
        self.rows.append(outputs)
        if len(self.rows) <= self.num_rows:
            return []
        columns = list(zip(*self.rows, strict=True))
        del self.rows[0]
        return [(column[0], column[1:]) for column in columns]


@given(st.data(), st.integers(1, 5), st.integers(2, 5))
def test_update_equals_the_reference_update(data: st.DataObject, W: int, N: int) -> None:
    tokens = st.integers(0, 99)
    guesses = data.draw(st.lists(tokens, min_size=W - 1, max_size=W - 1))
    window, past = LookaheadWindow(W, N, guesses, jacobi=False), PastTokens(guesses, N - 1)
    outputs = st.lists(tokens, min_size=W, max_size=W)
    for root, row in data.draw(st.lists(st.tuples(tokens, outputs), max_size=8)):
        assert window.advance(root, row, accepted=0) == past.step(root, list(row))
        assert window.rows == [past.rows[0][1:], *past.rows[1:]]


@given(st.data(), st.integers(2, 6))
def test_jacobi_guesses_are_the_newest_output_for_their_position(
    data: st.DataObject, W: int
) -> None:
    tokens = st.integers(0, 99)
    window = LookaheadWindow(W, 2, [0] * (W - 1), jacobi=True)
    position = 0
    for _ in range(5):
        outputs = data.draw(st.lists(tokens, min_size=W, max_size=W))
        accepted = data.draw(st.integers(0, W - 1))
        by_position = {position + 1 + i: token for i, token in enumerate(outputs)}
        window.advance(0, outputs, accepted)
        position += accepted + 1
        assert window.rows == [[by_position.get(position + i, outputs[-1]) for i in range(1, W)]]
