"""What a request may ask for gives plain vLLM's answer, alone and in a mixed batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.config.reasoning import ReasoningConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from tests.engine import scripted
from tests.engine.harness import engine, greedy, outcomes, random_prompts, seeded, stats

PROMPTS = random_prompts(5, 31, 32, 64, 7, 90, 20, 45, seed=3)

PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": -0.7},
    {"frequency_penalty": 1.1, "temperature": 0.7, "seed": 5},
    {"repetition_penalty": 0.8, "temperature": 1.0, "seed": 6, "top_k": 20},
]
CONSTRAINTS: list[dict[str, Any]] = [
    {"min_tokens": 20, "stop_token_ids": list(range(0, 256, 2)), "ignore_eos": False},
    {"allowed_token_ids": list(range(10, 40))},
    {"bad_words": ["a", "bc"], "temperature": 0.9, "seed": 2},
    {"top_k": 1, "temperature": 1.0, "seed": 3},
]
BIASES: list[dict[str, Any]] = [
    {"logit_bias": {7: 3.0, 9: -5.0}},
    {"logit_bias": {7: 3.0}, "temperature": 0.9, "seed": 4},
    {"min_p": 0.1, "temperature": 1.2, "seed": 5},
]


@pytest.fixture(scope="module")
def on(tiny_llama: Path) -> Iterator[LLM]:
    sizes = {"window_size": 4, "ngram_size": 4, "verification_set_size": 4}
    with engine(tiny_llama, {**sizes, "sources": [scripted.NAME, "window", "output"]}) as llm:
        yield llm


def assert_equal(off: LLM, on: LLM, options: list[dict[str, Any]]) -> None:
    """Each option alone and all in one batch with unconstrained requests, with good candidates."""
    params = [SamplingParams(**{"temperature": 0, "max_tokens": 60, **o}) for o in options]
    params += [greedy(60), seeded(9, 60)]
    prompts = PROMPTS[: len(params)]
    plain = outcomes(off, prompts, params)
    texts = [[*p, *o[0].token_ids] for p, o in zip(prompts, plain, strict=True)]
    scripted.ScriptedSource.script(texts, scripted.changing)
    before = stats(on)
    assert outcomes(on, prompts, params) == plain
    accepted = stats(on)["tokens"] - before["tokens"] > stats(on)["steps"] - before["steps"]
    assert accepted, "no candidate was accepted, so nothing was put to the test"
    for prompt, param, expected in zip(prompts, params, plain, strict=True):
        assert outcomes(on, [prompt], param) == [expected]


def test_penalties(off: LLM, on: LLM) -> None:
    assert_equal(off, on, PENALTIES)


def test_token_constraints(off: LLM, on: LLM) -> None:
    assert_equal(off, on, CONSTRAINTS)


def test_several_choices_per_request(off: LLM, on: LLM) -> None:
    params = [seeded(4, 40, n=3), seeded(5, 40, n=2, temperature=1.5)]
    assert outcomes(on, PROMPTS[:2], params) == outcomes(off, PROMPTS[:2], params)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_one_entry_per_token(off: LLM, on: LLM, count: int) -> None:
    params = [greedy(40, logprobs=count), seeded(1, 40, logprobs=count), greedy(40)]
    requests: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]]
    plain = [answer.outputs[0] for answer in off.generate(requests, params, use_tqdm=False)]
    texts = [[*p, *o.token_ids] for p, o in zip(PROMPTS, plain, strict=False)]
    scripted.ScriptedSource.script(texts, scripted.changing)
    walked = [answer.outputs[0] for answer in on.generate(requests, params, use_tqdm=False)]
    for one, other in zip(walked[:2], plain[:2], strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert len(one.logprobs) == len(one.token_ids)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.keys() == theirs.keys()
            for token in mine:
                assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
                assert mine[token].rank == theirs[token].rank
        chosen = [entry[t].logprob for entry, t in zip(one.logprobs, one.token_ids, strict=True)]
        assert one.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)
    assert walked[2].logprobs is None


def test_prompt_logprobs(off: LLM, on: LLM) -> None:
    params = greedy(20, prompt_logprobs=2)
    requests: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]]
    plain = off.generate(requests, params, use_tqdm=False)
    for one, other in zip(on.generate(requests, params, use_tqdm=False), plain, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert mine is not None
            assert theirs is not None
            for token in theirs:
                assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_structured_output_beside_free_text(off: LLM, on: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    params = [
        greedy(60, structured_outputs=StructuredOutputsParams(json=schema), ignore_eos=False),
        greedy(30, structured_outputs=StructuredOutputsParams(regex="[0-9]{5,9}x")),
        seeded(
            8,
            30,
            structured_outputs=StructuredOutputsParams(choice=["yes", "no", "maybe"]),
            ignore_eos=False,
        ),
        greedy(60),
        seeded(2, 60),
    ]
    prompts = PROMPTS[: len(params)]
    plain = outcomes(off, prompts, params)
    texts = [[*p, *o[0].token_ids] for p, o in zip(prompts, plain, strict=True)]
    for shape in (scripted.right_first, scripted.right_third, scripted.changing):
        scripted.ScriptedSource.script(texts, shape)
        assert outcomes(on, prompts, params) == plain
    if plain[0][0].finish_reason == "stop":
        json.loads(plain[0][0].text)
    assert plain[2][0].text in ("yes", "no", "maybe")


def test_grammar_invalid_candidates_do_not_disable_valid_ones(off: LLM, on: LLM) -> None:
    params = greedy(40, structured_outputs=StructuredOutputsParams(regex="[0-9]{40}"))
    [[plain]] = outcomes(off, PROMPTS[:1], params)
    scripted.ScriptedSource.script([[*PROMPTS[0], *plain.token_ids]], letters_first)
    before = stats(on)["steps"]
    assert outcomes(on, PROMPTS[:1], params) == [[plain]]
    # One token of the prefill, then N = 4 a step.
    assert stats(on)["steps"] - before == 10


def letters_first(right: list[int], step: int) -> list[list[int]]:
    """Two candidates without a digit before the right one (tokens 64 and up are letters)."""
    return [[70] * len(right), [right[0], 71, 72], right]


def test_parameters_that_vllm_refuses_beside_other_speculative_methods(off: LLM, on: LLM) -> None:
    assert_equal(off, on, BIASES)


class FavourOneToken(LogitsProcessor):
    """Raises token 77 while a request has fewer than 30 outputs, as its ``extra_args`` ask for."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, pin: bool) -> None:
        self.requests: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.requests,
            batch_update,
            lambda params, _, outputs: outputs if params.extra_args else None,
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, outputs in self.requests.items():
            if len(outputs) < 30 and len(outputs) % 3 == 0:
                logits[row, 77] += 100
        return logits


