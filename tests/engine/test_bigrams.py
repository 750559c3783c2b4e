"""The source ``bigram``: what the model says after single tokens, and no more steps than that."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import LLM

from tests.engine.harness import engine, greedy, outcomes, random_prompts, runner, stats
from vllm_lookahead.engine import bigrams
from vllm_lookahead.engine.bigrams import model_bigrams

PROMPTS = random_prompts(1, 3, 31, 60)
BIGRAMS_ONLY = {"window_size": 0, "verification_set_size": 4, "sources": ["bigram"]}


@pytest.fixture(autouse=True)
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are asked for to the last one, however slow the machine is."""
    monkeypatch.setattr(bigrams, "SECONDS", float("inf"))


def plain_successors(llm: LLM, token: int) -> list[int]:
    """The likeliest tokens after a prompt of the context token and ``token``, by plain vLLM."""
    context = bigrams._context_token(llm.llm_engine.vllm_config)
    prompt = {"prompt_token_ids": [context, token]}
    [answer] = llm.generate([prompt], greedy(1, logprobs=4), use_tqdm=False)
    [logprobs] = answer.outputs[0].logprobs
    ranked = sorted(logprobs, key=lambda one: logprobs[one].rank)
    return ranked[:4]


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_successors_are_the_tokens_that_plain_vllm_finds_likeliest(
    off: LLM, tiny_llama: Path, max_num_seqs: int
) -> None:
    lookahead = {**BIGRAMS_ONLY, "bigram_tokens": 20}
    with engine(tiny_llama, lookahead, max_num_seqs=max_num_seqs) as llm:
        table = runner(llm).drafter.bigrams
        assert list(table) == list(range(20))
        for token in (0, 1, 7, 19):
            assert table[token] == plain_successors(off, token)


def test_bigrams_leave_nothing_behind_and_change_no_output(off: LLM, tiny_llama: Path) -> None:
    with engine(tiny_llama, BIGRAMS_ONLY) as llm:
        assert runner(llm).requests == {}
        assert stats(llm)["steps"] == stats(llm)["sequences"] == 0
        assert outcomes(llm, PROMPTS, greedy(64)) == outcomes(off, PROMPTS, greedy(64))
        # They were proposed, and fed.
        assert stats(llm)["fed"] > 2 * stats(llm)["steps"]


def test_second_start_takes_them_from_the_file(tiny_llama: Path) -> None:
    with engine(tiny_llama, BIGRAMS_ONLY) as first:
        table = runner(first).drafter.bigrams
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigrams, "_ask", None)
        with engine(tiny_llama, BIGRAMS_ONLY) as second:
            assert runner(second).drafter.bigrams == table
            assert model_bigrams(runner(second), lambda value: value, True) == table
