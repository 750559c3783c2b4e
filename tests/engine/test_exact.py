"""Lookahead on equals lookahead off: tree sizes, winners, stops, edges of length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.exceptions import VLLMValidationError

from tests.engine import scripted
from tests.engine.harness import (
    drain,
    engine,
    full_blocks,
    greedy,
    outcomes,
    random_prompts,
    runner,
    scheduler,
    seeded,
    stats,
    submit,
)

PROMPTS = random_prompts(1, 3, 31, 32, 33, 60, 100, 150)


@pytest.fixture(scope="module")
def on(tiny_llama: Path) -> Iterator[LLM]:
    sizes = {"window_size": 4, "ngram_size": 4, "verification_set_size": 4}
    sources = [scripted.NAME, "window", "output", "prompt"]
    with engine(tiny_llama, {**sizes, "sources": sources}) as llm:
        yield llm


@pytest.fixture(autouse=True)
def no_script() -> None:
    scripted.ScriptedSource.script([], scripted.right_first)


@pytest.mark.parametrize(("max_num_seqs", "caching"), [(1, True), (8, False)])
@pytest.mark.parametrize(
    "sizes", [(4, 4, 4), (7, 5, 7), (15, 5, 15), (0, 4, 4), (5, 3, 0), (1, 2, 1), (6, 2, 0)]
)
def test_any_tree_size_gives_plain_outputs(
    off: LLM, tiny_llama: Path, sizes: tuple[int, int, int], max_num_seqs: int, caching: bool
) -> None:
    lookahead = dict(
        zip(("window_size", "ngram_size", "verification_set_size"), sizes, strict=True)
    )
    params = [greedy(), seeded(7)] * 4
    with engine(
        tiny_llama, lookahead, max_num_seqs=max_num_seqs, enable_prefix_caching=caching
    ) as llm:
        assert outcomes(llm, PROMPTS, params) == outcomes(off, PROMPTS, params)


def test_steps_are_fewer_than_tokens_when_candidates_are_right(off: LLM, on: LLM) -> None:
    [[plain]] = outcomes(off, PROMPTS[:1], greedy(65))
    scripted.ScriptedSource.script([[*PROMPTS[0], *plain.token_ids]], scripted.right_first)
    before = stats(on)
    assert outcomes(on, PROMPTS[:1], greedy(65)) == [[plain]]
    # The prefill yields one token; the other 64 take 16 steps of N = 4 tokens.
    assert stats(on)["steps"] - before["steps"] == 16


@pytest.mark.parametrize(
    "shape",
    [
        scripted.right_first,
        scripted.right_third,
        scripted.partial_last,
        scripted.all_wrong,
        scripted.changing,
        scripted.duplicated,
    ],
)
def test_any_winner_keeps_outputs_and_kv_cache(off: LLM, on: LLM, shape: scripted.Shape) -> None:
    prompt = PROMPTS[2]
    [[plain]] = outcomes(off, [prompt], greedy(130))
    text = [*prompt, *plain.token_ids]
    # The script ends half-way; the second half runs on what the first left in the cache.
    scripted.ScriptedSource.script([text[: len(prompt) + 65]], shape)
    on.reset_prefix_cache()
    assert outcomes(on, [prompt], greedy(130)) == [[plain]]
    walked = full_blocks(on, len(text) - 1)
    outcomes(off, [text[:-1]], greedy(1))
    prefilled = full_blocks(off, len(text) - 1)
    assert len(walked[0]) == 5
    for one, other in zip(walked, prefilled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [scripted.right_third, scripted.changing])
def test_winners_off_the_primary_in_a_mixed_batch(off: LLM, on: LLM, shape: scripted.Shape) -> None:
    params = [greedy(100), seeded(3, 100)] * 4
    plain = outcomes(off, PROMPTS, params)
    texts = [[*p, *o[0].token_ids] for p, o in zip(PROMPTS, plain, strict=True)]
    scripted.ScriptedSource.script(texts, shape)
    before = stats(on)["off_primary"]
    assert outcomes(on, PROMPTS, params) == plain
    assert stats(on)["off_primary"] - before > 50


def test_worker_buffer_sequence_state_and_output_agree_after_each_step(off: LLM, on: LLM) -> None:
    prompt = PROMPTS[3]
    [[plain]] = outcomes(off, [prompt], greedy(40))
    text = [*prompt, *plain.token_ids]
    scripted.ScriptedSource.script([text], scripted.right_third)
    submit(on, "walk", prompt, greedy(40))
    sizes = []
    while on.llm_engine.has_unfinished_requests():
        on.llm_engine.step()
        batch = runner(on).input_batch
        size = int(batch.num_tokens_no_spec[0])
        sizes.append(size)
        [state] = runner(on).drafter._sequences.values()
        assert batch.token_ids_cpu[0, : min(size, len(text))].tolist() == text[:size]
        assert state.num_tokens == size
        assert state.root == batch.token_ids_cpu[0, size - 1]
        for request in scheduler(on).requests.values():
            assert list(request.all_token_ids) == text[:size]
    # One token of the prefill, then N = 4 tokens a step.
    assert sizes[:5] == [len(prompt) + 1 + 4 * i for i in range(5)]


def test_same_prompt_again_takes_the_same_steps(off: LLM, tiny_llama: Path) -> None:
    first, second = PROMPTS[4], PROMPTS[5]
    plain = {
        index: outcomes(off, [prompt], greedy())[0] for index, prompt in enumerate((first, second))
    }
    # What the engine learns about sources is meant to outlive a request: without a controller, and
    # with room for all candidates, it decides nothing.
    lookahead = {"controller": False, "verification_set_size": 32, "sources": ["suffix", "window"]}
    with engine(tiny_llama, lookahead, max_num_seqs=1, enable_prefix_caching=False) as llm:
        counts = []
        for index in (0, 1, 0, 0):
            before = stats(llm)["steps"]
            assert outcomes(llm, [(first, second)[index]], greedy()) == [plain[index]]
            counts.append(stats(llm)["steps"] - before)
    assert counts[0] == counts[2] == counts[3]


def test_request_id_can_be_used_again(off: LLM, on: LLM) -> None:
    for prompt in (PROMPTS[6], PROMPTS[7]):
        [[plain]] = outcomes(off, [prompt], greedy(30))
        submit(on, "again", prompt, greedy(30))
        while on.llm_engine.has_unfinished_requests():
            [output] = on.llm_engine.step() or [None]
        assert tuple(output.outputs[0].token_ids) == plain.token_ids


def test_outputs_do_not_depend_on_traffic_or_tree(off: LLM, on: LLM) -> None:
    alone = [outcomes(off, [prompt], seeded(7))[0] for prompt in PROMPTS]
    assert outcomes(on, PROMPTS, seeded(7)) == alone
    assert [outcomes(on, [prompt], seeded(7))[0] for prompt in PROMPTS] == alone


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_cut_an_accepted_ngram(off: LLM, on: LLM, max_tokens: int) -> None:
    long = outcomes(off, PROMPTS, greedy(20))
    texts = [[*p, *o[0].token_ids] for p, o in zip(PROMPTS, long, strict=True)]
    scripted.ScriptedSource.script(texts, scripted.right_first)
    assert outcomes(on, PROMPTS, greedy(max_tokens)) == outcomes(off, PROMPTS, greedy(max_tokens))


def stops(token_ids: tuple[int, ...]) -> list[dict[str, Any]]:
    """Stop conditions that end a text at different places of an accepted n-gram."""
    return [
        *[{"stop_token_ids": [token]} for token in token_ids[5:12]],
        {"stop_token_ids": [token_ids[8]], "max_tokens": 9},
        {"stop_token_ids": [token_ids[8]], "min_tokens": 15},
    ]


def test_stop_token_inside_an_accepted_ngram(off: LLM, on: LLM) -> None:
    prompt = PROMPTS[4]
    [[plain]] = outcomes(off, [prompt], greedy(60))
    scripted.ScriptedSource.script([[*prompt, *plain.token_ids]], scripted.right_third)
    for condition in stops(plain.token_ids):
        params = greedy(**{"max_tokens": 60, **condition})
        expected = outcomes(off, [prompt], params)
        assert outcomes(on, [prompt], params) == expected
        assert expected[0][0].finish_reason in ("stop", "length")


def test_eos_inside_an_accepted_ngram(off: LLM, on: LLM) -> None:
    prompts = random_prompts(*range(5, 45), seed=5)
    plain = outcomes(off, prompts, greedy(200, ignore_eos=False))
    assert sum(one[0].finish_reason == "stop" for one in plain) >= 3, "the model must emit EOS"
    forever = outcomes(off, prompts, greedy(200))
    texts = [[*p, *o[0].token_ids] for p, o in zip(prompts, forever, strict=True)]
    scripted.ScriptedSource.script(texts, scripted.right_first)
    assert outcomes(on, prompts, greedy(200, ignore_eos=False)) == plain


def test_stop_string_across_two_steps(off: LLM, on: LLM) -> None:
    # Tokens 0 to 93 are the printable characters of ASCII.
    prompt = [token % 94 for token in PROMPTS[5]]
    ascii_only = {"allowed_token_ids": list(range(94))}
    [[plain]] = outcomes(off, [prompt], greedy(60, **ascii_only))
    assert len(plain.text) == 60
    scripted.ScriptedSource.script([[*prompt, *plain.token_ids]], scripted.right_first)
    for start in range(3, 12):
        params = greedy(60, stop=[plain.text[start : start + 3]], **ascii_only)
        expected = outcomes(off, [prompt], params)
        assert outcomes(on, [prompt], params) == expected
        assert expected[0][0].finish_reason == "stop"


@pytest.mark.parametrize("sizes", [(4, 4, 4), (15, 5, 15), (0, 4, 4), (5, 3, 0)])
def test_texts_run_to_the_last_position(tiny_llama: Path, sizes: tuple[int, int, int]) -> None:
    lookahead: dict[str, Any] = dict(
        zip(("window_size", "ngram_size", "verification_set_size"), sizes, strict=True)
    )
    prompts = random_prompts(40, *range(56, 64))
    params = greedy(100)
    with engine(tiny_llama, max_model_len=64) as llm:
        plain = outcomes(llm, prompts, params)
    scripted.ScriptedSource.script(
        [[*p, *o[0].token_ids] for p, o in zip(prompts, plain, strict=True)], scripted.right_third
    )
    lookahead["sources"] = [scripted.NAME, "window", "output", "prompt"]
    with engine(tiny_llama, lookahead, max_model_len=64) as llm:
        results = outcomes(llm, prompts, params)
        again = outcomes(llm, prompts[:1], params)
    assert results == plain
    assert again == plain[:1]
    for prompt, [one] in zip(prompts, results, strict=True):
        assert len(one.token_ids) == 64 - len(prompt)
        assert one.finish_reason == "length"


def test_empty_prompt_is_refused_as_by_plain_vllm(off: LLM, on: LLM) -> None:
    messages = []
    for llm in (off, on):
        with pytest.raises(VLLMValidationError, match="cannot be empty") as error:
            outcomes(llm, [[]], greedy(4))
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_pools_are_empty_when_idle(on: LLM) -> None:
    outcomes(on, PROMPTS, greedy(20))
    drain(on)
    assert stats(on)["sequences"] == 0
    assert stats(on)["pool_ngrams"] == 0
