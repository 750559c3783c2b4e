"""What lookahead refuses at start-up, each time with the flag to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm import envs
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.platforms import current_platform

from tests.engine_options import engine_args
from vllm_lookahead import plugin
from vllm_lookahead.support import refusals

LOOKAHEAD = {"method": "lookahead"}


def refusal(model: Path, **changes: Any) -> str:
    """Why lookahead can't run, from an engine configuration that is valid without it."""
    engine_args(model, **changes).create_engine_config()
    with pytest.raises(ValueError, match="Lookahead decoding can't run here") as error:
        engine_args(model, speculative_config=LOOKAHEAD, **changes).create_engine_config()
    return str(error.value)


# Flags


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"pipeline_parallel_size": 2}, "set --pipeline-parallel-size 1."),
        ({"async_scheduling": True}, "drop --async-scheduling."),
        (
            {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
            "drop --worker-cls vllm.v1.worker.cpu_worker.CPUWorker.",
        ),
        (
            {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
            "drop --scheduler-cls vllm.v1.core.sched.scheduler.Scheduler.",
        ),
        (
            {
                "kv_transfer_config": KVTransferConfig(
                    kv_connector="ExampleConnector", kv_role="kv_both"
                )
            },
            "drop --kv-transfer-config.",
        ),
        (
            {
                "ec_transfer_config": ECTransferConfig(
                    ec_connector="ECExampleConnector", ec_role="ec_both"
                )
            },
            "drop --ec-transfer-config.",
        ),
        ({"runner": "pooling"}, "serve this model without --speculative-config."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_flag_is_refused_by_name(tiny_llama: Path, changes: dict[str, Any], remedy: str) -> None:
    assert remedy in refusal(tiny_llama, **changes)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        # vLLM alone wants CUDA for the first, and a draft model for the other two.
        (
            {"prefill_context_parallel_size": 2},
            "set --decode-context-parallel-size 1 and --prefill",
        ),
        ({"spec_tokens": 3}, "drop --spec-tokens, and set ngram_size"),
        ({"spec_model": "gpt2"}, "drop --spec-model."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_flag_that_plain_vllm_refuses_here_is_refused_by_name(
    tiny_llama: Path, changes: dict[str, Any], remedy: str
) -> None:
    args = engine_args(tiny_llama, speculative_config=LOOKAHEAD, **changes)
    with pytest.raises(ValueError, match="Lookahead decoding can't run here") as error:
        args.create_engine_config()
    assert remedy in str(error.value)


def test_ray_executor_is_refused_by_name(tiny_llama: Path) -> None:
    # Without ray, vLLM has its own objection to a whole engine configuration.
    args = engine_args(tiny_llama, distributed_executor_backend="ray")
    model_config = engine_args(tiny_llama).create_model_config()
    [reason] = refusals(args, model_config)
    assert reason.endswith("set --distributed-executor-backend mp.")
    # vLLM's `initialize_ray_cluster` needs it; once there is one, ray can be tried.
    assert not current_platform.ray_device_key


def test_all_reasons_come_in_one_message(tiny_llama: Path) -> None:
    message = refusal(tiny_llama, pipeline_parallel_size=2, async_scheduling=True)
    assert "--pipeline-parallel-size 1" in message
    assert "--async-scheduling" in message


# Environment


def test_v2_model_runner_is_refused_by_the_name_of_its_variable(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An engine that ran in this process may have frozen the variables.
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    args = engine_args(tiny_llama, speculative_config=LOOKAHEAD)
    with pytest.raises(ValueError, match="unset VLLM_USE_V2_MODEL_RUNNER"):
        args.create_engine_config()


def test_v2_model_runner_set_to_0_is_fine(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config = engine_args(tiny_llama, speculative_config=LOOKAHEAD).create_engine_config()
    assert config.parallel_config.worker_cls == plugin.WORKER


@pytest.mark.parametrize("installed", ["0.31.2", "0.33.0", None])
def test_unsupported_vllm_is_refused_when_lookahead_is_asked_for(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, installed: str | None
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: installed)
    args = engine_args(tiny_llama, speculative_config=LOOKAHEAD)
    with pytest.raises(RuntimeError, match=r">=0\.32\.0,<0\.33\.0") as error:
        args.create_engine_config()
    assert str(installed or "no installed vLLM") in str(error.value)


def test_unsupported_vllm_is_left_alone_when_lookahead_is_not_asked_for(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.33.0")
    assert engine_args(tiny_llama).create_engine_config().speculative_config is None


# Architectures

DECODER = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
ENCODER_DECODER = {
    "vocab_size": 272,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
EXPERTS = {
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
PALIGEMMA = {
    "text_config": {"model_type": "gemma", **DECODER, "head_dim": 16},
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "projection_dim": 64,
    "image_token_index": 257,
}
ARCHITECTURES = [
    ("mamba", "MambaForCausalLM", {**DECODER, "state_size": 16}, "recurrent (Mamba-like) state"),
    (
        "jamba",
        "JambaForCausalLM",
        {**DECODER, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
        "recurrent (Mamba-like) state",
    ),
    ("bart", "BartForConditionalGeneration", ENCODER_DECODER, "is an encoder-decoder model"),
    (
        "whisper",
        "WhisperForConditionalGeneration",
        ENCODER_DECODER,
        "is an encoder-decoder model",
    ),
    (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {**DECODER, **EXPERTS, **LATENT},
        "multi-head latent attention",
    ),
    (
        "llama4_text",
        "Llama4ForCausalLM",
        {**DECODER, "attention_chunk_size": 64, "num_local_experts": 1, "head_dim": 16},
        "chunked local attention",
    ),
    (
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        PALIGEMMA,
        "attends in both directions within an image",
    ),
]


@pytest.mark.parametrize(
    ("model_type", "architecture", "config", "reason"),
    ARCHITECTURES,
    ids=[architecture for _, architecture, _, _ in ARCHITECTURES],
)
def test_architecture_is_refused_by_name(
    tmp_path: Path, model_type: str, architecture: str, config: dict[str, Any], reason: str
) -> None:
    """Configurations only: vLLM refuses them before it looks for weights."""
    config = {"model_type": model_type, "architectures": [architecture], **config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path, max_model_len=256, skip_tokenizer_init=True)
    assert f"{architecture} " in message
    assert reason in message
    assert "serve this model without --speculative-config." in message
