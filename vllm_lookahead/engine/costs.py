"""What feeding, branching and drafting cost in this engine, as its controller is told."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from vllm_lookahead.core.cost import FLAT, Points, StepCost
from vllm_lookahead.engine.step_cost import Broadcast, StepClock, measured_points

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_lookahead.engine.runner import LookaheadCPUModelRunner
    from vllm_lookahead.engine.step import StepPlan


class EngineCosts:
    """Costs of a runner's steps: given or measured at start-up, corrected while it runs."""

    def __init__(self, runner: LookaheadCPUModelRunner) -> None:
        self._runner = runner
        self._clock: StepClock | None = None
        self.points: Points = []
        """The cost curve in use, (tokens, cost)."""
        self.branch = 0.0
        """What a branch adds to a step, against a step of one token."""
        self.draft = 0.0
        """What it costs to ask a sequence for its draft, likewise."""

    def prepare(self, broadcast: Broadcast, is_first: bool) -> None:
        """Before the first request; arguments as in `measured_points`."""
        runner, config = self._runner, self._runner.drafter.config
        if config.step_cost != "measured" or not config.controller:
            given = config.step_cost
            self._use(list(FLAT if isinstance(given, str) else given))
            return
        points = measured_points(runner, broadcast, is_first)
        branch_seconds = broadcast(runner.scratch.seconds_to_fill(partial(runner._dummy_run, 1)))
        self._clock = StepClock(points, broadcast, branch_seconds)
        self._use(points, branch_seconds)

    def begin_step(self, plan: StepPlan, widened: SchedulerOutput) -> None:
        """A step begins, as planned; the one before it ends."""
        clock = self._clock
        if clock is None:
            return
        is_comparable = plan.num_requests == len(widened.num_scheduled_tokens)
        tokens = widened.total_num_scheduled_tokens if is_comparable else 0
        if clock.begin_step(tokens, plan.num_branches):
            self._use(clock.points, clock.branch_seconds, clock.draft_seconds)

    def drafted(self, seconds: float, sequences: int) -> None:
        """As in `StepClock.drafted`."""
        if self._clock is not None:
            self._clock.drafted(seconds, sequences)

    def _use(self, points: Points, branch_seconds: float = 0.0, draft_seconds: float = 0.0) -> None:
        self.points = points
        self.branch = branch_seconds / points[0][1]
        self.draft = draft_seconds / points[0][1]
        curve = StepCost(points, self._runner.max_num_tokens)
        self._runner.drafter.use_cost(curve, self.branch, self.draft)
