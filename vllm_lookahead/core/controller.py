"""The controller: how many of the proposed tokens a step feeds.

A step that feeds q tokens costs T(q) and is expected to yield one token per sequence plus the
acceptance probabilities of the draft tokens fed. The controller takes the likeliest tokens of
the whole batch as long as that raises the expected tokens per cost. A token is never likelier
than its parent, so what it takes are trees.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_lookahead.core.cost import StepCost

NOTHING = float("inf")
"""A cutoff above all values."""
EVERYTHING = float("-inf")
"""A cutoff below all values."""


class Controller:
    """Turns the batch's values into the least value that is worth feeding."""

    EXPLORATION_PERIOD = 128
    """Steps of the engine from one exploration to the next."""
    EXPLORATION_STEPS = 4
    """Steps of an exploration: a window brings n-grams only when it is full."""

    def __init__(self, cost: StepCost, branch_cost: float = 0.0) -> None:
        """
        Args:
            cost: of a step by its tokens.
            branch_cost: of a branch beside the primary one, whose scratch block must be filled,
                against a step of one token.
        """
        self.cost = cost
        self.branch_cost = branch_cost
        self.last_cutoff = 0.0
        self._rate = 1.0
        self._decisions = 0

    def cutoff(self, values: npt.NDArray[np.float64], decoding: int) -> float:
        """The least value to feed, `NOTHING` if plain decoding is best.

        Args:
            values: [n] expected tokens by each draft token of the batch, in any order.
            decoding: sequences in the batch that decode, which feed a root each.
        """
        self._decisions += 1
        self.last_cutoff = best = self._best(values, decoding)
        return best

    def explorer(self, decoding: int) -> int | None:
        """The sequence, by its place in the batch, that feeds its window whatever it is worth.

        Now and then one does for a few steps, for what windows bring is only learned by feeding
        them. All other sources are judged by what the model says anyway.
        """
        turn, step = divmod(self._decisions, self.EXPLORATION_PERIOD)
        return turn % decoding if decoding and step < self.EXPLORATION_STEPS else None

    @property
    def branch_price(self) -> float:
        """Tokens that a branch must add to be worth its cost, at the last step's rate."""
        return self.branch_cost * self._rate

    @property
    def floor(self) -> float:
        """A value that the next cutoff will hardly fall below."""
        return 0.5 * min(self.last_cutoff, 0.5)

    def _best(self, values: npt.NDArray[np.float64], decoding: int) -> float:
        table = self.cost.table
        room = len(table) - 1 - decoding
        self._rate = decoding / float(table[decoding]) if room >= 0 else 0.0
        if room <= 0 or not len(values):
            return NOTHING
        descending = -np.sort(-values)
        if len(descending) > room:
            descending = descending[descending > descending[room]]
        if not len(descending):
            return NOTHING
        yielded = np.empty(len(descending) + 1)
        yielded[0] = decoding
        np.cumsum(descending, out=yielded[1:])
        yielded[1:] += decoding
        rate = yielded / table[decoding : decoding + len(yielded)]
        # A cutoff takes all tokens of a value or none.
        rate[1:-1][descending[1:] == descending[:-1]] = 0.0
        best = int(rate.argmax())
        self._rate = float(rate[best])
        return float(descending[best - 1]) if best else NOTHING
