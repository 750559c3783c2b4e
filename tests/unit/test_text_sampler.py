"""The sampler of the model's own text, against the distribution that it samples from."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_lookahead.engine.text_sampler import TextSampler

NO_METADATA = cast(SamplingMetadata, None)
LOGITS = torch.tensor([2.0, 0.5, -float("inf"), 1.0, -1.0])


def sampled(logits: torch.Tensor, temperature: float = 0.7, seed: int = 0) -> torch.Tensor:
    output = TextSampler(temperature, seed)(logits, NO_METADATA)
    assert output.logprobs_tensors is None
    assert output.sampled_token_ids.shape == (len(logits), 1)
    assert output.sampled_token_ids.dtype == torch.int32
    return output.sampled_token_ids[:, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_come_as_often_as_their_chance_says(temperature: float) -> None:
    draws = 20_000
    counts = sampled(LOGITS.expand(draws, -1), temperature).bincount(minlength=len(LOGITS))
    chances = (LOGITS / temperature).softmax(-1)
    assert counts[2] == 0
    possible = chances > 0
    expected = draws * chances[possible]
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum()
    # 99.9 % of a chi-square distribution with three degrees of freedom.
    assert chi_square < 16.27


def test_rows_are_sampled_by_their_own_logits() -> None:
    rows = torch.full((4, 4), -float("inf")).fill_diagonal_(0.0)
    assert sampled(rows).tolist() == [0, 1, 2, 3]


def test_cold_sampling_is_greedy() -> None:
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits[:, 7] += 10
    assert sampled(logits, 2e-5).tolist() == [7] * 50


def test_same_seed_draws_the_same_tokens_and_another_one_others() -> None:
    logits = torch.zeros(100, 1000)
    assert sampled(logits, seed=1).tolist() == sampled(logits, seed=1).tolist()
    assert sampled(logits, seed=1).tolist() != sampled(logits, seed=2).tolist()


def test_one_sampler_draws_other_tokens_step_by_step() -> None:
    sampler = TextSampler(1.0, seed=0)
    logits = torch.zeros(100, 1000)
    first, second = (sampler(logits, NO_METADATA).sampled_token_ids.tolist() for _ in range(2))
    assert first != second


def test_no_token_outside_of_the_vocabulary_is_drawn_whatever_is_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "rand", lambda *size, generator: torch.ones(size))
    assert sampled(torch.randn(20, 300)).max() < 300
