"""The source ``model``: the model's texts are plain vLLM's, and no request notices them.

Texts are sampled so coldly here that they are greedy ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from tests.engine.harness import (
    engine,
    greedy,
    outcomes,
    random_prompts,
    runner,
    scheduler,
    stats,
)
from tests.tiny import EOS, save_gemma3, save_sliding_mistral
from vllm_lookahead.engine import model_text
from vllm_lookahead.engine.model_text import TEXT_LENGTH, Texts

PROMPTS = random_prompts(1, 3, 31, 60)
LENGTH = TEXT_LENGTH - 1
TOKENS = 2 * LENGTH + 50
"""Two texts and a part of a third."""
MODEL_ONLY: dict[str, Any] = {
    "window_size": 0,
    "verification_set_size": 4,
    "sources": ["model"],
    "model_text_tokens": TOKENS,
    # However slow the machine is.
    "model_text_seconds": 86400,
}


@pytest.fixture(autouse=True)
def own_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing was written before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Colder, vLLM's sampler wouldn't be asked.
    monkeypatch.setattr(model_text, "TEMPERATURE", 2e-5)


def written(llm: LLM) -> Texts:
    """What the model wrote when the engine started, from the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_text, "_write", None)
        return model_text.model_text(runner(llm), lambda value: value, True)


def plain(llm: LLM, texts: Texts) -> Texts:
    """What plain vLLM says after the texts' first tokens; the tiny models have no BOS."""
    prompts = [[EOS, text[0]] for text in texts]
    params = [greedy(len(text) - 1) for text in texts]
    return [
        [text[0], *choice.token_ids]
        for text, [choice] in zip(texts, outcomes(llm, prompts, params), strict=True)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "block_size": 64},
        {"max_num_seqs": 8},
        {"max_num_seqs": 8, "block_size": 96, "max_num_batched_tokens": 8, "max_model_len": 160},
    ],
    ids=["three rounds", "two rounds", "one round", "short"],
)
def test_texts_are_what_plain_vllm_says_after_their_first_tokens(
    off: LLM, tiny_llama: Path, options: dict[str, int]
) -> None:
    with engine(tiny_llama, MODEL_ONLY, **options) as llm:
        texts = written(llm)
        length = min(LENGTH, options.get("max_model_len", LENGTH + 1) - 1)
        assert list(map(len, texts))[:-1] == [length] * (TOKENS // length)
        assert sum(map(len, texts)) == TOKENS
        assert len({text[0] for text in texts}) == len(texts)
        assert texts == plain(off, texts)


@pytest.mark.parametrize(
    ("save", "groups"), [(save_sliding_mistral, 1), (save_gemma3, 2)], ids=["mistral", "gemma3"]
)
def test_texts_past_a_sliding_window_are_plain(
    tmp_path: Path, save: Callable[[Path], Path], groups: int
) -> None:
    model = save(tmp_path / "model")
    with engine(model, MODEL_ONLY, max_num_seqs=2) as on, engine(model) as off:
        assert len(runner(on).kv_cache_config.kv_cache_groups) >= groups
        texts = written(on)
        assert len(texts) == 3
        assert texts == plain(off, texts)


def test_texts_leave_nothing_behind_and_change_no_output(off: LLM, tiny_llama: Path) -> None:
    with engine(tiny_llama, MODEL_ONLY) as llm:
        assert runner(llm).requests == {}
        assert runner(llm).input_batch.num_reqs == 0
        assert stats(llm)["steps"] == stats(llm)["sequences"] == stats(llm)["fed"] == 0
        pool = scheduler(llm).kv_cache_manager.block_pool
        # All but the null block.
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        for _ in range(2):
            assert outcomes(llm, PROMPTS, greedy(64)) == outcomes(off, PROMPTS, greedy(64))
        # Tokens of the texts were proposed, and fed.
        assert stats(llm)["fed"] > stats(llm)["steps"] > 0


def test_text_that_the_model_wrote_is_repeated_in_a_few_steps(off: LLM, tiny_llama: Path) -> None:
    lookahead = {**MODEL_ONLY, "verification_set_size": 1, "draft_length": 9}
    with engine(tiny_llama, lookahead) as llm:
        prompt = [EOS, written(llm)[0][0]]
        params = greedy(LENGTH - 1)
        assert outcomes(llm, [prompt], params) == outcomes(off, [prompt], params)
        # Up to ten tokens a step; where texts share a few tokens, the most frequent may mislead.
        assert stats(llm)["steps"] < LENGTH / 4


def test_second_start_takes_them_from_the_file(tiny_llama: Path) -> None:
    with engine(tiny_llama, MODEL_ONLY) as first:
        texts = written(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_text, "_write", None)
        with engine(tiny_llama, MODEL_ONLY) as second:
            assert written(second) == texts
            # And looks in them.
            _, followers = runner(second).drafter.model_text.followers(tuple(texts[0][:8]))
            assert texts[0][8] in dict(followers)
