"""Tree sampling: vLLM's own `Sampler` walks the token trees.

Law: what a request emits is what its sampler draws in the state in which plain decoding would
have drawn it. So each round samples the whole batch, one row per request, with all logits
processors fed the tokens emitted so far, and only walking requests draw from their generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors, build_logitsprocs
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder

from vllm_lookahead.core.verify import Walk

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler


@contextmanager
def without_custom_processors(model_config: ModelConfig) -> Iterator[None]:
    """Hide custom logits processors, beside which vLLM's runners refuse speculative methods."""
    custom = model_config.logits_processors
    model_config.logits_processors = None
    try:
        yield
    finally:
        model_config.logits_processors = custom


def plain_logits_processors(vllm_config: VllmConfig, device: torch.device) -> LogitsProcessors:
    """All logits processors of plain decoding, also those that vLLM drops beside a draft."""
    plain = copy(vllm_config)
    plain.speculative_config = None
    return build_logitsprocs(
        plain,
        device,
        PIN_MEMORY,
        is_pooling_model=False,
        custom_logitsprocs=tuple(plain.model_config.logits_processors or ()),
    )


def plain_thinking_budgets(vllm_config: VllmConfig, device: torch.device) -> Any:
    """vLLM's counter of thinking budgets as plain decoding has it, None without reasoning."""
    return maybe_create_thinking_budget_state_holder(
        vllm_config.reasoning_config,
        vllm_config.scheduler_config.max_num_seqs,
        num_spec_tokens=0,
        device=device,
        is_pin_memory=PIN_MEMORY,
    )


def is_plain_greedy(metadata: SamplingMetadata) -> bool:
    """Whether sampling the batch is argmax of the raw logits and nothing else."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.all_greedy
        and metadata.no_penalties
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and all(map(_is_idle, metadata.logitsprocs.non_argmax_invariant))
    )


def _is_idle(processor: object) -> bool:
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    return False


def walk_greedy(walks: Sequence[Walk], first_rows: Sequence[int], argmax: Sequence[int]) -> None:
    """Finish all walks by the rows' argmax.

    Args:
        walks: [num_reqs] one per request.
        first_rows: [num_reqs] row of each tree's root.
        argmax: [num_rows] token per row of logits.
    """
    for walk, first_row in zip(walks, first_rows, strict=True):
        while not walk.finished:
            walk.emit(argmax[first_row + walk.node])


def walk_in_rounds(
    walks: Sequence[Walk],
    first_rows: Sequence[int],
    logits: torch.Tensor,
    sampler: Sampler,
    metadata: SamplingMetadata,
    silent: Sequence[int],
    output_token_ids: Sequence[list[int] | None],
) -> LogprobsTensors | None:
    """Finish all walks by sampling in full-batch rounds, one token per walking request each.

    Args:
        walks: [num_reqs] one per request.
        first_rows: [num_reqs] row of each tree's root.
        logits: [num_rows, vocab] left unchanged.
        sampler: vLLM's sampler.
        metadata: vLLM's sampling metadata of the batch.
        silent: requests whose token will be dropped (prompt chunks): they draw nothing.
        output_token_ids: [num_reqs] the lists that logits processors see; grown while walking,
            as plain decoding would have grown them, and restored.

    Returns:
        Log-probabilities of the emitted tokens, [num_reqs * rounds] rows in request order, if
        any were asked for.
    """
    # Budgets are counted by calls, so there is one a step, and budgeted requests, which get no
    # drafts, are in the first round only.
    holder = metadata.thinking_budget_state_holder
    lengths = [None if tokens is None else len(tokens) for tokens in output_token_ids]
    dropped = set(silent)
    logprobs: list[LogprobsTensors] = []
    try:
        while True:
            walking = [i for i, walk in enumerate(walks) if not walk.finished]
            if not walking:
                break
            drawing = set(walking) - dropped
            rows = [first + walk.node for first, walk in zip(first_rows, walks, strict=True)]
            sampled = sampler(
                logits[torch.tensor(rows, device=logits.device)],
                replace(
                    metadata,
                    generators={i: g for i, g in metadata.generators.items() if i in drawing},
                    # The sampler must not take drafts for text that is already there.
                    spec_token_ids=[[] for _ in walks],
                    thinking_budget_state_holder=holder,
                ),
            )
            holder = None
            if sampled.logprobs_tensors is not None:
                logprobs.append(sampled.logprobs_tensors)
            tokens = sampled.sampled_token_ids.squeeze(-1).tolist()
            for i in walking:
                walks[i].emit(tokens[i])
                outputs = output_token_ids[i]
                if outputs is not None and i not in dropped:
                    outputs.append(tokens[i])
            for processor in metadata.logitsprocs.all:
                processor.update_state(None)
    finally:
        for outputs, length in zip(output_token_ids, lengths, strict=True):
            if outputs is not None:
                del outputs[length:]
    return _stack(logprobs) if logprobs else None


def _stack(rounds: list[LogprobsTensors]) -> LogprobsTensors:
    def stacked(field: Callable[[LogprobsTensors], torch.Tensor]) -> torch.Tensor:
        return torch.stack([field(one) for one in rounds], dim=1).flatten(0, 1)

    return LogprobsTensors(
        stacked(lambda one: one.logprob_token_ids),
        stacked(lambda one: one.logprobs),
        stacked(lambda one: one.selected_token_ranks),
    )


def to_sampler_output(
    walks: Sequence[Walk], logprobs: LogprobsTensors | None, device: torch.device
) -> SamplerOutput:
    """vLLM's form of the emitted tokens: [num_reqs, longest], padded with the placeholder."""
    longest = max([len(walk.tokens) for walk in walks])
    rows = [walk.tokens + [PLACEHOLDER_TOKEN_ID] * (longest - len(walk.tokens)) for walk in walks]
    return SamplerOutput(torch.from_numpy(np.array(rows, dtype=np.int32)).to(device), logprobs)