def test_custom_logits_processor_sees_every_token_in_order(tiny_llama: Path) -> None:
    options: Any = {"logits_processors": [FavourOneToken]}
    params = [greedy(60, extra_args={"favour": True}), seeded(1, 60), greedy(60)]
    with engine(tiny_llama, **options) as llm:
        plain = outcomes(llm, PROMPTS[:3], params)
    assert plain[0][0].token_ids[0:30:3] == (77,) * 10
    texts = [[*p, *o[0].token_ids] for p, o in zip(PROMPTS, plain, strict=False)]
    scripted.ScriptedSource.script(texts, scripted.changing)
    with engine(tiny_llama, {"sources": [scripted.NAME, "window"]}, **options) as llm:
        assert outcomes(llm, PROMPTS[:3], params) == plain


def test_requests_choose_their_own_sizes(off: LLM, on: LLM) -> None:
    choices: list[dict[str, Any]] = [
        {"enabled": False},
        {"window_size": 0},
        {"ngram_size": 2},
        {"ngram_size": 2, "verification_set_size": 0},
        {"verification_set_size": 0},
        {"window_size": 1, "ngram_size": 3, "verification_set_size": 1},
    ]
    params = [greedy(60, extra_args={"lookahead": choice}) for choice in choices]
    params += [seeded(3, 60, extra_args={"lookahead": '{"window_size": 2}'}), greedy(60)]
    plain = outcomes(off, PROMPTS, params)
    texts = [[*p, *o[0].token_ids] for p, o in zip(PROMPTS, plain, strict=True)]
    scripted.ScriptedSource.script(texts, scripted.changing)
    assert outcomes(on, PROMPTS, params) == plain


def test_request_that_switches_lookahead_off_takes_a_step_per_token(off: LLM, on: LLM) -> None:
    params = greedy(40, extra_args={"lookahead": {"enabled": False}})
    [[plain]] = outcomes(off, PROMPTS[:1], params)
    scripted.ScriptedSource.script([[*PROMPTS[0], *plain.token_ids]], scripted.right_first)
    before = stats(on)
    assert outcomes(on, PROMPTS[:1], params) == [[plain]]
    assert stats(on)["steps"] == before["steps"], "no step of it was lookahead's"


def test_bad_request_is_refused_before_it_is_queued(on: LLM) -> None:
    with pytest.raises(VLLMValidationError, match=r"window_size .* from 0 to 4"):
        outcomes(on, PROMPTS[:1], greedy(4, extra_args={"lookahead": {"window_size": 5}}))


def test_thinking_budget_is_forced_at_the_same_token(tiny_llama: Path) -> None:
    # Tokens 257 and 258 open and close a thought.
    reasoning = ReasoningConfig(reasoning_start_str="<special0>", reasoning_end_str="<special1>")
    prompts = [[*prompt[:20], 257] for prompt in PROMPTS[:6]]
    params = [
        greedy(60, thinking_token_budget=budget)
        if i % 2
        else seeded(i, 60, thinking_token_budget=budget)
        for i, budget in enumerate((0, 1, 2, 3, 7, 10))
    ]
    params.append(greedy(60))
    prompts.append(PROMPTS[6])
    with engine(tiny_llama, reasoning_config=reasoning) as llm:
        plain = outcomes(llm, prompts, params)
    assert [one[0].token_ids.index(258) for one in plain[:6]] == [0, 1, 2, 3, 7, 10]
    texts = [[*p, *o[0].token_ids] for p, o in zip(prompts, plain, strict=True)]
    scripted.ScriptedSource.script(texts, scripted.changing)
    lookahead = {"sources": [scripted.NAME, "window"]}
    with engine(tiny_llama, lookahead, reasoning_config=reasoning) as llm:
        assert outcomes(llm, prompts, params) == plain
