"""Measuring the cost of steps with a clock that only the tests move."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from vllm_lookahead.core.cost import Points, RunningCost
from vllm_lookahead.engine import files, step_cost
from vllm_lookahead.engine.step_cost import StepClock, cache_path, measured_points


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_cost, "time", clock)
    return clock


def alone(value: Any) -> Any:
    """The broadcast of a single rank."""
    return value


class Ranks:
    """A broadcast that answers with what the first rank says, and counts."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.given: list[Any] = []

    def __call__(self, value: Any) -> Any:
        self.given.append(value)
        return self.answers.pop(0)


class Runner:
    """A runner whose steps take 1/64 s per token, and longer in slow passes."""

    def __init__(self, clock: Clock, max_num_tokens: int = 64, model: str = "a/model") -> None:
        self.clock = clock
        self.max_num_tokens = max_num_tokens
        self.max_model_len = 100
        self.vllm_config: Any = vllm_config(model=model)
        self.parallel_config = SimpleNamespace(data_parallel_size=1)
        self.lora_config = None
        self.model = SimpleNamespace(compute_logits=self.logits.append)
        self.passes: list[int] = []
        self.slow: dict[int, float] = {}
        """Further seconds by the number of the pass."""
        self.seconds_per_token = 1 / 64
        self.bumps: dict[int, float] = {}
        """Further seconds by the number of tokens."""

    @property
    def logits(self) -> list[Sequence[int]]:
        """Hidden states of which logits were computed."""
        return self.__dict__.setdefault("_logits", [])

    def _dummy_run(
        self, count: int, force_attention: bool, profile_seq_lens: int
    ) -> tuple[list[int], None]:
        # No sequence is longer than the model allows.
        assert force_attention
        assert profile_seq_lens == self.max_model_len
        self.clock.now += count * self.seconds_per_token + self.slow.get(len(self.passes), 0.0)
        self.clock.now += self.bumps.get(count, 0.0)
        self.passes.append(count)
        # Padded, as a compiled model's output may be.
        return list(range(count + 3)), None


def vllm_config(model: str = "a/model", dtype: str = "bfloat16", ranks: int = 1) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model, revision=None, dtype=dtype, quantization=None, enforce_eager=True
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        lora_config=None,
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def points_of(runner: Runner, broadcast: Any = alone, is_first: bool = True) -> Points:
    return measured_points(runner, broadcast, is_first)  # type: ignore[arg-type]


# Costs of the ladder's numbers of tokens, to the first that costs more than 6 times one token.
EXPECTED = [(count, count / 64) for count in (1, 2, 4, 6, 8)]


def test_tokens_cost_no_more_than_a_larger_number_of_them(clock: Clock) -> None:
    runner = Runner(clock)
    runner.bumps = {2: 3 / 64}
    assert points_of(runner) == [
        (count, max(count, 4) / 64 if count > 1 else 1 / 64) for count, _ in EXPECTED
    ]


# The file


def test_second_start_takes_the_points_of_the_first_from_the_file(clock: Clock) -> None:
    assert points_of(Runner(clock)) == EXPECTED
    later = Runner(clock)
    assert points_of(later) == EXPECTED
    assert later.passes == []


def test_file_lies_in_the_cache_directory_and_no_other_is_left_there(
    clock: Clock, cache: Path
) -> None:
    runner = Runner(clock)
    points_of(runner)
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert files == [cache_path(runner.vllm_config)]
    assert files[0].parent == cache / "vllm-lookahead" / "step-cost"
    assert json.loads(files[0].read_text()) == [list(point) for point in EXPECTED]


def test_cache_is_in_the_home_directory_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "vllm-lookahead" / "step-cost"
    assert cache_path(vllm_config()).parent == folder


def test_other_model_is_measured_for_itself(clock: Clock) -> None:
    points_of(Runner(clock))
    other = Runner(clock, model="another/model")
    points_of(other)
    assert other.passes


