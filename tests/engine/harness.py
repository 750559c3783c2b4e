"""ON/OFF harness: engines in this process, with and without lookahead, and what they answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 26,
    "disable_log_stats": False,
}


_engines: list[LLM] = []


@contextmanager
def engine(model: Path, lookahead: dict[str, Any] | None = None, **options: Any) -> Iterator[LLM]:
    """An engine in this process; ``lookahead`` holds the parameters beside the method.

    Unless they say otherwise every step feeds all that the sizes allow, so that trees are wide,
    and the model writes but a little at start-up.
    """
    if lookahead is not None:
        defaults = {"method": "lookahead", "controller": False, "model_text_tokens": 1000}
        options["speculative_config"] = {**defaults, **lookahead}
    llm = LLM(str(model), **{**DEFAULTS, **options})
    # Shutting an engine down, which its finalizer does, takes down the process groups that all
    # engines of this process share. So they stay (a tiny one takes 100 MB).
    _engines.append(llm)
    yield llm


@dataclass(frozen=True)
class Outcome:
    """What a request's user sees of one choice."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


def outcomes(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[list[Outcome]]:
    """The choices of each request."""
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    answers = llm.generate(requests, params, use_tqdm=False)
    return [
        [
            Outcome(tuple(one.token_ids), one.text, one.finish_reason, one.stop_reason)
            for one in answer.outputs
        ]
        for answer in answers
    ]


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random bytes."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size=length).tolist() for length in lengths]


def greedy(max_tokens: int = 64, **options: Any) -> SamplingParams:
    """Greedy sampling that runs to its length."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **options})


def seeded(seed: int, max_tokens: int = 64, **options: Any) -> SamplingParams:
    """Seeded sampling that runs to its length."""
    defaults = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True}
    return SamplingParams(seed=seed, max_tokens=max_tokens, **{**defaults, **options})


def runner(llm: LLM) -> Any:
    """The engine's model runner."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def scheduler(llm: LLM) -> Any:
    """The engine's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def stats(llm: LLM) -> dict[str, Any]:
    """Lookahead's counters."""
    return llm.collective_rpc("lookahead_stats")[0]


def counter(llm: LLM, name: str) -> float:
    """Value of one of vLLM's own counters."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def drain(llm: LLM) -> None:
    """Step until the worker has heard of every finished request."""
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        llm.llm_engine.step()


def submit(llm: LLM, req_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
    """Add a request for stepwise runs."""
    llm.llm_engine.add_request(req_id, {"prompt_token_ids": list(prompt)}, params)


def step_until_done(llm: LLM) -> dict[str, tuple[int, ...]]:
    """Step until all requests end; token ids by request id."""
    finished: dict[str, tuple[int, ...]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                finished[output.request_id] = tuple(output.outputs[0].token_ids)
    return finished


def full_blocks(llm: LLM, num_tokens: int) -> list[torch.Tensor]:
    """KV cache, per layer, of the full blocks among the first ``num_tokens`` of the last request.

    The runner hears of a finished request with the step after it, so until then its block ids
    are there to be read.
    """
    [state] = runner(llm).requests.values()
    [block_ids] = state.block_ids
    count = num_tokens // DEFAULTS["block_size"]
    return [cache[block_ids[:count]].clone() for cache in runner(llm).kv_caches]
