"""Lookahead on equals lookahead off under everything that the scheduler does."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from tests.engine import scripted
from tests.engine.harness import (
    counter,
    drain,
    engine,
    greedy,
    outcomes,
    random_prompts,
    runner,
    scheduler,
    seeded,
    stats,
    step_until_done,
    submit,
)

SIZES = {"window_size": 4, "ngram_size": 4, "verification_set_size": 4}
SCRIPTED: dict[str, Any] = {**SIZES, "sources": [scripted.NAME, "window", "output", "prompt"]}


@pytest.fixture(autouse=True)
def no_script() -> None:
    scripted.ScriptedSource.script([], scripted.right_first)


def test_prefix_cache_holds_verified_tokens_only(off: LLM, tiny_llama: Path) -> None:
    shared = random_prompts(96)[0]
    prompts = [shared + tail for tail in random_prompts(1, 5, 31, 32, 33, seed=1)]
    plain = outcomes(off, prompts, greedy(100))
    texts = [[*p, *o[0].token_ids] for p, o in zip(prompts, plain, strict=True)]
    with engine(tiny_llama, SCRIPTED, enable_prefix_caching=True) as llm:
        for shape in (scripted.all_wrong, scripted.changing, scripted.right_third):
            scripted.ScriptedSource.script(texts, shape)
            assert outcomes(llm, prompts, greedy(100)) == plain
        # An abort in the middle, then the whole conversation again as the next turn's prompt.
        submit(llm, "aborted", prompts[0], greedy(100))
        for _ in range(4):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(["aborted"])
        turns = [[*text, 7, 8, 9] for text in texts]
        expected = outcomes(off, turns, greedy(40))
        assert outcomes(llm, turns, greedy(40)) == expected
        assert counter(llm, "vllm:prefix_cache_hits") > 0
        drain(llm)
        assert llm.reset_prefix_cache()
        assert outcomes(llm, turns, greedy(40)) == expected


def test_requests_that_join_and_leave_each_step(off: LLM, tiny_llama: Path) -> None:
    repetitive = [[1, 2, 3, 4] * 20, [9] * 40]
    prompts = [*repetitive, *random_prompts(1, 150, 2, 200, 33, 64, 7, 90)]
    params = [greedy(40) if i % 3 else seeded(i, 40) for i in range(len(prompts))]
    alone = [outcomes(off, [p], q)[0][0] for p, q in zip(prompts, params, strict=True)]
    texts = [[*p, *o.token_ids] for p, o in zip(prompts, alone, strict=True)]
    scripted.ScriptedSource.script(texts[::2], scripted.changing)
    finished: dict[str, tuple[int, ...]] = {}
    # 48 tokens a step: long prompts are prefilled in chunks beside requests that decode.
    with engine(tiny_llama, SCRIPTED, max_num_batched_tokens=48) as llm:
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            submit(llm, str(index), prompt, param)
            for output in llm.llm_engine.step():
                if output.finished:
                    finished[output.request_id] = tuple(output.outputs[0].token_ids)
        finished.update(step_until_done(llm))
    assert finished == {str(i): one.token_ids for i, one in enumerate(alone)}


def test_single_token_prompts_beside_decoding_requests(off: LLM, tiny_llama: Path) -> None:
    # vLLM pads such a request with placeholder drafts (-1), which must never be accepted.
    prompts = [[token] for token in (3, 5, 7, 11)]
    alone = [outcomes(off, [prompt], greedy(30))[0][0].token_ids for prompt in prompts]
    with engine(tiny_llama, SIZES) as llm:
        for index, prompt in enumerate(prompts):
            submit(llm, str(index), prompt, greedy(30))
            llm.llm_engine.step()
        assert step_until_done(llm) == {str(i): ids for i, ids in enumerate(alone)}


def test_preempted_requests_start_over_and_end_equal(off: LLM, tiny_llama: Path) -> None:
    prompts = random_prompts(*[20] * 8, seed=4)
    params = [greedy(230), seeded(1, 230)] * 4
    plain = outcomes(off, prompts, params)
    texts = [[*p, *o[0].token_ids] for p, o in zip(prompts, plain, strict=True)]
    scripted.ScriptedSource.script(texts, scripted.changing)
    with engine(tiny_llama, SCRIPTED, num_gpu_blocks_override=40) as llm:
        assert outcomes(llm, prompts, params) == plain
        assert counter(llm, "vllm:num_preemptions") > 0
        drain(llm)
        assert stats(llm)["sequences"] == 0


def test_running_requests_reset_with_the_prefix_cache(off: LLM, tiny_llama: Path) -> None:
    prompts = random_prompts(10, 40, 70)
    plain = outcomes(off, prompts, greedy(60))
    with engine(tiny_llama, SIZES) as llm:
        for index, prompt in enumerate(prompts):
            submit(llm, str(index), prompt, greedy(60))
        for _ in range(10):
            llm.llm_engine.step()
        assert llm.reset_prefix_cache(reset_running_requests=True)
        finished = step_until_done(llm)
    assert finished == {str(i): one[0].token_ids for i, one in enumerate(plain)}


@pytest.mark.parametrize("budget", [8, 11, 40])
def test_small_token_budget_starves_nobody(off: LLM, tiny_llama: Path, budget: int) -> None:
    sizes = {"window_size": 15, "ngram_size": 5, "verification_set_size": 15}
    prompts = random_prompts(5, 40, 3, 17, 60, 9, 33, 21)
    plain = outcomes(off, prompts, greedy(40))
    texts = [[*p, *o[0].token_ids] for p, o in zip(prompts, plain, strict=True)]
    scripted.ScriptedSource.script(texts, scripted.right_third)
    lookahead = {**sizes, "sources": [scripted.NAME, "window"]}
    with engine(tiny_llama, lookahead, max_num_batched_tokens=budget) as llm:
        for index, prompt in enumerate(prompts):
            submit(llm, str(index), prompt, greedy(40))
        idle: dict[str, int] = {}
        finished: dict[str, tuple[int, ...]] = {}
        while llm.llm_engine.has_unfinished_requests():
            before = {r.request_id: r.num_tokens for r in scheduler(llm).running}
            for output in llm.llm_engine.step():
                if output.finished:
                    finished[output.request_id] = tuple(output.outputs[0].token_ids)
            decoding = [
                r for r in scheduler(llm).running if not r.is_prefill_chunk and r.num_output_tokens
            ]
            for request in decoding:
                stalled = before.get(request.request_id) == request.num_tokens
                idle[request.request_id] = idle.get(request.request_id, 0) + 1 if stalled else 0
                assert idle[request.request_id] < 2, "a decoding request was left out twice"
    assert finished == {str(i): one[0].token_ids for i, one in enumerate(plain)}


def test_step_feeds_no_more_than_the_sizes_allow(tiny_llama: Path) -> None:
    sizes = {"window_size": 4, "ngram_size": 4, "verification_set_size": 3}
    with engine(tiny_llama, {**sizes, "scratch_fraction": 0.5}, max_num_seqs=1) as llm:
        submit(llm, "one", [1, 2, 3] * 20, greedy(100))
        fed = []
        while llm.llm_engine.has_unfinished_requests():
            before = stats(llm)["fed"]
            llm.llm_engine.step()
            plan = runner(llm)._plan
            trees = [*(placed.tree for placed in plan.trees.values()), *plan.linear.values()]
            fed.append(stats(llm)["fed"] - before)
            assert fed[-1] == sum(tree.size for tree in trees)
    # (N - 1)(W + G) = 21 tokens, the root being one of the window's.
    assert 3 * 4 <= max(fed) <= 21


def test_scratch_memory_bounds_the_trees(off: LLM, tiny_llama: Path) -> None:
    lookahead = {"window_size": 15, "verification_set_size": 15, "scratch_fraction": 0.01}
    prompts = random_prompts(*[30] * 8, seed=6)
    with engine(tiny_llama, lookahead) as llm:
        assert outcomes(llm, prompts, greedy(40)) == outcomes(off, prompts, greedy(40))


def test_scratch_that_cannot_fit_is_refused_naming_flags(tiny_llama: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"--kv-cache-memory-bytes.*window_size"),
        engine(tiny_llama, {"window_size": 128}, kv_cache_memory_bytes=1 << 23),
    ):
        pass


def test_thousands_of_requests_half_aborted_leave_nothing(tiny_llama: Path) -> None:
    prompts = random_prompts(*[8] * 40, seed=8)
    with engine(tiny_llama, {**SIZES, "pool_capacity": 32}) as llm:
        peak = 0
        for round_ in range(50):
            for index, prompt in enumerate(prompts):
                submit(llm, f"{round_}-{index}", prompt, greedy(4 + index % 5))
            llm.llm_engine.step()
            llm.llm_engine.abort_request([f"{round_}-{index}" for index in range(0, 40, 2)])
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
                held = stats(llm)
                assert held["pool_ngrams"] <= 32 * held["sequences"]
            if round_ == 5:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        drain(llm)
        assert stats(llm)["sequences"] == 0
        assert stats(llm)["pool_ngrams"] == 0
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        assert growth < 0.05 * peak
