"""Branches through vLLM's CPU_ATTN backend.

`register_backend` puts `BranchedCPUAttentionBackend` behind the name CPU_ATTN while the worker
loads the model. Without a `BranchBatch` for the step it is CPU_ATTN to the letter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_lookahead.attention.branches import BranchBatch


@dataclass
class BranchedCPUAttentionMetadata(CPUAttentionMetadata):
    """CPU_ATTN metadata of pseudo-sequences; M keys to write."""

    key_rows: torch.Tensor | None = None
    """[M] rows of key and value to write, None to write all in order."""
    key_slots: torch.Tensor | None = None
    """[M] slots to write them into."""


class BranchedCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds the metadata of a step's branches when the runner has set `branches`."""

    branches: BranchBatch | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        branches = self.branches
        if branches is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        query_start_loc = torch.from_numpy(branches.query_start_loc)
        seq_lens = torch.from_numpy(branches.seq_lens)
        metadata = super().build(
            common_prefix_len,
            replace(
                common_attn_metadata,
                num_reqs=len(branches.seq_lens),
                query_start_loc=query_start_loc,
                query_start_loc_cpu=query_start_loc,
                max_query_len=int(query_start_loc.diff().max()),
                seq_lens=seq_lens,
                max_seq_len=int(branches.seq_lens.max()),
                block_table_tensor=torch.from_numpy(branches.block_table),
            ),
            fast_build,
        )
        return BranchedCPUAttentionMetadata(
            **vars(metadata),
            key_rows=torch.from_numpy(branches.key_rows),
            key_slots=torch.from_numpy(branches.key_slots),
        )


class BranchedCPUAttentionBackendImpl(CPUAttentionBackendImpl):
    """Writes a node's key and value once for each branch that holds it."""

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        all_metadata = get_forward_context().attn_metadata
        metadata = all_metadata.get(layer.layer_name) if isinstance(all_metadata, dict) else None
        if isinstance(metadata, BranchedCPUAttentionMetadata) and metadata.key_rows is not None:
            assert metadata.key_slots is not None
            key = key.index_select(0, metadata.key_rows)
            value = value.index_select(0, metadata.key_rows)
            slot_mapping = metadata.key_slots
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class BranchedCPUAttentionBackend(CPUAttentionBackend):
    """CPU_ATTN with branches."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return BranchedCPUAttentionBackendImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return BranchedCPUAttentionMetadataBuilder
