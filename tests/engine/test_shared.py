"""The source ``shared``: finished requests speed up later ones, and only those they may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from tests.engine.harness import drain, engine, greedy, outcomes, random_prompts, seeded, stats

PROMPT, OTHER = random_prompts(40, 30)
LOOKAHEAD = {
    "window_size": 0,
    "ngram_size": 5,
    "verification_set_size": 2,
    "sources": ["suffix", "shared"],
}


@pytest.fixture(scope="module")
def on(tiny_llama: Path) -> Iterator[LLM]:
    with engine(tiny_llama, LOOKAHEAD) as llm:
        yield llm


def steps(llm: LLM, prompt: list[int], salt: str | None = None) -> tuple[Any, int]:
    """What a request yields, and its decode steps."""
    before = stats(llm)["steps"]
    request = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
    [answer] = llm.generate([request], greedy(64), use_tqdm=False)
    drain(llm)
    return tuple(answer.outputs[0].token_ids), stats(llm)["steps"] - before


def test_repeated_request_takes_a_fifth_of_the_steps(off: LLM, on: LLM) -> None:
    [[plain]] = outcomes(off, [PROMPT], greedy(64))
    first, _ = steps(on, PROMPT)
    second, count = steps(on, PROMPT)
    assert first == second == plain.token_ids
    # 63 tokens after the prefill's, five at a time once a first step has been matched.
    assert count <= 15


def test_texts_are_not_shared_between_cache_salts(on: LLM) -> None:
    _, alone = steps(on, OTHER, "one")
    text, other = steps(on, OTHER, "two")
    again, same = steps(on, OTHER, "two")
    assert other == alone
    assert same < other
    assert again == text


def test_shared_texts_give_plain_outputs_in_batches(off: LLM, on: LLM) -> None:
    prompts = [PROMPT, OTHER, *random_prompts(5, 50, seed=3)] * 2
    params = [greedy(64), seeded(3), greedy(48), seeded(4)] * 2
    plain = outcomes(off, prompts, params)
    for _ in range(2):
        assert outcomes(on, prompts, params) == plain


def test_shared_texts_are_counted(on: LLM) -> None:
    steps(on, PROMPT)
    assert stats(on)["shared_tokens"] >= len(PROMPT) + 64
    assert stats(on)["sequences"] == 0