def test_file_is_another_for_whatever_changes_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [
        cache_path(vllm_config()),
        cache_path(vllm_config(model="another/model")),
        cache_path(vllm_config(dtype="float32")),
        cache_path(vllm_config(ranks=2)),
    ]
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so")
    paths.append(cache_path(vllm_config()))
    monkeypatch.setattr(step_cost, "cpu_model", lambda: "Another CPU")
    paths.append(cache_path(vllm_config()))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    paths.append(cache_path(vllm_config()))
    assert len(set(paths)) == len(paths)
    assert cache_path(vllm_config()) == paths[-1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"5",
        b'"text"',
        b"{}",
        b"[]",
        b"[1, 2]",
        b"[[1]]",
        b"[[1, null]]",
        b'[[1, "fast"]]',
        b"[[0, 1.0]]",
        b"[[1, -1.0]]",
        b"[[Infinity, 1.0]]",
        b"[[2, 1.0], [1, 2.0]]",
    ],
    ids=repr,
)
def test_file_that_holds_no_curve_is_ignored_and_replaced(clock: Clock, content: bytes) -> None:
    runner = Runner(clock)
    path = cache_path(runner.vllm_config)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert points_of(runner) == EXPECTED
    assert json.loads(path.read_text()) == [list(point) for point in EXPECTED]


