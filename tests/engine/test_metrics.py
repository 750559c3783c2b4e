"""Counters, lookahead's and vLLM's own, add up to what was emitted.

Candidates are scripted and most texts are cut after a whole number of steps, so that the expected
values follow by hand: the prefill yields one token, each step its accepted ones and one more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.engine import scripted
from tests.engine.harness import engine, greedy, outcomes, random_prompts, seeded, stats

SCRIPT_ONLY = {"window_size": 0, "verification_set_size": 4, "sources": [scripted.NAME]}
PROMPT = random_prompts(20)


@dataclass(frozen=True)
class Drafts:
    """vLLM's own counters."""

    drafts: int
    draft_tokens: int
    accepted: int
    accepted_per_position: list[int]


def drafts_of(llm: LLM) -> Drafts:
    """What the newest engine of this process has counted since its start.

    Older ones are no longer counted: vLLM keeps one registry per process.
    """
    values: dict[str, Any] = {}
    for metric in llm.get_metrics():
        vector = getattr(metric, "values", None)
        values[metric.name] = vector if vector is not None else getattr(metric, "value", None)
    return Drafts(
        drafts=values["vllm:spec_decode_num_drafts"],
        draft_tokens=values["vllm:spec_decode_num_draft_tokens"],
        accepted=values["vllm:spec_decode_num_accepted_tokens"],
        accepted_per_position=values["vllm:spec_decode_num_accepted_tokens_per_pos"],
    )


def numbers_of(llm: LLM) -> list[float]:
    """Every number among the newest engine's metrics."""
    found: list[float] = []
    for metric in llm.get_metrics():
        for name in ("value", "values", "sum", "count"):
            number = getattr(metric, name, None)
            if number is not None:
                found += number if isinstance(number, list) else [number]
    return found


def script(off: LLM, prompts: list[list[int]], params: Any, shape: scripted.Shape) -> None:
    plain = outcomes(off, prompts, params)
    texts = [[*p, *o[0].token_ids] for p, o in zip(prompts, plain, strict=True)]
    scripted.ScriptedSource.script(texts, shape)


# N = 4, so a candidate has 3 tokens.
@pytest.mark.parametrize(
    ("shape", "max_tokens", "steps", "per_step", "off_primary"),
    [
        (scripted.right_first, 65, 16, 3, 0),
        (scripted.right_third, 65, 16, 3, 16),
        (scripted.partial_last, 61, 20, 2, 20),
        (scripted.all_wrong, 65, 64, 0, 0),
    ],
)
def test_steps_with_scripted_candidates_are_counted_as_by_hand(
    off: LLM,
    tiny_llama: Path,
    shape: scripted.Shape,
    max_tokens: int,
    steps: int,
    per_step: int,
    off_primary: int,
) -> None:
    script(off, PROMPT, greedy(max_tokens), shape)
    with engine(tiny_llama, {**SCRIPT_ONLY, "ngram_size": 4}) as llm:
        outcomes(llm, PROMPT, greedy(max_tokens))
        lookahead, drafts = stats(llm), drafts_of(llm)
    assert lookahead["steps"] == steps
    assert lookahead["tokens"] == max_tokens - 1 == steps * (per_step + 1)
    assert lookahead["accepted"] == [0] * per_step + [steps]
    assert lookahead["off_primary"] == off_primary
    # One draft of 3 tokens per step, however many candidates beside it were fed and rejected.
    assert drafts == Drafts(
        drafts=steps,
        draft_tokens=3 * steps,
        accepted=per_step * steps,
        accepted_per_position=[steps] * per_step + [0] * (3 - per_step),
    )


def test_counters_of_a_batch_of_all_kinds_add_up_to_its_outputs(off: LLM, tiny_llama: Path) -> None:
    # Up to the model's length, beyond which no step reaches: every emitted token is an output.
    length = 128
    prompts = random_prompts(*range(40, 72, 4))
    params: list[SamplingParams] = [
        greedy(length - len(p)) if i % 2 else seeded(i, length - len(p))
        for i, p in enumerate(prompts)
    ]
    script(off, prompts, params, scripted.changing)
    sizes = {"window_size": 4, "ngram_size": 4, "verification_set_size": 4}
    sources = [scripted.NAME, "window", "output", "prompt"]
    with engine(tiny_llama, {**sizes, "sources": sources}, max_model_len=length) as llm:
        emitted = [len(choice.token_ids) for [choice] in outcomes(llm, prompts, params)]
        lookahead, drafts = stats(llm), drafts_of(llm)
    assert emitted == [length - len(prompt) for prompt in prompts]

    histogram = lookahead["accepted"]
    accepted = sum(depth * count for depth, count in enumerate(histogram))
    assert sum(histogram) == lookahead["steps"]
    # The prefill yields each request's first token.
    assert accepted + lookahead["steps"] == lookahead["tokens"] == sum(emitted) - len(prompts)
    assert 0 < lookahead["off_primary"] < lookahead["steps"]

    assert drafts.accepted == accepted
    # Position k counts the steps that accepted more than k draft tokens.
    assert drafts.accepted_per_position == [sum(histogram[k + 1 :]) for k in range(3)]
    assert drafts.accepted_per_position == sorted(drafts.accepted_per_position, reverse=True)
    # Steps without any draft are no drafts; no draft is longer than the primary candidate.
    assert drafts.drafts <= lookahead["steps"]
    assert drafts.accepted <= drafts.draft_tokens <= 3 * drafts.drafts


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({**SCRIPT_ONLY, "ngram_size": 4}, scripted.nothing),
        ({"window_size": 1, "ngram_size": 2, "verification_set_size": 0}, scripted.nothing),
    ],
    ids=["silent source", "window of one column"],
)
def test_without_any_candidate_each_step_counts_one_token_and_no_draft(
    off: LLM, tiny_llama: Path, sizes: dict[str, Any], shape: scripted.Shape
) -> None:
    script(off, PROMPT, greedy(65), shape)
    with engine(tiny_llama, sizes) as llm:
        outcomes(llm, PROMPT, greedy(65))
        llm.llm_engine.do_log_stats()
        lookahead, drafts, numbers = stats(llm), drafts_of(llm), numbers_of(llm)
    assert (lookahead["steps"], lookahead["tokens"], lookahead["accepted"]) == (64, 64, [64])
    assert (drafts.drafts, drafts.draft_tokens, drafts.accepted) == (0, 0, 0)
    assert not any(drafts.accepted_per_position)
    assert numbers
    assert all(map(math.isfinite, numbers))


def test_window_alone_drafts_its_own_path(off: LLM, tiny_llama: Path) -> None:
    sizes = {"window_size": 1, "ngram_size": 4, "verification_set_size": 0}
    with engine(tiny_llama, sizes) as llm:
        outcomes(llm, PROMPT, greedy(65))
        lookahead, drafts, numbers = stats(llm), drafts_of(llm), numbers_of(llm)
    accepted = sum(depth * count for depth, count in enumerate(lookahead["accepted"]))
    assert accepted + lookahead["steps"] == lookahead["tokens"]
    assert drafts.accepted == accepted
    # One column of N - 1 rows, of which the root is the first: a path of at most 2 tokens.
    assert 0 < drafts.drafts <= lookahead["steps"]
    assert drafts.draft_tokens <= 2 * drafts.drafts
    assert drafts.accepted_per_position[2] == 0
    assert all(map(math.isfinite, numbers))
