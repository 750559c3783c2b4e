"""vLLM's worker, building lookahead's runner and paying for its scratch blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_lookahead.attention.cpu_attn import BranchedCPUAttentionBackend
from vllm_lookahead.engine.runner import LookaheadCPUModelRunner
from vllm_lookahead.engine.sampler import without_custom_processors

logger = init_logger("vllm.lookahead")


class LookaheadCPUWorker(CPUWorker):
    """CPU worker of the method ``lookahead``."""

    model_runner: LookaheadCPUModelRunner

    def init_device(self) -> None:
        # The base class builds its own runner, which isn't kept; see patches/ for the hook that
        # would save that.
        with without_custom_processors(self.model_config):
            super().init_device()
        self.model_runner = LookaheadCPUModelRunner(self.vllm_config, self.device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        backend = AttentionBackendEnum.CPU_ATTN
        register_backend(backend, ".".join(BranchedCPUAttentionBackend.full_cls_name()))
        # The selector caches classes by the layers' shape, for the whole process.
        _cached_get_attn_backend.cache_clear()
        try:
            super().load_model(*args, **kwargs)
        finally:
            # Layers keep the class they were built with; other engines of this process must
            # get vLLM's own.
            backend.clear_override()
            _cached_get_attn_backend.cache_clear()
        self._require_branches()

    def _require_branches(self) -> None:
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        for name, layer in layers.items():
            if not issubclass(layer.get_attn_backend(), BranchedCPUAttentionBackend):
                architectures = ", ".join(self.model_config.architectures)
                raise ValueError(
                    f"Lookahead decoding has no branches for {type(layer).__name__} ({name} of "
                    f"{architectures}): serve this model without --speculative-config."
                )

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        config = self.model_runner.drafter.config
        reserved = self.model_runner.scratch_size().reserve(available, config.scratch_fraction)
        logger.info(
            "Lookahead decoding is active: %s; %.0f MiB of the KV cache memory hold branches.",
            config.to_json(),
            reserved / 2**20,
        )
        return available - reserved

    def compile_or_warm_up_model(self) -> CompilationTimes:
        runner = self.model_runner
        if len(runner.kv_caches):
            group = get_tp_group()
            runner.prepare_drafts(partial(group.broadcast_object, src=0), group.is_first_rank)
        # Comes last: it resets the random state.
        return super().compile_or_warm_up_model()

    def lookahead_stats(self) -> dict[str, Any]:
        """Counters of `LookaheadStats`, and what the sequences hold now."""
        drafter, costs = self.model_runner.drafter, self.model_runner.costs
        return self.model_runner.stats.to_json() | {
            "sequences": drafter.num_sequences,
            "pool_ngrams": drafter.pool_ngrams,
            "shared_tokens": drafter.shared_tokens,
            "step_cost": [(count, round(cost, 6)) for count, cost in costs.points],
            "branch_cost": costs.branch,
            "draft_cost": costs.draft,
        }
