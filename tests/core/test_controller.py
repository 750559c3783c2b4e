"""The controller's cutoff against the best of all it could choose."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lookahead.core.controller import EVERYTHING, NOTHING, Controller
from vllm_lookahead.core.cost import FLAT, StepCost


def cutoff(
    values: list[float], decoding: int = 1, points: tuple[tuple[int, float], ...] = FLAT,
    max_tokens: int = 100,
) -> float:  # fmt: skip
    controller = Controller(StepCost(points, max_tokens))
    return controller.cutoff(np.array(values, dtype=np.float64), decoding)


HALF = ((1, 1.0), (3, 2.0))
"""Each further token costs half a step."""


def test_tokens_are_fed_as_long_as_they_yield_more_per_cost() -> None:
    # Tokens per cost: 1 / 1, 1.9 / 1.5 = 1.27, 2.5 / 2 = 1.25.
    assert cutoff([0.6, 0.9], points=HALF) == 0.9
    # 1 / 1, 1.9 / 1.5 = 1.27, 2.7 / 2 = 1.35, 2.8 / 2.5.
    assert cutoff([0.1, 0.8, 0.9], points=HALF) == 0.8


def test_plain_decoding_is_best_where_no_token_is_worth_its_cost() -> None:
    # 1 / 1 against 1.4 / 1.5 and 1.8 / 2.
    assert cutoff([0.4, 0.4], points=HALF) == NOTHING


def test_token_that_yields_just_its_cost_is_left_out() -> None:
    assert cutoff([0.5], points=HALF) == NOTHING


def test_unlikely_tokens_are_fed_before_a_step_in_the_curve() -> None:
    # 4 tokens cost as much as 2: 1 / 1, 1.4 / 1.5 < 1, 1.8 / 1.5, 2.2 / 1.5, then 2.6 / 3.
    stairs = ((1, 1.0), (2, 1.5), (4, 1.5), (5, 3.0))
    assert cutoff([0.4, 0.4, 0.4, 0.38], points=stairs) == 0.4
    assert cutoff([0.4, 0.4, 0.39, 0.38], points=stairs) == 0.39


def test_tokens_of_equal_value_are_fed_all_or_none() -> None:
    # Free up to 4 tokens, then a whole step each.
    knee = ((1, 1.0), (4, 1.0), (5, 2.0))
    # 1.9 / 1 against 2.7 / 1.
    assert cutoff([0.9, 0.4, 0.4], points=knee) == 0.4
    # 1.9 / 1 against 3.1 / 2: 2.7 / 1 can't be had.
    assert cutoff([0.9, 0.4, 0.4, 0.4], points=knee) == 0.9
    # 1 / 1 against 1.8 / 2.
    assert cutoff([0.2] * 4, points=knee) == NOTHING


def test_free_tokens_are_all_fed() -> None:
    assert cutoff([0.5, 0.001, 0.2]) == 0.001


def test_tokens_that_are_expected_to_add_nothing_are_never_fed() -> None:
    assert cutoff([0.5, 0.0, -0.1]) == 0.5
    assert cutoff([0.0, -0.1]) == NOTHING


def test_step_without_draft_tokens_is_a_plain_one() -> None:
    assert cutoff([]) == NOTHING


@pytest.mark.parametrize(("max_tokens", "expected"), [(5, 0.7), (4, 0.8), (3, 0.9), (2, NOTHING)])
def test_no_more_is_fed_than_a_step_holds(max_tokens: int, expected: float) -> None:
    assert cutoff([0.7, 0.8, 0.9], decoding=2, max_tokens=max_tokens) == expected


def test_tokens_of_a_value_of_which_not_all_fit_into_a_step_are_left_out() -> None:
    assert cutoff([0.9, 0.8, 0.8], decoding=1, max_tokens=4) == 0.8
    assert cutoff([0.9, 0.8, 0.8], decoding=1, max_tokens=3) == 0.9
    assert cutoff([0.8, 0.8], decoding=1, max_tokens=2) == NOTHING


def test_roots_alone_may_exceed_a_step() -> None:
    assert cutoff([0.9], decoding=9, max_tokens=4) == NOTHING


def test_same_token_is_worth_less_in_a_larger_batch_whose_tokens_cost_more() -> None:
    # Free up to 4 tokens, then a whole step each.
    knee = ((1, 1.0), (4, 1.0), (5, 2.0))
    assert cutoff([0.9], decoding=3, points=knee) == 0.9
    # 4 / 1 against 4.9 / 2.
    assert cutoff([0.9], decoding=4, points=knee) == NOTHING


def test_cutoff_for_nothing_lies_above_and_for_everything_below_all_values() -> None:
    assert EVERYTHING < -1e300 < 1e300 < NOTHING


# Exact in binary, so that sums are the same in any order and ties are ties.
VALUES = st.lists(st.integers(-16, 64).map(lambda number: number / 64), max_size=10)


@st.composite
def curves(draw: st.DrawFn) -> StepCost:
    steps = draw(st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=1, max_size=14))
    costs = [1 + sum(steps[:count]) / 8 for count in range(len(steps))]
    return StepCost([(1 + index, cost) for index, cost in enumerate(costs)], len(costs))


@given(VALUES, st.integers(1, 6), curves())
def test_tokens_worth_the_cutoff_yield_the_most_per_cost_of_all_cutoffs(
    values: list[float], decoding: int, cost: StepCost
) -> None:
    # By cutoff, fewer tokens first: among equals, those are best.
    rates: dict[float, Fraction] = {}
    for least in [NOTHING, *sorted(set(values), reverse=True)]:
        worth = [value for value in values if value >= least]
        fed = decoding + len(worth)
        if fed <= cost.max_tokens:
            yielded = decoding + sum(map(Fraction, worth))
            rates[least] = yielded / Fraction(float(cost.of(fed, fed)[0]))
    expected = max(rates, key=rates.__getitem__) if rates else NOTHING
    assert Controller(cost).cutoff(np.array(values), decoding) == expected


@given(VALUES, st.integers(1, 6), curves(), st.randoms())
def test_order_of_the_batch_does_not_matter(
    values: list[float], decoding: int, cost: StepCost, random: Random
) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)
    controller = Controller(cost)
    before = controller.cutoff(np.array(values), decoding)
    assert controller.cutoff(np.array(shuffled), decoding) == before


@pytest.mark.parametrize(
    ("values", "floor"),
    [([0.4], 0.2), ([0.5], 0.25), ([0.9], 0.25), ([0.9, 0.1], 0.05), ([], 0.25)],
)
def test_floor_is_half_of_the_last_cutoff_but_not_high(values: list[float], floor: float) -> None:
    controller = Controller(StepCost(FLAT, 10))
    assert controller.floor == 0
    controller.cutoff(np.array(values), 1)
    assert controller.floor == floor


def test_values_are_left_as_they_are() -> None:
    values = np.array([0.1, 0.9, 0.5])
    Controller(StepCost(FLAT, 10)).cutoff(values, 1)
    assert values.tolist() == [0.1, 0.9, 0.5]


# Rests

STEEP = ((1, 1.0), (100, 100.0))
"""Drafts bring nothing."""


def look(controller: Controller, decoding: int, values: tuple[float, ...] = (0.5,)) -> None:
    controller.cutoff(np.array(values), decoding)


def looks_until_rest(controller: Controller, decoding: int) -> int:
    for number in range(1000):
        if controller.rests(decoding):
            return number
        look(controller, decoding)
    raise AssertionError("never rests")


def test_controller_rests_once_drafts_have_brought_less_than_they_cost_for_a_while() -> None:
    controller = Controller(StepCost(STEEP, 100), draft_cost=0.1)
    assert 5 < looks_until_rest(controller, 8) < 2 * Controller.GAIN_MEMORY


def test_rest_ends_with_another_look() -> None:
    controller = Controller(StepCost(STEEP, 100), draft_cost=0.1)
    looks_until_rest(controller, 8)
    for _ in range(Controller.REST - 1):
        assert controller.rests(8)
    assert not controller.rests(8)
    look(controller, 8)
    # Nothing has changed.
    assert controller.rests(8)


def test_rest_ends_when_half_of_the_sequences_are_left() -> None:
    controller = Controller(StepCost(STEEP, 100), draft_cost=0.1)
    looks_until_rest(controller, 8)
    # A step of prompts alone says nothing.
    assert controller.rests(0)
    assert controller.rests(5)
    assert not controller.rests(4)
    # And the few are given a while.
    look(controller, 4)
    assert not controller.rests(4)


def test_controller_never_rests_while_drafts_pay_for_themselves() -> None:
    controller = Controller(StepCost(FLAT, 100), draft_cost=0.1)
    for _ in range(1000):
        assert not controller.rests(8)
        look(controller, 8, (0.9,) * 8)


@pytest.mark.parametrize("values", [(), (0.5,)], ids=["nothing proposed", "nothing worth it"])
def test_drafts_that_cost_nothing_are_always_made(values: tuple[float, ...]) -> None:
    controller = Controller(StepCost(STEEP, 100))
    for _ in range(1000):
        assert not controller.rests(8)
        look(controller, 8, values)


def test_look_after_a_rest_that_finds_drafts_worth_it_ends_resting() -> None:
    controller = Controller(StepCost(STEEP, 100), draft_cost=0.1)
    looks_until_rest(controller, 8)
    while controller.rests(8):
        pass
    controller.cost = StepCost(FLAT, 100)
    look(controller, 8, (0.9,) * 8)
    assert not controller.rests(8)
