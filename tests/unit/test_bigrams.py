"""When the model's bigrams are asked for, and when they come from the file."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_lookahead.config import LookaheadConfig
from vllm_lookahead.core.proposals import Bigrams
from vllm_lookahead.engine import bigrams
from vllm_lookahead.engine.bigrams import IN_STEP_TOKENS, cache_path, model_bigrams

VOCAB = 3000


class Runner:
    """Has what `model_bigrams` looks at."""

    def __init__(self, tokens: int = 10, model: str = "some/model", ranks: int = 1) -> None:
        self.max_num_reqs, self.max_num_tokens = 4, 512
        self.kv_cache_config = SimpleNamespace(num_blocks=64, kv_cache_groups=[None])
        self.drafter = SimpleNamespace(config=LookaheadConfig(bigram_tokens=tokens))
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model=model,
                revision=None,
                dtype="float32",
                quantization=None,
                get_vocab_size=lambda: VOCAB,
            ),
            parallel_config=SimpleNamespace(data_parallel_size=ranks),
        )


class Model:
    """Stands for the model's step: remembers what it was asked; a step takes a second."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.now = 0.0

    def ask(self, runner: Any, tokens: range) -> list[list[int]]:
        self.asked.append(list(tokens))
        self.now += 1.0
        return [[token + 1, token + 2] for token in tokens]


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Model:
    model = Model()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bigrams, "_ask", model.ask)
    monkeypatch.setattr(bigrams, "time", SimpleNamespace(perf_counter=lambda: model.now))
    return model


def successors(runner: Runner, broadcast: Any = lambda value: value, first: bool = True) -> Bigrams:
    return model_bigrams(runner, broadcast, first)  # type: ignore[arg-type]


def expected(count: int) -> Bigrams:
    return {token: [token + 1, token + 2] for token in range(count)}


def test_all_wanted_tokens_are_asked_in_steps_of_as_many_as_fit(model: Model) -> None:
    assert successors(Runner(10)) == expected(10)
    assert model.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("limits", "step"),
    [
        ({"max_num_reqs": 100}, 63),
        ({"max_num_reqs": 100, "max_num_tokens": 20}, 10),
        ({"max_num_tokens": 1}, 1),
    ],
)
def test_step_fits_into_requests_tokens_and_blocks(
    model: Model, limits: dict[str, int], step: int
) -> None:
    runner = Runner(64)
    vars(runner).update(limits)
    successors(runner)
    assert len(model.asked[0]) == step


def test_no_token_outside_of_the_vocabulary_is_asked(model: Model) -> None:
    runner = Runner(5000)
    runner.max_num_reqs = runner.max_num_tokens = runner.kv_cache_config.num_blocks = 10_000
    assert successors(runner) == expected(VOCAB)


def test_second_start_asks_nothing(model: Model) -> None:
    successors(Runner(10))
    model.asked.clear()
    assert successors(Runner(10)) == expected(10)
    assert successors(Runner(3)) == expected(3)
    assert model.asked == []


def test_start_asks_for_a_limited_time_and_the_next_one_goes_on(model: Model) -> None:
    # Eleven steps of four tokens take more than ten seconds.
    assert successors(Runner(60)) == expected(44)
    model.asked.clear()
    assert successors(Runner(60)) == expected(60)
    assert model.asked[0] == [44, 45, 46, 47]


def test_other_model_is_asked_for_itself(model: Model) -> None:
    successors(Runner())
    model.asked.clear()
    assert successors(Runner(model="another/model")) == expected(10)
    assert model.asked


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[["a"]]', "[[1.5]]", "[[-1]]", f"[[{VOCAB}]]", "null", '{"0": [1]}']
)
def test_unusable_file_is_replaced(model: Model, text: str) -> None:
    path = cache_path(Runner().vllm_config)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert successors(Runner(10)) == expected(10)
    assert json.loads(path.read_text()) == [[token + 1, token + 2] for token in range(10)]


def test_first_ranks_rows_are_everybodys(model: Model) -> None:
    values: list[Any] = []

    def record(value: Any) -> Any:
        values.append(deepcopy(value))
        return value

    first = successors(Runner(10), record)
    said = iter(values)
    # The other rank's model answers something else, and its clock and file say something else.
    model.now = 1e6
    other = successors(Runner(10), lambda value: next(said), first=False)
    assert other == first
    assert list(said) == []


def test_data_parallel_engines_do_as_much_whatever_clock_and_file_say(model: Model) -> None:
    successors(Runner(10))
    model.asked.clear()
    runner = Runner(2000, ranks=2)
    assert successors(runner) == expected(IN_STEP_TOKENS)
    assert sum(map(len, model.asked)) == IN_STEP_TOKENS
    # And they write no file.
    assert successors(Runner(10)) == expected(10)
