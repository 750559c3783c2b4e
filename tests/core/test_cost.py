"""Step cost curves: values and corrections worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lookahead.core.cost import FLAT, Points, RunningCost, StepCost


@st.composite
def curves(draw: st.DrawFn) -> Points:
    """Points that may fall, too, as noise makes them."""
    tokens = sorted(draw(st.sets(st.integers(1, 50), min_size=1, max_size=6)))
    costs = st.floats(0.001, 100)
    return [(count, draw(costs)) for count in tokens]


def costs(points: Sequence[tuple[int, float]], max_tokens: int) -> list[float]:
    """Of 1 to ``max_tokens`` tokens."""
    return StepCost(points, max_tokens).of(1, max_tokens).tolist()


# The curve


def test_cost_is_linear_between_the_points_and_beyond_the_last() -> None:
    curve = StepCost([(1, 2.0), (3, 4.0), (5, 5.0)], 7)
    # Relative to the 2.0 of one token.
    assert curve.of(1, 7).tolist() == [1, 1.5, 2, 2.25, 2.5, 2.75, 3]


def test_cost_is_the_same_in_any_unit() -> None:
    seconds, thousandths = [(1, 0.25), (4, 1.0)], [(1, 250.0), (4, 1000.0)]
    assert costs(seconds, 9) == costs(thousandths, 9)


def test_one_point_makes_a_flat_curve() -> None:
    assert costs([(4, 3.0)], 6) == [1] * 6
    assert costs(FLAT, 6) == [1] * 6


def test_cost_that_falls_counts_as_what_fewer_tokens_cost() -> None:
    assert costs([(1, 2.0), (2, 1.0), (3, 4.0)], 4) == [1, 1, 2, 3]
    # Also where the last points fall: the curve goes on flat.
    assert costs([(1, 1.0), (2, 3.0), (3, 2.0)], 5) == [1, 3, 3, 3, 3]


def test_points_above_the_most_tokens_shape_the_curve_all_the_same() -> None:
    assert costs([(1, 1.0), (5, 3.0)], 3) == [1, 1.5, 2]


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(1, 0.0)], [(1, 1.0), (2, -1.0)]], ids=str)
def test_curve_without_positive_points_is_refused(points: Points) -> None:
    with pytest.raises(ValueError, match="must be positive, for at least one token"):
        StepCost(points, 8)


@pytest.mark.parametrize("points", [[(2, 1.0), (1, 2.0)], [(1, 1.0), (1, 2.0)]], ids=str)
def test_curve_that_does_not_ascend_in_tokens_is_refused(points: Points) -> None:
    with pytest.raises(ValueError, match="must ascend in tokens"):
        StepCost(points, 8)


@given(curves(), st.integers(1, 80))
def test_one_token_costs_one_and_more_tokens_never_less(points: Points, max_tokens: int) -> None:
    of_all = costs(points, max_tokens)
    assert len(of_all) == max_tokens
    assert of_all[0] == 1
    assert np.all(np.diff(of_all) >= 0)


@given(curves(), st.integers(1, 80), st.data())
def test_part_of_the_curve_is_the_same_as_in_the_whole(
    points: Points, max_tokens: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(1, max_tokens))
    last = data.draw(st.integers(first, max_tokens))
    part = StepCost(points, max_tokens).of(first, last)
    assert part.tolist() == costs(points, max_tokens)[first - 1 : last]


# Free tokens


def test_tokens_are_free_up_to_a_cost_of_a_step_and_a_bit() -> None:
    curve = StepCost([(1, 1.0), (2, 1.125), (3, 1.25), (4, 1.5)], 8)
    assert curve.free_tokens() == 2
    assert curve.free_tokens(tolerance=0.25) == 3
    assert curve.free_tokens(tolerance=0.0) == 1


def test_all_tokens_of_a_flat_curve_are_free() -> None:
    assert StepCost(FLAT, 40).free_tokens() == 40


def test_one_token_is_always_free() -> None:
    assert StepCost([(1, 1.0), (2, 9.0)], 8).free_tokens() == 1


# Correction


def settled(points: Points, branch_seconds: float = 0.0) -> RunningCost:
    """After many steps at each point that took what was expected."""
    cost = RunningCost(points, branch_seconds)
    for _ in range(100):
        for point in points:
            cost.observe(*point)
    return cost


def corrected(points: Points, tokens: int, seconds: float) -> Points:
    cost = settled(points)
    cost.observe(tokens, seconds)
    return cost.points


def near(points: Points) -> object:
    return [(tokens, pytest.approx(seconds)) for tokens, seconds in points]


def test_time_as_expected_changes_nothing() -> None:
    points = [(1, 1.0), (3, 2.0), (5, 6.0)]
    for tokens, seconds in [*points, (2, 1.5), (4, 4.0)]:
        assert corrected(points, tokens, seconds) == near(points)


def test_error_at_a_point_corrects_it_most_and_all_points_a_bit() -> None:
    # 0.5 s too long: 7 % of that at the point, half of 2 % where tokens are four times as many.
    assert corrected([(1, 1.0), (4, 2.0)], 1, 1.5) == near([(1, 1.035), (4, 2.005)])
    assert corrected([(1, 1.0), (4, 2.0)], 4, 2.5) == near([(1, 1.005), (4, 2.035)])


def test_first_steps_at_a_point_correct_it_more() -> None:
    cost = RunningCost([(1, 1.0), (4, 2.0)])
    for _ in range(1000):
        cost.observe(1, 1.0)
    rates = []
    for _ in range(30):
        (_, known) = cost.points[1]
        cost.observe(4, known + 0.1)
        (_, corrected) = cost.points[1]
        rates.append((corrected - known) / 0.1)
    # With 2 % at all points.
    assert rates[:3] == pytest.approx([0.02 + 1 / 4, 0.02 + 1 / 5, 0.02 + 1 / 6])
    assert rates[16:] == pytest.approx([0.07] * 14)


def test_what_many_sequences_add_hardly_touches_what_a_step_of_one_costs() -> None:
    cost = RunningCost([(1, 1.0), (64, 3.0), (100, 4.0)])
    for _ in range(1000):
        cost.observe(1, 1.0)
    for _ in range(1000):
        cost.observe(64, 5.0)
    (_, one), (_, many), _ = cost.points
    assert many == pytest.approx(5.0, abs=0.01)
    assert one < 1.15


def test_error_between_points_corrects_both_by_their_nearness() -> None:
    # Expected: 2.0 at a quarter of the way. 1 s too long.
    expected = [(1, 1.0375 + 0.02 * 0.5**0.5), (5, 5.0125 + 0.02 * 0.4**0.5)]
    assert corrected([(1, 1.0), (5, 5.0)], 2, 3.0) == near(expected)


def test_step_faster_than_expected_lowers_the_curve() -> None:
    assert corrected([(1, 1.0), (3, 2.0)], 1, 0.5) == near(
        [
            (1, 0.965),
            (3, 2.0 - 0.01 / 3**0.5),
        ]
    )


@pytest.mark.parametrize(("seconds", "as_if"), [(1000.0, 4.0), (0.0, 1.0)])
def test_time_far_off_counts_as_half_or_twice_of_what_was_expected(
    seconds: float, as_if: float
) -> None:
    points = [(1, 1.0), (3, 2.0)]
    assert corrected(points, 3, seconds) == corrected(points, 3, as_if)


def test_step_with_fewer_tokens_than_the_first_point_is_taken_as_that_point() -> None:
    points = [(2, 1.0), (4, 2.0)]
    assert corrected(points, 1, 1.5) == corrected(points, 2, 1.5)


def test_step_beyond_the_last_point_corrects_that_one() -> None:
    # Expected: 4.0. 2 s too long, three times as much as the last point is off.
    assert corrected([(1, 1.0), (3, 2.0)], 7, 6.0) == near([(1, 1.0), (3, 2.0 + 0.05 * 2 / 3)])


def test_steps_beyond_the_last_point_become_what_is_expected() -> None:
    # A curve that looks flat at its end.
    cost = RunningCost([(1, 1.0), (64, 5.0), (128, 5.0)])
    for _ in range(300):
        cost.observe(320, 20.0)
    assert costs(cost.points, 320)[-1] == pytest.approx(20.0, rel=0.05)


def test_single_point_says_nothing_about_more_tokens() -> None:
    assert corrected([(1, 1.0)], 100, 1e9) == [(1, 1.0)]


def test_steps_that_keep_taking_another_time_become_what_is_expected() -> None:
    cost = RunningCost([(1, 1.0), (3, 2.0), (5, 3.0)])
    for _ in range(300):
        for tokens, seconds in [(1, 2.0), (2, 2.5), (3, 3.0), (4, 5.0), (5, 7.0)]:
            cost.observe(tokens, seconds)
    assert [tokens for tokens, _ in cost.points] == [1, 3, 5]
    assert [seconds for _, seconds in cost.points] == pytest.approx([2, 3, 7], abs=0.01)


def test_error_of_a_step_with_branches_is_shared_among_curve_and_branches() -> None:
    cost = settled([(1, 1.0)], branch_seconds=0.25)
    cost.observe(1, 2.0, branches=3)
    # 1.75 s were expected, so each of four has a quarter of 0.25 s: 7 % for the curve, 5 % for
    # a branch.
    assert cost.points == near([(1, 1.0 + 0.07 * 0.0625)])
    assert cost.branch_seconds == pytest.approx(0.25 + 0.05 * 0.0625)


def test_branches_never_cost_less_than_nothing() -> None:
    cost = settled([(1, 1.0)], branch_seconds=0.001)
    for _ in range(20):
        cost.observe(1, 0.5, branches=1)
    assert cost.branch_seconds == 0.0


def test_steps_without_branches_say_nothing_about_them() -> None:
    cost = settled([(1, 1.0)], branch_seconds=0.25)
    cost.observe(1, 2.0)
    assert cost.branch_seconds == 0.25


def test_first_steps_correct_all_points_soon() -> None:
    # The start-up doesn't see 1 s that every step takes.
    cost = RunningCost([(1, 1.0), (3, 2.0)])
    for _ in range(5):
        cost.observe(1, 2.0)
    [(_, one), (_, three)] = cost.points
    assert one == pytest.approx(2.0, abs=0.2)
    assert three == pytest.approx(3.0, abs=0.25)


def test_first_steps_are_no_branches_fault() -> None:
    cost = RunningCost([(1, 1.0)], branch_seconds=0.25)
    for _ in range(RunningCost.SETTLED):
        cost.observe(1, 2.0, branches=3)
    assert cost.branch_seconds == 0.25
    cost.observe(1, 3.0, branches=3)
    assert cost.branch_seconds > 0.25


def test_single_point_is_corrected() -> None:
    # 7 % of 1 s.
    assert corrected([(1, 1.0)], 1, 2.0) == near([(1, 1.07)])


def test_curve_that_was_given_is_left_as_it_is() -> None:
    points = [(1, 1.0), (3, 2.0)]
    corrected(points, 1, 2.0)
    assert points == [(1, 1.0), (3, 2.0)]


@given(curves(), st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1000)), max_size=60))
def test_curve_stays_usable_whatever_is_observed(
    points: Points, steps: list[tuple[int, float]]
) -> None:
    cost = RunningCost(points)
    for tokens, seconds in steps:
        cost.observe(tokens, seconds)
        # Raises for a cost that isn't positive.
        StepCost(cost.points, 60)