def test_folder_that_cannot_be_written_costs_no_more_than_a_warning(
    clock: Clock, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file in the folder's place: that stops the superuser, too.
    cache.write_text("")
    logger = Mock()
    monkeypatch.setattr(files, "logger", logger)
    assert points_of(Runner(clock)) == EXPECTED
    logger.warning.assert_called_once()
    message, *values = logger.warning.call_args.args
    assert "for the next start" in message
    assert values[0] == cache_path(vllm_config())


def test_file_that_can_be_written_is_worth_no_warning(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = Mock()
    monkeypatch.setattr(files, "logger", logger)
    points_of(Runner(clock))
    logger.warning.assert_not_called()


# Measuring


def test_no_more_tokens_are_measured_than_a_step_may_have(clock: Clock) -> None:
    runner = Runner(clock, max_num_tokens=5)
    assert points_of(runner) == [(1, 1 / 64), (2, 2 / 64), (4, 4 / 64)]
    assert max(runner.passes) == 4


def test_first_pass_of_each_number_of_tokens_does_not_count(clock: Clock) -> None:
    runner = Runner(clock)
    # The passes of 1, three times, and then 2: all caches are cold.
    runner.slow = {0: 0.5, 3: 0.5}
    assert points_of(runner) == EXPECTED


def test_single_slow_rounds_do_not_count(clock: Clock) -> None:
    runner = Runner(clock)
    # The rounds follow the five times three passes that find the ladder's end.
    runner.slow = {15: 0.5, 21: 0.5}
    assert points_of(runner) == EXPECTED


def test_logits_of_all_tokens_are_part_of_a_step(clock: Clock) -> None:
    runner = Runner(clock)
    points_of(runner)
    assert [len(hidden) for hidden in runner.logits] == runner.passes


def test_measuring_ends_after_five_seconds_with_what_is_known(clock: Clock) -> None:
    runner = Runner(clock)
    runner.seconds_per_token = 1.0
    # 3 s for one token, further 5 s for two; one round more, as there must be one.
    assert points_of(runner) == [(1, 1.0), (2, 2.0)]
    assert runner.passes == [1, 1, 1, 2, 1, 2, 1, 2]


def test_other_ranks_take_the_points_from_the_first_and_touch_no_file(
    clock: Clock, cache: Path
) -> None:
    path = cache_path(vllm_config())
    path.parent.mkdir(parents=True)
    path.write_text("[[1, 7.0]]")
    runner = Runner(clock)
    ranks = Ranks([(1, 2.0)])
    assert points_of(runner, ranks, is_first=False) == [(1, 2.0)]
    assert ranks.given == [None]
    assert runner.passes == []
    assert path.read_text() == "[[1, 7.0]]"


def test_other_ranks_measure_as_long_as_the_first(clock: Clock, cache: Path) -> None:
    runner = Runner(clock)
    # No file; one and two tokens, then the ladder ends; the second round is the last.
    first = [(1, 3.0), (2, 4.0)]
    ranks = Ranks(None, False, True, False, True, first)
    # What this rank has measured is not what counts.
    assert points_of(runner, ranks, is_first=False) == first
    assert runner.passes == [1, 1, 1, 2, 1, 2, 1, 2, 1, 2]
    assert not cache.exists()


def test_data_parallel_engines_all_measure_as_much_and_use_no_file(
    clock: Clock, cache: Path
) -> None:
    runner = Runner(clock, max_num_tokens=1000)
    runner.parallel_config.data_parallel_size = 2
    # So slow that one engine by itself would stop at once.
    runner.seconds_per_token = 10.0
    counts = [count for count, _ in points_of(runner)]
    assert counts == [1, 2, 4, 6, 8, 12, 16]
    assert not cache.exists()


# The clock

PERIOD = StepClock.PERIOD


def near(*points: tuple[int, float]) -> object:
    return [(tokens, pytest.approx(seconds)) for tokens, seconds in points]


def run(steps: StepClock, clock: Clock, tokens: int, seconds: float) -> bool:
    """A step that takes so long."""
    is_corrected = steps.begin_step(tokens)
    clock.now += seconds
    return is_corrected


def test_curve_in_use_is_corrected_every_8_steps(clock: Clock) -> None:
    assert PERIOD == 8
    steps = StepClock([(1, 1.0)], alone)
    corrected = [number for number in range(1, 200) if run(steps, clock, 1, 1.5)]
    assert corrected == list(range(8, 200, 8))


def test_curve_in_use_stays_between_two_corrections(clock: Clock) -> None:
    points = [(1, 1.0)]
    steps = StepClock(points, alone)
    for _ in range(PERIOD - 1):
        run(steps, clock, 1, 1.5)
        assert steps.points == points == [(1, 1.0)]
    run(steps, clock, 1, 1.5)
    assert steps.points != [(1, 1.0)]


def test_step_takes_the_time_until_the_next_begins(clock: Clock) -> None:
    steps = StepClock([(1, 1.0)], alone)
    for _ in range(PERIOD):
        run(steps, clock, 1, 1.5)
    # 63 steps have ended.
    expected = RunningCost([(1, 1.0)])
    for _ in range(PERIOD - 1):
        expected.observe(1, 1.5)
    assert steps.points == near(*expected.points)


def test_time_counts_for_the_tokens_of_the_step_that_took_it(clock: Clock) -> None:
    steps = StepClock([(1, 1.0), (3, 2.0)], alone)
    for _ in range(PERIOD // 2):
        run(steps, clock, 1, 1.0)
        run(steps, clock, 3, 2.0)
    assert steps.points == near((1, 1.0), (3, 2.0))


def test_steps_that_are_not_comparable_do_not_count(clock: Clock) -> None:
    steps = StepClock([(1, 1.0)], alone)
    run(steps, clock, 0, 9.0)
    for _ in range(PERIOD - 1):
        run(steps, clock, 1, 1.0)
        run(steps, clock, 0, 9.0)
    assert steps.points == near((1, 1.0))


def test_time_before_the_first_step_does_not_count(clock: Clock) -> None:
    steps = StepClock([(1, 1.0)], alone)
    clock.now += 1000.0
    for _ in range(PERIOD):
        run(steps, clock, 1, 1.0)
    assert steps.points == near((1, 1.0))


def test_curve_in_use_is_the_first_ranks(clock: Clock) -> None:
    ranks = Ranks(([(1, 7.0)], 0.25, 0.125), ([(1, 8.0)], 0.5, 0.0625))
    steps = StepClock([(1, 1.0)], ranks)
    for _ in range(PERIOD):
        run(steps, clock, 1, 1.0)
    assert (steps.points, steps.branch_seconds, steps.draft_seconds) == ([(1, 7.0)], 0.25, 0.125)
    for _ in range(PERIOD):
        run(steps, clock, 1, 1.0)
    assert (steps.points, steps.branch_seconds, steps.draft_seconds) == ([(1, 8.0)], 0.5, 0.0625)
    # Every rank offers its own, and asks for none in between.
    assert ranks.given == [(near((1, 1.0)), 0.0, 0.0)] * 2


def test_branches_are_charged_for_what_their_steps_take_longer(clock: Clock) -> None:
    steps = StepClock([(1, 1.0), (5, 2.0)], alone, branch_seconds=0.125)
    for _ in range(640):
        run(steps, clock, 5, 2.0)
        steps.begin_step(5, branches=3)
        clock.now += 3.5
    assert steps.branch_seconds == pytest.approx(0.5, abs=0.01)
    assert dict(steps.points)[5] == pytest.approx(2.0, abs=0.03)


def test_time_of_drafts_is_no_part_of_the_steps(clock: Clock) -> None:
    steps = StepClock([(1, 1.0)], alone)
    for _ in range(2 * PERIOD):
        steps.begin_step(1)
        clock.now += 1.5
        steps.drafted(0.5, sequences=4)
    assert steps.points == near((1, 1.0))
    assert steps.draft_seconds == pytest.approx(0.125)


def test_drafts_cost_what_they_take_in_the_long_run(clock: Clock) -> None:
    steps = StepClock([(1, 1.0)], alone)
    for seconds in [0.5] * 64 + [0.25] * 256:
        steps.begin_step(1)
        steps.drafted(seconds, sequences=1)
    assert steps.draft_seconds == pytest.approx(0.25, abs=0.01)
