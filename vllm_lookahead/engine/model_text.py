"""Text that the model writes by itself at start-up, in which requests find what comes next.

It needs no text of anybody, no second model and no training. It grows out of the extended bigrams
of "The N-Grammys" (Stewart et al., arXiv 2411.03786), which are greedy continuations of single
tokens. These are longer, and sampled: greedy ones soon repeat themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from vllm import SamplingParams
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_lookahead.engine.files import cache_file, load_json, save_json
from vllm_lookahead.engine.step_cost import Broadcast
from vllm_lookahead.engine.text_sampler import TextSampler
from vllm_lookahead.request import EXTRA_ARG

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_lookahead.engine.runner import LookaheadCPUModelRunner

logger = init_logger("vllm.lookahead")

TEXT_LENGTH = 200
"""Tokens of a text with the one before it, its context."""
TEMPERATURE = 0.5
"""Likely text, but not always the same: better by simulation than 0.2, 0.7 and 0.9."""
TEXTS_AT_ONCE = 128
IN_STEP_LENGTH = 50
"""Tokens of a text of data-parallel engines, which write once and go by no clock and no file."""
FIRST_TOKENS = 4096
"""Texts begin with one of so many first tokens of the vocabulary: tokenizers give their first
ids to bytes and common words."""

Texts = list[list[int]]


def model_text(runner: LookaheadCPUModelRunner, broadcast: Broadcast, is_first: bool) -> Texts:
    """Texts that the model wrote, equal on all ranks: from the file, or written now.

    Args:
        runner: with its KV cache and no requests; all ranks call this at the same time.
        broadcast: see `Broadcast`.
        is_first: whether this is the first rank, which reads and writes the file.
    """
    config = runner.vllm_config
    vocab_size = config.model_config.get_vocab_size()
    wanted = runner.drafter.config.model_text_tokens
    seconds = runner.drafter.config.model_text_seconds
    firsts = _first_tokens(vocab_size)
    if config.parallel_config.data_parallel_size > 1:
        # Data-parallel engines pass in step with each other, so all of them must do as much.
        most, length = _room(runner, IN_STEP_LENGTH)
        if most == 0:
            return []
        texts = broadcast(
            _write(runner, firsts, range(min(most, len(firsts))), length, lambda: True)
        )
        return _cut(texts, wanted)
    path = cache_path(config)
    texts = broadcast(_load(path, vocab_size) if is_first else None)
    known = _size(texts)
    begin = time.perf_counter()

    def has_time() -> bool:
        return broadcast(time.perf_counter() - begin < seconds)

    most, length = _room(runner, TEXT_LENGTH)
    while most and len(texts) < len(firsts) and (missing := wanted - _size(texts)) > 0:
        if not has_time():
            break
        last = min(len(texts) + min(most, cdiv(missing, length)), len(firsts))
        chosen = range(len(texts), last)
        texts += broadcast(_write(runner, firsts, chosen, length, has_time))
    if (new := _size(texts) - known) > 0:
        if is_first:
            save_json(path, texts)
        logger.info("The model wrote %d tokens: %.1f s", new, time.perf_counter() - begin)
    return _cut(texts, wanted)


def cache_path(config: VllmConfig) -> Path:
    """The file for this model."""
    model = config.model_config
    key = [model.model, model.revision, str(model.dtype), str(model.quantization)]
    return cache_file("model-text", key)


def _load(path: Path, vocab_size: int) -> Texts:
    texts = load_json(path)
    # The folder of a model may hold another one by now, with fewer tokens.
    if isinstance(texts, list) and all(
        isinstance(text, list)
        and all(isinstance(token, int) and 0 <= token < vocab_size for token in text)
        for text in texts
    ):
        return texts
    return []


def _size(texts: Texts) -> int:
    return sum(map(len, texts))


def _cut(texts: Texts, size: int) -> Texts:
    """The first ``size`` tokens."""
    kept = []
    for text in texts:
        if size <= 0:
            break
        kept.append(text[:size])
        size -= len(text)
    return kept


def _first_tokens(vocab_size: int) -> list[int]:
    """First tokens of the texts, scattered over the ids."""
    size = min(FIRST_TOKENS, vocab_size)
    return np.random.default_rng(0).permutation(size).tolist()


def _room(runner: LookaheadCPUModelRunner, length: int) -> tuple[int, int]:
    """(texts at once, tokens of each) that fit, of at most ``length`` tokens with context.

    (0, 0) where there is no room for a text of two tokens.
    """
    blocks = _blocks(runner)
    block_size = min(_block_sizes(runner))
    length = min(length, runner.max_model_len, blocks * block_size)
    texts = min(
        TEXTS_AT_ONCE,
        runner.max_num_reqs,
        runner.max_num_tokens // 2,
        blocks // cdiv(length, block_size) if length else 0,
    )
    return (texts, length - 1) if length > 2 and texts > 0 else (0, 0)


def _blocks(runner: LookaheadCPUModelRunner) -> int:
    # Block 0 is vLLM's null block; groups may share memory, so none has another's.
    config = runner.kv_cache_config
    return (config.num_blocks - 1) // len(config.kv_cache_groups)


def _block_sizes(runner: LookaheadCPUModelRunner) -> list[int]:
    return [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups]


def _write(
    runner: LookaheadCPUModelRunner,
    firsts: Sequence[int],
    chosen: range,
    length: int,
    has_time: Callable[[], bool],
) -> Texts:
    """Continuations of the chosen tokens, all of the same length, at most ``length``."""
    texts = {f"lookahead-text-{index}": [firsts[index]] for index in chosen}
    sampler, runner.sampler = runner.sampler, TextSampler(TEMPERATURE, seed=chosen.start)
    try:
        _step(runner, _begin(runner, texts, length), texts)
        for size in range(2, length):
            if not has_time():
                break
            _step(runner, _go_on(list(texts), size), texts)
    finally:
        runner.sampler = sampler
    end = SchedulerOutput.make_empty()
    end.finished_req_ids = set(texts)
    runner.execute_model(end)
    return list(texts.values())


def _step(
    runner: LookaheadCPUModelRunner, scheduled: SchedulerOutput, texts: dict[str, list[int]]
) -> None:
    scheduled.total_num_scheduled_tokens = sum(scheduled.num_scheduled_tokens.values())
    output = runner.execute_model(scheduled)
    if output is None:
        output = runner.sample_tokens(None)
    # Rows are in the order of the runner's batch.
    for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
        texts[name] += tokens


def _begin(
    runner: LookaheadCPUModelRunner,
    texts: dict[str, list[int]],
    length: int,
) -> SchedulerOutput:
    """The step in which every text's first token is the second one of a prompt."""
    context = _context_token(runner.vllm_config)
    num_blocks = [cdiv(length + 1, block_size) for block_size in _block_sizes(runner)]
    free = count(1)
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=[context, *text],
            mm_features=[],
            sampling_params=SamplingParams(
                temperature=TEMPERATURE,
                max_tokens=length,
                extra_args={EXTRA_ARG: {"enabled": False}},
            ),
            pooling_params=None,
            block_ids=tuple(list(islice(free, number)) for number in num_blocks),
            num_computed_tokens=0,
            lora_request=None,
        )
        for name, text in texts.items()
    ]
    step.num_scheduled_tokens = dict.fromkeys(texts, 2)
    return step


def _go_on(names: list[str], size: int) -> SchedulerOutput:
    """The step that feeds the last of each text's ``size`` tokens."""
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = CachedRequestData(
        req_ids=names,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(names),
        # With the context token, without the last one.
        num_computed_tokens=[size] * len(names),
        num_output_tokens=[size - 1] * len(names),
    )
    step.num_scheduled_tokens = dict.fromkeys(names, 1)
    return step


def _context_token(config: VllmConfig) -> int:
    """What stands before the text: models see the first token of a text like no other."""
    text_config = config.model_config.hf_text_config
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(text_config, name, None)
        if isinstance(token, list) and token:
            token = token[0]
        if isinstance(token, int):
            return token
    return 0
