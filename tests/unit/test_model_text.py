"""When the model writes, how much at once, and when its texts come from the file."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_lookahead.config import LookaheadConfig
from vllm_lookahead.engine import model_text
from vllm_lookahead.engine.model_text import (
    FIRST_TOKENS,
    IN_STEP_LENGTH,
    TEXT_LENGTH,
    TEXTS_AT_ONCE,
    Texts,
    cache_path,
)
from vllm_lookahead.engine.text_sampler import TextSampler

VOCAB = 3000
BOS = 17
BLOCK_SIZE = 16
GROUP = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK_SIZE))
FIRSTS = model_text._first_tokens(VOCAB)
LENGTH = TEXT_LENGTH - 1
"""Tokens of a text where there is room: one is the context before it."""


class Runner:
    """Has what `model_text` looks at; `execute_model` hears of the end of a round only."""

    def __init__(
        self, tokens: int = 1000, model: str = "some/model", ranks: int = 1, groups: int = 1
    ) -> None:
        self.max_num_reqs, self.max_num_tokens, self.max_model_len = 4, 512, 1000
        self.kv_cache_config = SimpleNamespace(
            num_blocks=1 + 63 * groups, kv_cache_groups=[GROUP] * groups
        )
        self.drafter = SimpleNamespace(config=LookaheadConfig(model_text_tokens=tokens))
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model=model,
                revision=None,
                dtype="float32",
                quantization=None,
                get_vocab_size=lambda: VOCAB,
                hf_text_config=SimpleNamespace(bos_token_id=BOS),
            ),
            parallel_config=SimpleNamespace(data_parallel_size=ranks),
        )
        self.sampler = "vLLM's"
        self.finished: list[set[str]] = []

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        assert scheduled.total_num_scheduled_tokens == 0
        self.finished.append(scheduled.finished_req_ids)


class Model:
    """Says the next token of the vocabulary, and remembers the steps; each takes some time."""

    def __init__(self) -> None:
        self.steps: list[SchedulerOutput] = []
        self.samplers: list[object] = []
        self.now = 0.0
        self.step_seconds = 0.0
        self.stride = 1

    def step(self, runner: Any, scheduled: SchedulerOutput, texts: dict[str, list[int]]) -> None:
        self.steps.append(scheduled)
        self.samplers.append(runner.sampler)
        self.now += self.step_seconds
        for name in scheduled.num_scheduled_tokens:
            texts[name].append((texts[name][-1] + self.stride) % VOCAB)

    @property
    def rounds(self) -> list[SchedulerOutput]:
        """The first steps of texts."""
        return [step for step in self.steps if step.scheduled_new_reqs]


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Model:
    model = Model()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_text, "_step", model.step)
    monkeypatch.setattr(model_text, "time", SimpleNamespace(perf_counter=lambda: model.now))
    return model


def texts_of(runner: Runner, broadcast: Any = lambda value: value, first: bool = True) -> Texts:
    return model_text.model_text(runner, broadcast, first)  # type: ignore[arg-type]


def expected(*lengths: int, begin: int = 0) -> Texts:
    """Texts of these lengths, of which the first is the ``begin``-th of the model."""
    return [
        [(first + position) % VOCAB for position in range(length)]
        for first, length in zip(FIRSTS[begin:], lengths, strict=False)
    ]


def kept(runner: Runner) -> Any:
    """What the file holds."""
    return json.loads(cache_path(runner.vllm_config).read_text())


# What is written


def test_as_many_tokens_as_wanted_are_written_in_texts_of_one_length(model: Model) -> None:
    runner = Runner(1000)
    assert texts_of(runner) == expected(*[LENGTH] * 5, 1000 - 5 * LENGTH)
    # Texts are written whole, four at once.
    assert [len(step.scheduled_new_reqs) for step in model.rounds] == [4, 2]
    assert kept(runner) == expected(*[LENGTH] * 6)


def test_text_begins_with_a_context_token_that_is_no_part_of_it(model: Model) -> None:
    [text] = texts_of(Runner(LENGTH))
    [request] = model.steps[0].scheduled_new_reqs
    assert request.prompt_token_ids == [BOS, text[0]]


@pytest.mark.parametrize(
    ("ids", "token"),
    [
        ({"bos_token_id": 1, "eos_token_id": 2}, 1),
        ({"bos_token_id": None, "eos_token_id": 2}, 2),
        ({"bos_token_id": None, "eos_token_id": [3, 4]}, 3),
        ({"bos_token_id": None, "eos_token_id": []}, 0),
        ({}, 0),
    ],
)
def test_context_is_what_the_model_begins_or_else_ends_with(
    model: Model, ids: dict[str, Any], token: int
) -> None:
    runner = Runner(1)
    runner.vllm_config.model_config.hf_text_config = SimpleNamespace(**ids)
    texts_of(runner)
    [request] = model.steps[0].scheduled_new_reqs
    assert request.prompt_token_ids == [token, FIRSTS[0]]


def test_every_step_feeds_the_last_token_of_every_text(model: Model) -> None:
    texts_of(Runner(2 * LENGTH))
    first, *others = model.steps
    names = [request.req_id for request in first.scheduled_new_reqs]
    assert first.num_scheduled_tokens == dict.fromkeys(names, 2)
    # One token is given, the first step says one, and each other step one more.
    assert len(others) == LENGTH - 2
    for index, step in enumerate(others):
        cached = step.scheduled_cached_reqs
        assert cached.req_ids == names
        assert step.num_scheduled_tokens == dict.fromkeys(names, 1)
        assert cached.num_computed_tokens == [2 + index] * 2
        assert cached.num_output_tokens == [1 + index] * 2


def test_all_texts_of_a_round_are_finished_before_the_next() -> None:
    runner = Runner(1000)
    texts_of(runner)
    assert [len(finished) for finished in runner.finished] == [4, 2]


def test_texts_begin_with_different_tokens_of_the_vocabularys_first(model: Model) -> None:
    runner = Runner(2 * FIRST_TOKENS)
    runner.vllm_config.model_config.get_vocab_size = lambda: 100_000
    runner.max_num_reqs = runner.max_num_tokens = runner.kv_cache_config.num_blocks = 10_000
    runner.max_model_len = 3
    # Texts of two tokens.
    assert sorted(text[0] for text in texts_of(runner)) == list(range(FIRST_TOKENS))


def test_each_round_has_a_sampler_and_vllms_comes_back(model: Model) -> None:
    runner = Runner(1000)
    texts_of(runner)
    assert {type(sampler) for sampler in model.samplers} == {TextSampler}
    assert len(set(map(id, model.samplers))) == len(model.rounds) == 2
    assert runner.sampler == "vLLM's"


def test_vllms_sampler_comes_back_after_an_error_too(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(model_text, "_step", fail)
    runner = Runner(1000)
    with pytest.raises(RuntimeError):
        texts_of(runner)
    assert runner.sampler == "vLLM's"


# Room


@pytest.mark.parametrize(
    ("limits", "count", "length"),
    [
        # 63 blocks of 16 tokens; a text with its context takes 13.
        ({}, 4, LENGTH),
        ({"max_num_reqs": 100}, 4, LENGTH),
        ({"max_num_reqs": 3}, 3, LENGTH),
        ({"max_num_reqs": 100, "max_model_len": 64}, 15, 63),
        ({"max_num_reqs": 100, "max_model_len": 65}, 12, 64),
        ({"max_num_reqs": 100, "max_model_len": 10}, 63, 9),
        ({"max_num_tokens": 6}, 3, LENGTH),
        ({"max_num_tokens": 7}, 3, LENGTH),
        ({"num_blocks": 13}, 1, 191),
        ({"num_blocks": 14}, 1, LENGTH),
        ({"num_blocks": 27}, 2, LENGTH),
        ({"num_blocks": 2}, 1, 15),
        ({"num_blocks": 10_000, "max_num_reqs": 300}, TEXTS_AT_ONCE, LENGTH),
    ],
    ids=str,
)
def test_round_fits_into_requests_tokens_blocks_and_the_models_length(
    model: Model, limits: dict[str, int], count: int, length: int
) -> None:
    runner = Runner(TEXTS_AT_ONCE * LENGTH)
    vars(runner).update(limits)
    if "num_blocks" in limits:
        runner.kv_cache_config.num_blocks = limits["num_blocks"]
    texts = texts_of(runner)
    assert len(model.steps[0].scheduled_new_reqs) == count
    assert len(texts[0]) == length


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_every_text_has_blocks_of_its_own_for_all_of_its_tokens(model: Model, groups: int) -> None:
    runner = Runner(groups=groups)
    texts_of(runner)
    for step in model.rounds:
        tables = [table for request in step.scheduled_new_reqs for table in request.block_ids]
        assert len(tables) == groups * len(step.scheduled_new_reqs)
        # The context and all tokens but the last are fed.
        assert all(len(table) * BLOCK_SIZE >= LENGTH for table in tables)
        blocks = [block for table in tables for block in table]
        assert len(set(blocks)) == len(blocks)
        # Block 0 is vLLM's null block.
        assert min(blocks) > 0
        assert max(blocks) < runner.kv_cache_config.num_blocks


# The file


def test_second_start_writes_nothing(model: Model) -> None:
    texts = texts_of(Runner(1000))
    model.steps.clear()
    assert texts_of(Runner(1000)) == texts
    assert model.steps == []


def test_start_that_wants_less_takes_the_first_texts(model: Model) -> None:
    texts_of(Runner(1000))
    model.steps.clear()
    assert texts_of(Runner(300)) == expected(LENGTH, 300 - LENGTH)
    assert texts_of(Runner(LENGTH)) == expected(LENGTH)
    assert model.steps == []
    # And forgets none of them.
    assert kept(Runner()) == expected(*[LENGTH] * 6)


def test_start_that_wants_more_writes_what_is_missing(model: Model) -> None:
    texts_of(Runner(2 * LENGTH))
    model.steps.clear()
    assert texts_of(Runner(5 * LENGTH)) == expected(*[LENGTH] * 5)
    assert [len(step.scheduled_new_reqs) for step in model.steps[:1]] == [3]
    assert kept(Runner()) == expected(*[LENGTH] * 5)


def test_start_that_has_no_time_keeps_shorter_texts_and_the_next_one_goes_on(
    model: Model,
) -> None:
    model.step_seconds = 1.0
    # Twenty steps beside the first token.
    assert texts_of(Runner(1000)) == kept(Runner()) == expected(*[21] * 4)
    assert texts_of(Runner(1000)) == kept(Runner()) == expected(*[21] * 8)
    model.step_seconds = 0.0
    # 832 tokens are missing: four texts, and another one.
    texts = texts_of(Runner(1000))
    assert texts == expected(*[21] * 8, *[LENGTH] * 4, 1000 - 8 * 21 - 4 * LENGTH)
    assert kept(Runner())[:8] == expected(*[21] * 8)


def test_start_that_has_time_for_some_rounds_keeps_them_whole(model: Model) -> None:
    model.step_seconds = 1 / 16
    # 320 steps, of which a round takes 198.
    assert texts_of(Runner(10_000)) == expected(*[LENGTH] * 4, *[1 + 320 - 198] * 4)
    assert len(model.steps) == 320


def test_texts_of_a_round_that_was_stopped_are_finished(model: Model) -> None:
    model.step_seconds = 1.0
    runner = Runner(1000)
    texts_of(runner)
    assert [len(finished) for finished in runner.finished] == [4]


def test_other_model_writes_for_itself(model: Model) -> None:
    texts_of(Runner())
    model.steps.clear()
    model.stride = 2
    assert texts_of(Runner(1, model="another/model")) == [FIRSTS[:1]]
    assert model.steps
    assert kept(Runner(model="another/model"))[0][:3] == [FIRSTS[0], FIRSTS[0] + 2, FIRSTS[0] + 4]


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '["ab"]', '[["a"]]', "[[1.5]]", "[[-1]]", f"[[{VOCAB}]]", "null", "[null]"],
)
def test_unusable_file_is_replaced(model: Model, text: str) -> None:
    path = cache_path(Runner().vllm_config)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert texts_of(Runner(LENGTH)) == expected(LENGTH)
    assert kept(Runner()) == expected(LENGTH)


# Ranks


@pytest.mark.parametrize("step_seconds", [0.0, 1.0], ids=["all", "in time"])
def test_first_ranks_texts_are_everybodys(model: Model, step_seconds: float) -> None:
    values: list[Any] = []

    def record(value: Any) -> Any:
        values.append(deepcopy(value))
        return value

    model.step_seconds = step_seconds
    first = texts_of(Runner(), record)
    steps = len(model.steps)
    file = kept(Runner())
    said = iter(values)
    # The other rank's model says something else, and so do its clock and its file.
    model.step_seconds, model.stride = 1e6, 2
    other = texts_of(Runner(), lambda value: next(said), first=False)
    assert other == first
    assert list(said) == []
    # Every step is a collective one.
    assert len(model.steps) == 2 * steps
    assert kept(Runner()) == file


@pytest.mark.parametrize("step_seconds", [0.0, 1e6])
def test_data_parallel_engines_do_as_much_whatever_clock_and_file_say(
    model: Model, step_seconds: float
) -> None:
    texts_of(Runner(LENGTH))
    model.steps.clear()
    model.step_seconds = step_seconds
    assert texts_of(Runner(1000, ranks=2)) == expected(*[IN_STEP_LENGTH - 1] * 4)
    assert len(model.rounds) == 1
    assert len(model.steps) == IN_STEP_LENGTH - 2
    # And they write no file.
    assert kept(Runner()) == expected(LENGTH)


def test_data_parallel_engines_keep_no_more_than_is_wanted(model: Model) -> None:
    assert texts_of(Runner(60, ranks=2)) == expected(IN_STEP_LENGTH - 1, 60 - (IN_STEP_LENGTH - 1))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_tokens": 1},
        {"max_model_len": 1},
        {"max_model_len": 2},
        {"kv_cache_config": SimpleNamespace(num_blocks=1, kv_cache_groups=[GROUP])},
    ],
    ids=str,
)
def test_engine_without_room_for_a_text_writes_none(
    model: Model, limits: dict[str, Any], ranks: int
) -> None:
    runner = Runner(ranks=ranks)
    vars(runner).update(limits)
    assert texts_of(runner) == []
    assert model.steps == []


def test_every_text_begins_with_another_token(model: Model) -> None:
    runner = Runner(1 << 20)
    runner.vllm_config.model_config.get_vocab_size = lambda: 7
    assert sorted(text[0] for text in texts_of(runner)) == list(range(7))
