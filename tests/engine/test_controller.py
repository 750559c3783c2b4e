"""Whatever the controller decides, outputs are plain decoding's; and it decides by the cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from vllm import LLM

from tests.engine import scripted
from tests.engine.harness import (
    engine,
    greedy,
    outcomes,
    random_prompts,
    runner,
    scheduler,
    seeded,
    stats,
)
from vllm_lookahead.core.controller import EVERYTHING, NOTHING, Controller
from vllm_lookahead.core.cost import StepCost
from vllm_lookahead.engine.step_cost import StepClock

PROMPTS = random_prompts(1, 3, 31, 32, 33, 60, 100, 150)
PARAMS = [greedy(96), seeded(7, 96), greedy(96, repetition_penalty=1.2), seeded(8, 96)] * 2
KEYS = ("steps", "plain", "windows")
STEEP = [[1, 1.0], [8, 1.0], [9, 1000.0]]
"""Eight tokens are free, a ninth never is."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def measured(tiny_llama: Path, cache: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        sources = [scripted.NAME, "suffix", "window", "output", "prompt"]
        with engine(tiny_llama, {"controller": True, "sources": sources}) as llm:
            yield llm


@pytest.fixture(scope="module")
def steep(tiny_llama: Path) -> Iterator[LLM]:
    with engine(tiny_llama, {"controller": True, "step_cost": STEEP}) as llm:
        yield llm


@pytest.fixture(autouse=True)
def no_script() -> None:
    scripted.ScriptedSource.script([], scripted.right_first)


class Restless(Controller):
    """Changes its mind every step, by a rule that no cost explains."""

    def __init__(self) -> None:
        super().__init__(StepCost([(1, 1.0)], 512))
        self.random = Random(1)
        self.decisions: set[float] = set()
        self.num_rests = 0

    def rests(self, decoding: int) -> bool:
        rests = self.random.random() < 0.3
        self.num_rests += rests
        return rests

    def cutoff(self, values: np.ndarray, decoding: int) -> float:
        choices = [NOTHING, EVERYTHING, 0.3, 0.05, float(self.random.random())]
        self.last_cutoff = self.random.choice(choices)
        self.decisions.add(self.last_cutoff)
        return self.last_cutoff

    def explorer(self, decoding: int) -> int | None:
        return self.random.randrange(decoding) if decoding and self.random.random() < 0.3 else None


def test_measured_controller_gives_plain_outputs(off: LLM, measured: LLM) -> None:
    assert outcomes(measured, PROMPTS, PARAMS) == outcomes(off, PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "shape",
    [
        scripted.right_first,
        scripted.right_third,
        scripted.partial_last,
        scripted.changing,
        scripted.duplicated,
    ],
)
def test_controller_that_changes_its_mind_every_step_gives_plain_outputs(
    off: LLM, measured: LLM, monkeypatch: pytest.MonkeyPatch, shape: scripted.Shape
) -> None:
    plain = outcomes(off, PROMPTS, PARAMS)
    restless = Restless()
    monkeypatch.setattr(runner(measured).drafter, "controller", restless)
    texts = [[*prompt, *choice.token_ids] for prompt, [choice] in zip(PROMPTS, plain, strict=True)]
    scripted.ScriptedSource.script(texts, shape)
    assert outcomes(measured, PROMPTS, PARAMS) == plain
    assert len(restless.decisions) > 3
    assert restless.num_rests > 3


def test_curve_in_use_is_among_the_statistics_and_on_disk(measured: LLM, cache: Path) -> None:
    curve = stats(measured)["step_cost"]
    assert curve[0][0] == 1
    assert all(seconds > 0 for _, seconds in curve)
    assert stats(measured)["draft_cost"] >= 0
    [file] = (cache / "vllm-lookahead" / "step-cost").glob("*.json")
    counts = [count for count, _ in json.loads(file.read_text())]
    assert counts == [count for count, _ in curve]


def test_curve_is_corrected_while_running(measured: LLM, cache: Path) -> None:
    [file] = (cache / "vllm-lookahead" / "step-cost").glob("*.json")
    outcomes(measured, PROMPTS[:1], greedy(2 * StepClock.PERIOD))
    corrected = dict(map(tuple, stats(measured)["step_cost"]))
    measured_at_start = dict(map(tuple, json.loads(file.read_text())))
    assert corrected.keys() == measured_at_start.keys()
    assert corrected != measured_at_start


def fed_and_steps(llm: LLM, prompts: list[list[int]], params: Any) -> tuple[int, int]:
    before = stats(llm)
    outcomes(llm, prompts, params)
    after = stats(llm)
    return after["fed"] - before["fed"], after["steps"] - before["steps"]


def test_step_feeds_no_token_that_is_not_worth_its_cost(off: LLM, steep: LLM) -> None:
    # A batch of eight is at the knee of the curve: each request feeds its root and no more. Only
    # explorations go beyond, four steps of 128, with a window of 3 tokens (W = 2, N = 3).
    fed, steps = fed_and_steps(steep, PROMPTS, greedy(96))
    assert steps <= fed <= steps + 3 * 4 * (1 + steps // 8 // 128 + 1)


def test_steps_that_fed_no_draft_or_a_window_are_counted(steep: LLM) -> None:
    before = stats(steep)
    outcomes(steep, PROMPTS, greedy(96))
    counted = {key: value - before[key] for key, value in stats(steep).items() if key in KEYS}
    # At the knee all but the explorations' steps are plain ones.
    assert counted["plain"] >= 0.9 * counted["steps"]
    assert counted["windows"] == counted["steps"] - counted["plain"]
    before = stats(steep)
    outcomes(steep, PROMPTS[-1:], greedy(96))
    assert stats(steep)["windows"] > before["windows"]


def test_step_feeds_what_is_free(off: LLM, steep: LLM) -> None:
    # Alone, a request may feed 7 tokens beside its root for nothing.
    fed, steps = fed_and_steps(steep, PROMPTS[-1:], greedy(96))
    assert 4 * steps < fed <= 8 * steps


def test_step_with_nothing_planned_prepares_no_drafts(
    off: LLM, steep: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = runner(steep)
    called = []

    def watched(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def record(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, record)

    watched(one, "_calc_spec_decode_metadata")
    watched(one, "_expand")
    watched(scheduler(steep), "update_draft_token_ids")
    outcomes(steep, PROMPTS[-1:], PARAMS[:1])
    assert set(called) == {"_calc_spec_decode_metadata", "_expand", "update_draft_token_ids"}
    called.clear()
    monkeypatch.setattr(one.drafter.controller, "rests", lambda decoding: True)
    # A prompt that is in the prefix cache would have placeholders for drafts in its first step.
    prompts = random_prompts(5, 40, 100, 150, seed=1)
    assert outcomes(steep, prompts, PARAMS[:4]) == outcomes(off, prompts, PARAMS[:4])
    assert called == []


def test_outputs_are_plain_at_the_knee(off: LLM, steep: LLM) -> None:
    for count in (1, 5, 8):
        plain = outcomes(off, PROMPTS[:count], PARAMS[:count])
        assert outcomes(steep, PROMPTS[:count], PARAMS[:count]) == plain
