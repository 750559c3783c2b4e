"""Engine features beside lookahead: LoRA, fp8 KV cache, prompt embeddings, reloads, two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM
from vllm.config import KVEventsConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams

from tests.engine import scripted, tensor_parallel
from tests.engine.harness import (
    engine,
    greedy,
    outcomes,
    random_prompts,
    seeded,
    stats,
)
from tests.tiny import save_llama
from vllm_lookahead.engine.step_cost import StepClock

PROMPTS = random_prompts(5, 31, 32, 64, 7, 90, 20, 45, seed=11)
PARAMS = [greedy(60), seeded(4, 60)] * 4
LOOKAHEAD = {
    "window_size": 4,
    "ngram_size": 4,
    "verification_set_size": 4,
    "sources": [scripted.NAME, "window", "output", "prompt"],
}


def script(plain: list[list[Any]]) -> None:
    texts = [[*p, *o[0].token_ids] for p, o in zip(PROMPTS, plain, strict=True)]
    scripted.ScriptedSource.script(texts, scripted.changing)


def save_adapter(folder: Path, seed: int, rank: int = 8) -> Path:
    """A random LoRA adapter for the queries and values of the tiny Llama."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        for name, size in (("q_proj", 128), ("v_proj", 64)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(rank, 128, generator=generator) * 0.3
            weights[f"{key}.lora_B.weight"] = torch.randn(size, rank, generator=generator) * 0.3
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "bias": "none"}
    adapter |= {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


def test_two_lora_adapters_and_none_in_a_batch(tiny_llama: Path, tmp_path: Path) -> None:
    adapters = [
        LoRARequest(name, number, str(save_adapter(tmp_path / name, seed=number)))
        for number, name in enumerate(("one", "two"), start=1)
    ]
    loras = ([None, *adapters] * 3)[: len(PROMPTS)]

    def answers(llm: LLM) -> list[list[int]]:
        requests: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        done = llm.generate(requests, PARAMS, lora_request=loras, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]

    with engine(tiny_llama, enable_lora=True, max_loras=2) as llm:
        plain = answers(llm)
        # The adapters must matter, or nothing is tested.
        assert outcomes(llm, PROMPTS[1:2], PARAMS[1])[0][0].token_ids != tuple(plain[1])
    texts = [[*p, *o] for p, o in zip(PROMPTS, plain, strict=True)]
    scripted.ScriptedSource.script(texts, scripted.changing)
    with engine(tiny_llama, LOOKAHEAD, enable_lora=True, max_loras=2) as llm:
        assert answers(llm) == plain


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 KV cache on CPUs needs AVX-512"
)
def test_fp8_kv_cache(tiny_llama: Path) -> None:
    with engine(tiny_llama, kv_cache_dtype="fp8") as llm:
        plain = outcomes(llm, PROMPTS, PARAMS)
    script(plain)
    with engine(tiny_llama, LOOKAHEAD, kv_cache_dtype="fp8") as llm:
        assert outcomes(llm, PROMPTS, PARAMS) == plain
        assert stats(llm)["off_primary"] > 20


def test_prompt_embeddings_beside_token_prompts(tmp_path: Path) -> None:
    # A model of its own: vLLM adds a placeholder to the tokenizer that it keeps for the folder.
    model = save_llama(tmp_path / "model")
    [weights] = [load_file(file) for file in model.glob("*.safetensors")]
    table = weights["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(40, table.shape[1], generator=generator) * 0.1
    requests: Any = [
        {"prompt_embeds": table[PROMPTS[3][:40]] + noise},
        {"prompt_token_ids": PROMPTS[1]},
        {"prompt_embeds": table[PROMPTS[5]]},
    ]
    params = [greedy(60), greedy(60), seeded(2, 60)]
    answers = []
    for lookahead in (None, {"window_size": 4, "ngram_size": 4, "verification_set_size": 4}):
        with engine(model, lookahead, enable_prompt_embeds=True) as llm:
            done = llm.generate(requests, params, use_tqdm=False)
            answers.append([list(one.outputs[0].token_ids) for one in done])
    assert answers[1] == answers[0]


def test_weights_can_be_reloaded(tiny_llama: Path) -> None:
    with engine(tiny_llama) as llm:
        plain = outcomes(llm, PROMPTS, PARAMS)
    script(plain)
    with engine(tiny_llama, LOOKAHEAD) as llm:
        assert outcomes(llm, PROMPTS, PARAMS) == plain
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        assert outcomes(llm, PROMPTS, PARAMS) == plain


def test_kv_events_tell_of_the_same_blocks(tiny_llama: Path) -> None:
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    stored = []
    for lookahead in (None, LOOKAHEAD):
        with engine(
            tiny_llama, lookahead, kv_events_config=events, enable_prefix_caching=True
        ) as llm:
            core = llm.llm_engine.engine_core.engine_core
            manager = core.scheduler.kv_cache_manager
            plain = outcomes(llm, PROMPTS, greedy(60))
            script(plain)
            pool = manager.block_pool
            stored.append(set(pool.cached_block_hash_to_block._cache))
    assert stored[0]
    # Lookahead may end a request a step earlier, with a block less to remember, never with more.
    assert stored[1] <= stored[0]


def test_beam_search(tiny_llama: Path) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
    found = []
    for lookahead in (None, LOOKAHEAD):
        with engine(tiny_llama, lookahead) as llm:
            done = llm.beam_search(prompts, params)
            found.append([[list(one.tokens) for one in each.sequences] for each in done])
    assert found[1] == found[0]


@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
)
def test_every_logprobs_mode(tiny_llama: Path, mode: str) -> None:
    params = [greedy(30, logprobs=3), seeded(4, 30, logprobs=20, repetition_penalty=1.2)]
    requests: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
    answers = []
    for lookahead in (None, LOOKAHEAD):
        with engine(tiny_llama, lookahead, logprobs_mode=mode) as llm:
            done = [one.outputs[0] for one in llm.generate(requests, params, use_tqdm=False)]
            texts = [[*p, *o.token_ids] for p, o in zip(PROMPTS, done, strict=False)]
            scripted.ScriptedSource.script(texts, scripted.changing)
            answers.append(done)
    for plain, walked in zip(*answers, strict=True):
        assert walked.token_ids == plain.token_ids
        assert len(walked.logprobs) == len(plain.logprobs) == 30
        for mine, theirs in zip(walked.logprobs, plain.logprobs, strict=True):
            assert mine.keys() == theirs.keys()
            values = [(mine[token].logprob, theirs[token].logprob) for token in mine]
            assert all(a == b or a == pytest.approx(b, abs=1e-4) for a, b in values)


def test_two_tensor_parallel_ranks_agree(tiny_llama: Path, tmp_path: Path) -> None:
    environ = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "XDG_CACHE_HOME": str(tmp_path)}
    ranks = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.tensor_parallel", str(tiny_llama)],
        cwd=Path(__file__).parents[2],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    with engine(tiny_llama) as llm:
        plain = outcomes(llm, tensor_parallel.PROMPTS, tensor_parallel.PARAMS)
    output, _ = ranks.communicate(timeout=300)
    assert ranks.returncode == 0
    report = json.loads(output.splitlines()[-1])
    assert report["token_ids"] == [list(one[0].token_ids) for one in plain]
    first, second = report["ranks"]
    # Each rank has measured other times; the first one's count for both.
    assert first == second
    assert first["steps"] > StepClock.PERIOD
