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
    REST = 32
    """Steps without drafts once they bring less than it takes to make them."""
    GAIN_MEMORY = 16
    """Decisions over which the gain of drafts is averaged."""
    FIRST_GAIN = 1.05
    """What drafts are taken to gain before the first decision."""

    def __init__(self, cost: StepCost, branch_cost: float = 0.0, draft_cost: float = 0.0) -> None:
        """
        Args:
            cost: of a step by its tokens.
            branch_cost: of a branch beside the primary one, whose scratch block must be filled,
                against a step of one token.
            draft_cost: of asking one sequence for its draft, likewise.
        """
        self.cost = cost
        self.branch_cost = branch_cost
        self.draft_cost = draft_cost
        self.last_cutoff = 0.0
        self._rate = 1.0
        self._decisions = 0
        self._gain = self.FIRST_GAIN
        self._resting = 0
        self._tired_of = 0
        self._looks_anew = False

    def rests(self, decoding: int) -> bool:
        """Whether the coming step does without drafts, to be asked once per step.

        Under high load drafts may bring less than the time that it takes to make them. Then
        there are none for some steps, until another look or until there are far fewer sequences.

        Args:
            decoding: sequences that decode in the step.
        """
        if self._resting and 0 < 2 * decoding <= self._tired_of:
            self._resting, self._gain, self._looks_anew = 0, self.FIRST_GAIN, False
        if self._resting:
            self._resting -= 1
            self._looks_anew = True
            return True
        return False

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
        room = self.cost.max_tokens - decoding
        if not decoding or room < 0:
            self._rate = 0.0
            return NOTHING
        descending = -np.sort(-values)
        if len(descending) > room:
            descending = descending[descending > descending[room]]
        yielded = np.empty(len(descending) + 1)
        yielded[0] = decoding
        np.cumsum(descending, out=yielded[1:])
        yielded[1:] += decoding
        costs = self.cost.of(decoding, decoding + len(descending))
        rate = yielded / costs
        # A cutoff takes all tokens of a value or none.
        rate[1:-1][descending[1:] == descending[:-1]] = 0.0
        best = int(rate.argmax())
        self._rate = float(rate[best])
        self._look_at_gain(decoding, self._rate / float(rate[0]), float(costs[best]))
        return float(descending[best - 1]) if best else NOTHING

    def _look_at_gain(self, decoding: int, gain: float, cost: float) -> None:
        """Take note of a decision: what it gains over plain decoding, and what its step costs."""
        gain *= cost / (cost + self.draft_cost * decoding)
        # After a rest the first look decides.
        self._gain += (gain - self._gain) / (1 if self._looks_anew else self.GAIN_MEMORY)
        self._looks_anew = False
        if self._gain < 1:
            self._resting, self._tired_of = self.REST, decoding
