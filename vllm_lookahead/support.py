"""What lookahead refuses at start-up, with the flag to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs


def refusals(args: EngineArgs, model_config: ModelConfig) -> list[str]:
    """Reasons, a sentence each, why lookahead can't keep its promises; [] when it can."""
    return [*_platform(), *_flags(args), *_architecture(model_config)]


def _platform() -> list[str]:
    from vllm import envs
    from vllm.platforms import current_platform

    reasons = []
    if not current_platform.is_cpu():
        reasons.append(
            f"This release has token trees for vLLM's CPU backend only, not for "
            f"{current_platform.device_name} (unset --speculative-config there)."
        )
    if envs.VLLM_USE_V2_MODEL_RUNNER:
        reasons.append("It extends the V1 model runner: unset VLLM_USE_V2_MODEL_RUNNER.")
    return reasons


def _flags(args: EngineArgs) -> list[str]:
    from vllm_lookahead.plugin import SCHEDULER

    checks = [
        (args.spec_model is not None, "It has no draft model: drop --spec-model."),
        (
            args.spec_tokens is not None,
            "Its n-gram size sets the number of draft tokens: drop --spec-tokens, and set "
            "ngram_size in --speculative-config.",
        ),
        (args.async_scheduling, "Drafts come from sampled tokens: drop --async-scheduling."),
        (
            args.pipeline_parallel_size > 1,
            "Pipeline parallelism isn't supported: set --pipeline-parallel-size 1.",
        ),
        (
            args.decode_context_parallel_size > 1 or args.prefill_context_parallel_size > 1,
            "Context parallelism splits the KV cache that branches share: set "
            "--decode-context-parallel-size 1 and --prefill-context-parallel-size 1.",
        ),
        (
            args.kv_transfer_config is not None,
            "KV connectors would see the scratch blocks: drop --kv-transfer-config.",
        ),
        (
            args.ec_transfer_config is not None,
            "Encoder cache connectors aren't tested with it: drop --ec-transfer-config.",
        ),
        (
            args.distributed_executor_backend == "ray",
            "vLLM has no ray executor for CPUs: set --distributed-executor-backend mp.",
        ),
        (
            args.worker_cls != "auto",
            f"It brings its own worker: drop --worker-cls {args.worker_cls}.",
        ),
        (
            args.scheduler_cls not in (None, SCHEDULER),
            f"It brings its own scheduler: drop --scheduler-cls {args.scheduler_cls}.",
        ),
    ]
    return [reason for refused, reason in checks if refused]


def _architecture(model_config: ModelConfig) -> list[str]:
    name = ", ".join(model_config.architectures)
    checks = [
        (model_config.runner_type != "generate", "is served for pooling, which decodes nothing"),
        (model_config.is_encoder_decoder, "is an encoder-decoder model"),
        (
            model_config.is_attention_free or model_config.is_hybrid,
            "has recurrent (Mamba-like) state, which a token tree can't branch",
        ),
        (model_config.use_mla, "uses multi-head latent attention, for which there are no branches"),
        (
            model_config.is_mm_prefix_lm,
            "attends in both directions within an image, for which there are no branches",
        ),
        (
            getattr(model_config.hf_text_config, "attention_chunk_size", None) is not None,
            "uses chunked local attention, for which there are no branches",
        ),
    ]
    return [
        f"{name} {reason}: serve this model without --speculative-config."
        for refused, reason in checks
        if refused
    ]
