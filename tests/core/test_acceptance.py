"""What is learned of candidates and windows, against shares counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lookahead.core.acceptance import (
    MATCHES,
    NUM_CLASSES,
    NUM_DEPTHS,
    AcceptanceModel,
    custom_class,
    is_guessed,
    pool_class,
    shared_class,
    suffix_class,
)
from vllm_lookahead.core.suffix import MATCH_LENGTHS

RANKS = 4
GUESSED = [pool_class(rank, pair, True) for pair in (False, True) for rank in range(RANKS)]
OTHERS = [
    *(suffix_class(match) for match in range(len(MATCH_LENGTHS))),
    *(shared_class(match) for match in range(len(MATCH_LENGTHS))),
    *(pool_class(rank, pair, False) for pair in (False, True) for rank in range(RANKS)),
    *(custom_class(rank) for rank in range(RANKS)),
]


# Classes


def test_every_source_quality_and_depth_is_a_class_of_its_own() -> None:
    classes = [first + depth for first in GUESSED + OTHERS for depth in range(NUM_DEPTHS)]
    assert sorted(classes) == list(range(NUM_CLASSES))


@pytest.mark.parametrize("rank", [RANKS, 100])
def test_late_ranks_share_the_class_of_the_last_one(rank: int) -> None:
    assert custom_class(rank) == custom_class(RANKS - 1)
    for pair in (False, True):
        for guessed in (False, True):
            assert pool_class(rank, pair, guessed) == pool_class(RANKS - 1, pair, guessed)


def test_only_pooled_ngrams_of_the_window_are_guessed_at_any_depth() -> None:
    for depth in range(NUM_DEPTHS):
        assert all(is_guessed(first + depth) for first in GUESSED)
        assert not any(is_guessed(first + depth) for first in OTHERS)


def test_token_without_a_class_is_not_guessed() -> None:
    assert not is_guessed(-1)


# Acceptance


def test_first_estimates_are_probabilities_for_every_class() -> None:
    probability = AcceptanceModel().probability
    assert len(probability) == NUM_CLASSES
    assert all(0 < each < 1 for each in probability)


def test_longer_matches_are_thought_likelier_at_first() -> None:
    probability = AcceptanceModel().probability
    for first in (suffix_class, shared_class):
        by_length = [probability[first(match)] for match in range(len(MATCH_LENGTHS))]
        assert by_length == sorted(by_length)


def test_later_ngrams_of_a_key_are_thought_less_likely_at_first() -> None:
    probability = AcceptanceModel().probability
    for pair in (False, True):
        for guessed in (False, True):
            by_rank = [probability[pool_class(rank, pair, guessed)] for rank in range(RANKS)]
            assert by_rank == sorted(by_rank, reverse=True)


@given(st.integers(0, NUM_CLASSES - 1), st.lists(st.booleans(), max_size=100))
def test_estimate_is_the_share_of_hits_with_the_first_estimate_as_six_observations(
    token_class: int, hits: list[bool]
) -> None:
    model = AcceptanceModel()
    first = model.probability[token_class]
    for hit in hits:
        model.learn(token_class, hit)
    share = (6 * first + sum(hits)) / (6 + len(hits))
    assert model.probability[token_class] == pytest.approx(share)


def test_after_400_observations_each_new_one_counts_a_400th() -> None:
    model = AcceptanceModel()
    for _ in range(500):
        model.learn(3, True)
    before = model.probability[3]
    model.learn(3, False)
    assert model.probability[3] == pytest.approx(before * 399 / 400)


def test_what_has_changed_is_learned_however_much_was_seen_before() -> None:
    model = AcceptanceModel()
    for _ in range(10_000):
        model.learn(3, True)
    assert model.probability[3] == pytest.approx(1)
    for _ in range(4000):
        model.learn(3, False)
    # 0.9975 ** 4000 is 0.00004.
    assert model.probability[3] < 0.0001


def test_classes_learn_apart_from_each_other() -> None:
    model, untouched = AcceptanceModel(), AcceptanceModel()
    model.learn(3, True)
    assert model.probability[3] > untouched.probability[3]
    assert [*model.probability[:3], *model.probability[4:]] == [
        *untouched.probability[:3],
        *untouched.probability[4:],
    ]


def test_engines_learn_apart_from_each_other() -> None:
    AcceptanceModel().learn(3, True)
    assert AcceptanceModel().probability == AcceptanceModel().probability


@given(st.lists(st.booleans(), max_size=50))
def test_estimate_stays_a_probability(hits: list[bool]) -> None:
    model = AcceptanceModel()
    for hit in hits:
        model.learn(0, hit)
        assert 0 <= model.probability[0] <= 1


# The window


def test_window_is_worth_something_at_first_in_every_kind_of_step() -> None:
    model = AcceptanceModel()
    assert all(model.window_value(match) > 0 for match in range(MATCHES))


@pytest.mark.parametrize("match", range(MATCHES))
def test_window_is_worth_what_it_gains_at_once_and_what_comes_back(match: int) -> None:
    model = AcceptanceModel()
    for _ in range(4000):
        # Every window has two tokens right, and every other one's n-grams bring one later.
        model.learn_window(match, 2)
        model.learn_return(1)
        model.learn_window(match, 2)
    assert model.window_value(match) == pytest.approx(2.5, abs=0.01)


def test_window_that_brings_nothing_is_worth_nothing_in_the_end() -> None:
    model = AcceptanceModel()
    for _ in range(4000):
        model.learn_window(0, 0)
    assert 0 <= model.window_value(0) < 1e-6


def test_gain_at_once_is_learned_by_kind_of_step() -> None:
    model = AcceptanceModel()
    before = [model.window_value(match) for match in range(MATCHES)]
    model.learn_window(1, 50)
    after = [model.window_value(match) for match in range(MATCHES)]
    # A hundredth of what is new; what comes back was less by a 200th for all.
    fall = before[0] - after[0]
    assert 0 < fall < before[0] / 200
    assert after[2] == pytest.approx(before[2] - fall)
    assert 0.4 < after[1] - before[1] + fall < 0.5


def test_return_counts_in_every_kind_of_step() -> None:
    model = AcceptanceModel()
    before = [model.window_value(match) for match in range(MATCHES)]
    model.learn_return(2)
    for match in range(MATCHES):
        assert model.window_value(match) == pytest.approx(before[match] + 0.01)


@given(st.lists(st.tuples(st.integers(0, MATCHES - 1), st.integers(0, 9), st.integers(0, 9))))
def test_window_is_never_worth_less_than_nothing(steps: list[tuple[int, int, int]]) -> None:
    model = AcceptanceModel()
    for match, gained, returned in steps:
        model.learn_window(match, gained)
        model.learn_return(returned)
        assert all(model.window_value(each) >= 0 for each in range(MATCHES))
