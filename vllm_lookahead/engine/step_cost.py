"""Measuring what steps cost: at start-up, from a file of an earlier start, and while running."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from vllm_lookahead.compat import vllm_version
from vllm_lookahead.core.cost import Points, RunningCost, StepCost
from vllm_lookahead.engine.files import cache_file, load_json, save_json
from vllm_lookahead.machine import cpu_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_lookahead.engine.runner import LookaheadCPUModelRunner

logger = init_logger("vllm.lookahead")

LADDER = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of tokens that are measured."""
STEEP = 6.0
"""The ladder ends where a step costs so many times that of one token."""
ROUNDS = 5
CONTEXT = 256
"""Tokens before each of them that attention looks at."""
SECONDS = 5.0
"""After so long no further round is begun."""
IN_STEP_COUNTS = 7
"""Rungs that data-parallel engines measure."""

Broadcast = Callable[[Any], Any]
"""Returns the first rank's argument on all ranks."""


def measured_points(
    runner: LookaheadCPUModelRunner, broadcast: Broadcast, is_first: bool
) -> Points:
    """Seconds of a step by its tokens, equal on all ranks: from the file, or measured.

    Args:
        runner: with its KV cache; all ranks call this at the same time.
        broadcast: see `Broadcast`.
        is_first: whether this is the first rank, which reads and writes the file.
    """
    largest = runner.max_num_tokens
    path = cache_path(runner.vllm_config)
    # Data-parallel engines pass in step with each other, so all of them must do as much: they
    # share no file, which one may have and another not, and go by no clock.
    in_step = runner.parallel_config.data_parallel_size > 1
    points: Points | None = None
    if not in_step:
        points = broadcast(_load(path) if is_first else None)
    if points is None:
        ladder = [count for count in LADDER if count <= largest]
        if in_step:
            measured = _measure(runner, ladder[:IN_STEP_COUNTS], broadcast, inf)
        else:
            measured = _measure(runner, ladder, broadcast, SECONDS)
        # Ranks measure other times, and would plan other trees by them.
        points = broadcast(measured)
        if is_first and not in_step:
            save_json(path, points)
        logger.info("Measured the cost of a step by its tokens: %s", _relative(points))
    else:
        logger.info("Cost of a step by its tokens, from %s: %s", path, _relative(points))
    return points


def cache_path(config: VllmConfig) -> Path:
    """The file for this model, machine and configuration."""
    model = config.model_config
    return cache_file(
        "step-cost",
        [
            vllm_version(),
            torch.__version__,
            model.model,
            model.revision,
            str(model.dtype),
            str(model.quantization),
            model.enforce_eager,
            config.parallel_config.tensor_parallel_size,
            config.lora_config is not None,
            os.environ.get("LD_PRELOAD", ""),
            torch.get_num_threads(),
            cpu_model(),
        ],
    )


def _load(path: Path) -> Points | None:
    try:
        points = [(int(count), float(cost)) for count, cost in load_json(path)]
        StepCost(points, LADDER[-1])
    except (ValueError, TypeError, OverflowError):
        return None
    return points


def _relative(points: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{count}: {cost / points[0][1]:.2f}" for count, cost in points)


def _measure(
    runner: LookaheadCPUModelRunner,
    ladder: Sequence[int],
    broadcast: Broadcast,
    limit: float,
) -> Points:
    """Least seconds of a forward pass with all logits, per number of tokens, each a sequence.

    The first rank decides how far to go, since every pass is a collective one: up to a steep
    rung and ``limit`` seconds, or all the way if there is no limit.
    """
    begin = time.perf_counter()
    counts: list[int] = []
    for count in ladder:
        counts.append(count)
        _seconds(runner, count)
        first, last = _seconds(runner, counts[0]), _seconds(runner, count)
        if limit < inf and broadcast(last > STEEP * first or time.perf_counter() - begin > limit):
            break
    samples: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(ROUNDS):
        # Round by round, so that a noisy moment does not hit one count alone.
        for count, seconds in samples.items():
            seconds.append(_seconds(runner, count))
        if limit < inf and broadcast(time.perf_counter() - begin > limit):
            break
    # What else the machine does only ever adds to the time, and so do more tokens. (A kernel may
    # be slow for two tokens, but by far not as much as the noise of its measurement.)
    least = [min(seconds) for seconds in samples.values()]
    least = list(accumulate(reversed(least), min))[::-1]
    return list(zip(samples, least, strict=True))


def _seconds(runner: LookaheadCPUModelRunner, count: int) -> float:
    begin = time.perf_counter()
    context = min(CONTEXT, runner.max_model_len)
    hidden, last_of_requests = runner._dummy_run(
        count, force_attention=True, profile_seq_lens=context
    )
    # Adapters are mapped for one row of logits per dummy request.
    runner.model.compute_logits(last_of_requests if runner.lora_config else hidden[:count])
    return time.perf_counter() - begin


class StepClock:
    """Times the steps as they follow each other, and corrects the curve by them."""

    PERIOD = 8
    """Steps from one correction of the curve in use to the next."""
    DRAFT_RATE = 0.05
    """Share of an error by which the time that drafts take is corrected."""

    def __init__(self, points: Points, broadcast: Broadcast, branch_seconds: float = 0.0) -> None:
        """
        Args:
            points: the curve to start from.
            branch_seconds: what a branch adds to a step, to start from.
            broadcast: see `Broadcast`. Times differ between ranks, so the first one's count.
        """
        self._cost = RunningCost(points, branch_seconds)
        self._broadcast = broadcast
        self._steps = 0
        self._tokens = 0
        self._branches = 0
        self._began = 0.0
        self._drafting = 0.0
        self._draft_seconds = 0.0
        self.points = points
        """The curve in use: of steps without the time of their drafts."""
        self.branch_seconds = branch_seconds
        """What a branch is taken to add."""
        self.draft_seconds = 0.0
        """What it is taken to cost to ask a sequence for its draft."""

    def begin_step(self, tokens: int, branches: int = 0) -> bool:
        """A step begins, the one before it ends; all ranks call this for every step.

        Args:
            tokens: tokens that it feeds, 0 if its time says nothing about decoding.
            branches: branches in them beside the primary ones.

        Returns:
            Whether the curve in use was corrected.
        """
        now = time.perf_counter()
        if tokens and self._tokens:
            seconds = now - self._began - self._drafting
            self._cost.observe(self._tokens, seconds, self._branches)
        self._tokens, self._branches, self._began = tokens, branches, now
        self._drafting = 0.0
        self._steps += 1
        if self._steps % self.PERIOD:
            return False
        corrected = self._cost.points, self._cost.branch_seconds, self._draft_seconds
        self.points, self.branch_seconds, self.draft_seconds = self._broadcast(corrected)
        return True

    def drafted(self, seconds: float, sequences: int) -> None:
        """In the step that runs, so many sequences were asked for drafts, all in this time."""
        self._drafting += seconds
        rate = self.DRAFT_RATE if self._draft_seconds else 1.0
        self._draft_seconds += rate * (seconds / sequences - self._draft_seconds)
