"""What a step costs by the number of tokens that it feeds (T(q) of the design)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf, sqrt

import numpy as np
import numpy.typing as npt

Points = list[tuple[int, float]]
"""(tokens, cost), ascending in tokens."""


class StepCost:
    """A step's time against that of a step with one token, by its tokens.

    Linear between the given points and beyond the last; it never falls.
    """

    def __init__(self, points: Sequence[tuple[int, float]], max_tokens: int) -> None:
        """
        Args:
            points: (tokens, cost), ascending in tokens; costs in any unit.
            max_tokens: most tokens of a step.
        """
        if not points or any(tokens < 1 or not 0 < cost < inf for tokens, cost in points):
            raise ValueError(f"step costs must be positive, for at least one token: {points}")
        tokens, costs = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
        if np.any(np.diff(tokens) <= 0):
            raise ValueError(f"step costs must ascend in tokens: {points}")
        costs = np.maximum.accumulate(costs)
        if len(tokens) > 1 and tokens[-1] < max_tokens:
            slope = (costs[-1] - costs[-2]) / (tokens[-1] - tokens[-2])
            costs = np.append(costs, costs[-1] + slope * (max_tokens - tokens[-1]))
            tokens = np.append(tokens, max_tokens)
        self._tokens = tokens
        self._costs = costs / np.interp(1, tokens, costs)
        self.max_tokens = max_tokens
        """Most tokens of a step."""

    def of(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """[last - first + 1] relative costs of ``first`` to ``last`` tokens."""
        return np.interp(np.arange(first, last + 1), self._tokens, self._costs)

    def free_tokens(self, tolerance: float = 0.15) -> int:
        """Most tokens that cost no more than ``1 + tolerance`` steps of one token."""
        return 1 + int(np.flatnonzero(self.of(1, self.max_tokens) <= 1 + tolerance)[-1])


class RunningCost:
    """Corrects a curve by the steps that are run.

    What a step really takes has parts that a measurement at start-up doesn't see: scheduling,
    attention over long contexts, other load on the machine.
    """

    LOCAL_RATE = 0.05
    """Share of an error by which the points next to the observation are corrected."""
    FIRST_LOCAL_RATE = 0.25
    """And by a point's first ones, from where it falls as their number grows: until then the
    point stands for what was measured at start-up, and for what others have been through."""
    COMMON_RATE = 0.02
    """Share of it by which all points are, less those for far more or fewer tokens. Much of what
    isn't seen is paid once per step, so the first steps count for more and for all points, each
    as much as those before it together with the start."""

    SETTLED = 20
    """Steps after which what is left of an error says something about branches, and about
    points that have seen few steps."""

    def __init__(self, points: Sequence[tuple[int, float]], branch_seconds: float = 0.0) -> None:
        """
        Args:
            points: (tokens, seconds), ascending in tokens.
            branch_seconds: what a branch adds to a step.
        """
        self.branch_seconds = branch_seconds
        """What a branch adds, as corrected so far."""
        self._observed = 0
        self._tokens = [float(tokens) for tokens, _ in points]
        self._seconds = [seconds for _, seconds in points]
        self._visits = [0.0] * len(self._tokens)

    @property
    def points(self) -> Points:
        """The curve as corrected so far, (tokens, seconds)."""
        return [
            (int(tokens), seconds)
            for tokens, seconds in zip(self._tokens, self._seconds, strict=True)
        ]

    def observe(self, tokens: int, seconds: float, branches: int = 0) -> None:
        """Take the time of a step that fed ``tokens`` tokens, with so many branches in them.

        The more branches, the more of an error is theirs (normalized least mean squares). A time
        far off (a pause, a neighbour on the machine) counts no more than one of half or twice of
        what was expected. Steps beyond the last point correct that one alone.
        """
        if tokens > self._tokens[-1]:
            self._observe_beyond(tokens, seconds - branches * self.branch_seconds)
            return
        known = self._tokens
        right = bisect_left(known, tokens)
        left = max(right - 1, 0) if known[right] > tokens else right
        span = known[right] - known[left]
        share = (tokens - known[left]) / span if span else 1.0
        expected = self._seconds[left] * (1 - share) + self._seconds[right] * share
        expected += branches * self.branch_seconds
        error = _error(seconds, expected)
        self._observed += 1
        first = 1 / (1 + self._observed)
        if branches and self._observed > self.SETTLED:
            error /= 1 + branches
            self.branch_seconds = max(0.0, self.branch_seconds + self.LOCAL_RATE * error)
        fed = max(tokens, known[0])
        corrections = [
            error * max(first, self.COMMON_RATE * sqrt(min(fed, count) / max(fed, count)))
            for count in known
        ]
        corrections[left] += error * self._visit(left, 1 - share)
        corrections[right] += error * self._visit(right, share)
        # What steps with many tokens save must not make those with few cost nothing.
        self._seconds = [
            max(old + correction, old * (1 - self.LOCAL_RATE))
            for old, correction in zip(self._seconds, corrections, strict=True)
        ]

    def _visit(self, point: int, weight: float) -> float:
        """The share of an error that is corrected at a point that counts with this weight."""
        if self._observed <= self.SETTLED:
            return self.LOCAL_RATE * weight
        rate = max(self.LOCAL_RATE, 1 / (1 / self.FIRST_LOCAL_RATE + self._visits[point]))
        self._visits[point] += weight
        return rate * weight

    def _observe_beyond(self, tokens: int, seconds: float) -> None:
        """A step on the line through the last two points, whose slope the last one makes."""
        if len(self._tokens) < 2:
            return
        (left, right), (low, high) = self._tokens[-2:], self._seconds[-2:]
        lever = (tokens - left) / (right - left)
        expected = max(low + (high - low) * lever, high)
        corrected = high + _error(seconds, expected) * self._visit(-1, 1 / lever)
        self._seconds[-1] = max(corrected, high * (1 - self.LOCAL_RATE))


def _error(seconds: float, expected: float) -> float:
    return min(max(seconds, expected / 2), expected * 2) - expected


FLAT = ((1, 1.0),)
"""Tokens cost nothing, as on a large GPU: every step feeds what the sizes allow."""
