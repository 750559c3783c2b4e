"""The model's own bigrams: what it expects after single tokens, asked at start-up.

They need no text of anybody and no training (Stewart et al., "The N-Grammys", arXiv 2411.03786).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.logger import init_logger
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from vllm_lookahead.core.acceptance import BIGRAM_RANKS
from vllm_lookahead.core.proposals import Bigrams
from vllm_lookahead.engine.files import cache_file, load_json, save_json
from vllm_lookahead.engine.step_cost import Broadcast
from vllm_lookahead.request import EXTRA_ARG

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_lookahead.engine.runner import LookaheadCPUModelRunner

logger = init_logger("vllm.lookahead")

SECONDS = 10.0
"""After so long a start asks no further; the next one goes on from there."""
IN_STEP_TOKENS = 256
"""Most tokens that data-parallel engines ask about, since they go by no clock and no file."""

Rows = list[list[int]]
"""Successors of the tokens 0, 1, ..., the likeliest first."""


def model_bigrams(runner: LookaheadCPUModelRunner, broadcast: Broadcast, is_first: bool) -> Bigrams:
    """Successors of the vocabulary's first tokens, equal on all ranks: from the file, or asked.

    Args:
        runner: with its KV cache and no requests; all ranks call this at the same time.
        broadcast: see `Broadcast`.
        is_first: whether this is the first rank, which reads and writes the file.
    """
    config = runner.vllm_config
    vocab_size = config.model_config.get_vocab_size()
    wanted = min(runner.drafter.config.bigram_tokens, vocab_size)
    path = cache_path(config)
    in_step = config.parallel_config.data_parallel_size > 1
    rows: Rows = []
    if in_step:
        wanted = min(wanted, IN_STEP_TOKENS)
    else:
        rows = broadcast(_load(path, vocab_size) if is_first else None)
    known = len(rows)
    begin = time.perf_counter()
    for first in range(known, wanted, step := _requests_at_once(runner)):
        rows += broadcast(_ask(runner, range(first, min(first + step, wanted))))
        if not in_step and broadcast(time.perf_counter() - begin > SECONDS):
            break
    if is_first and not in_step and len(rows) > known:
        save_json(path, rows)
    if len(rows) > known:
        seconds = time.perf_counter() - begin
        logger.info("Asked for the successors of %d tokens: %.1f s", len(rows) - known, seconds)
    return dict(enumerate(rows[:wanted]))


def cache_path(config: VllmConfig) -> Path:
    """The file for this model."""
    model = config.model_config
    key = [model.model, model.revision, str(model.dtype), str(model.quantization)]
    return cache_file("bigrams", key)


def _load(path: Path, vocab_size: int) -> Rows:
    rows = load_json(path)
    # The folder of a model may hold another one by now, with fewer tokens.
    if isinstance(rows, list) and all(
        isinstance(row, list)
        and all(isinstance(token, int) and 0 <= token < vocab_size for token in row)
        for row in rows
    ):
        return rows
    return []


def _requests_at_once(runner: LookaheadCPUModelRunner) -> int:
    blocks = runner.kv_cache_config.num_blocks // len(runner.kv_cache_config.kv_cache_groups)
    return max(1, min(runner.max_num_reqs, runner.max_num_tokens // 2, blocks - 1))


def _ask(runner: LookaheadCPUModelRunner, tokens: Sequence[int]) -> Rows:
    """One step in which every token is the second one of a prompt."""
    names = [f"lookahead-bigram-{token}" for token in tokens]
    context = _context_token(runner.vllm_config)
    params = SamplingParams(
        temperature=0,
        max_tokens=1,
        logprobs=BIGRAM_RANKS,
        extra_args={EXTRA_ARG: {"enabled": False}},
    )
    groups = len(runner.kv_cache_config.kv_cache_groups)
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=[context, token],
            mm_features=[],
            sampling_params=params,
            pooling_params=None,
            # Block 0 is vLLM's null block; groups may share memory, so none has another's.
            block_ids=tuple([1 + index * groups + group] for group in range(groups)),
            num_computed_tokens=0,
            lora_request=None,
        )
        for index, (name, token) in enumerate(zip(names, tokens, strict=True))
    ]
    step.num_scheduled_tokens = dict.fromkeys(names, 2)
    step.total_num_scheduled_tokens = 2 * len(names)
    output = runner.execute_model(step)
    if output is None:
        output = runner.sample_tokens(None)
    # Rows are in the order of the runner's batch; the first column is the sampled token.
    found = dict(
        zip(output.req_ids, output.logprobs.logprob_token_ids[:, 1:].tolist(), strict=True)
    )
    end = SchedulerOutput.make_empty()
    end.finished_req_ids = set(names)
    runner.execute_model(end)
    return [found[name] for name in names]


def _context_token(config: VllmConfig) -> int:
    """What stands before the token: models see the first token of a text like no other."""
    text_config = config.model_config.hf_text_config
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(text_config, name, None)
        if isinstance(token, list) and token:
            token = token[0]
        if isinstance(token, int):
            return token
    return 0
