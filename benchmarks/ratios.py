"""Arithmetic of the speed commands. Rates are in tokens per second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

SAMPLES = 2000
LEVEL = 0.9


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer, or one batch of them."""

    tokens: int
    seconds: float


Sets = Mapping[str, Sequence[Timing]]
"""Timings of one method, in the order of the prompts, by prompt set."""


def rate(timings: Iterable[Timing]) -> float:
    """Tokens per second, from sums."""
    timings = list(timings)
    return sum(one.tokens for one in timings) / sum(one.seconds for one in timings)


def geometric_mean(values: Iterable[float]) -> float:
    values = list(values)
    return exp(sum(map(log, values)) / len(values))


def speedup(method: Sets, reference: Sets) -> float:
    """Geometric mean over the prompt sets of the ratio of rates."""
    return geometric_mean(rate(method[name]) / rate(reference[name]) for name in reference)


def bootstrap_interval(
    method: Sets, reference: Sets, *, samples: int = SAMPLES, level: float = LEVEL, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of `speedup`, over prompts drawn with replacement within each set.

    Args:
        method: timings of the method.
        reference: timings of what it is compared with, of the same prompts in the same order.
        samples: number of draws.
        level: share of the draws that lie in the interval.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    logs = np.zeros(samples)
    for name in reference:
        size = len(reference[name])
        draws = rng.integers(size, size=(samples, size))
        logs += np.log(_rates(method[name], draws) / _rates(reference[name], draws))
    means = np.exp(logs / len(reference))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _rates(timings: Sequence[Timing], draws: np.ndarray) -> np.ndarray:
    tokens = np.array([one.tokens for one in timings])
    seconds = np.array([one.seconds for one in timings])
    return np.asarray(tokens[draws].sum(axis=1) / seconds[draws].sum(axis=1))
