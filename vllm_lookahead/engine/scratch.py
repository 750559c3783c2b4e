"""Scratch blocks: KV cache blocks behind the scheduler's, for the branches of token trees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from vllm_lookahead.attention.branches import ScratchBlocks, tail_blocks
from vllm_lookahead.config import LookaheadConfig

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


@dataclass(frozen=True, slots=True)
class ScratchSize:
    """How many scratch slots there are to be; a slot holds one branch in every layer."""

    wanted_slots: int
    """Enough for the largest tree of every sequence."""
    required_slots: int
    """Enough for the largest tree of one sequence."""
    slot_blocks: int
    """Blocks of a slot in one KV cache group."""
    slot_bytes: int
    """Memory of a slot, all layers."""

    @classmethod
    def of(
        cls, config: LookaheadConfig, specs: Iterable[KVCacheSpec], max_num_seqs: int
    ) -> ScratchSize:
        """Size for the layers' KV cache ``specs``."""
        specs = list(specs)
        blocks = max(tail_blocks(config.max_depth, spec.block_size) for spec in specs)
        per_sequence = config.max_branches - 1
        return cls(
            wanted_slots=per_sequence * max_num_seqs,
            required_slots=per_sequence,
            slot_blocks=blocks,
            slot_bytes=blocks * sum(spec.page_size_bytes for spec in specs),
        )

    def reserve(self, available: int, fraction: float) -> int:
        """Bytes to take from the ``available`` ones of the KV cache.

        Raises:
            ValueError: one sequence's tree alone needs more than half of the memory.
        """
        required = self.required_slots * self.slot_bytes
        if required > available // 2:
            raise ValueError(
                f"lookahead needs {required / 2**20:.0f} MiB of scratch KV cache for one token "
                f"tree, more than half of the {available / 2**20:.0f} MiB available. Raise "
                "--kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE), lower --block-size, or lower "
                "window_size or verification_set_size in --speculative-config."
            )
        return max(required, min(self.wanted_slots * self.slot_bytes, int(available * fraction)))

    def num_slots(self, num_blocks: int, num_groups: int, fraction: float) -> int:
        """Slots beside a KV cache of ``num_blocks``: what `reserve` has left room for.

        Depends on nothing that differs between ranks, so that all ranks plan the same trees.
        """
        share = int(num_blocks * fraction / (1 - fraction)) // (self.slot_blocks * num_groups)
        return max(self.required_slots, min(self.wanted_slots, share))


def with_extra_blocks(config: KVCacheConfig, extra: int) -> KVCacheConfig:
    """``config`` with ``extra`` blocks behind the ``num_blocks`` that the scheduler knows."""
    old, new = config.num_blocks, config.num_blocks + extra

    def grow(size: int) -> int:
        if size % old:
            raise ValueError(f"KV cache region of {size} bytes is not made of {old} equal blocks")
        return size // old * new

    tensors = []
    for tensor in config.kv_cache_tensors:
        # Layer-outermost: a layer's region is contiguous, so regions grow and move apart.
        # Block-outermost: blocks hold all layers, so the new ones just come last.
        by_layer = tensor.layer_stride >= tensor.block_stride * old or len(tensor.layers) == 1
        tensors.append(
            replace(
                tensor,
                size=grow(tensor.size),
                layer_stride=grow(tensor.layer_stride) if by_layer else tensor.layer_stride,
                offset=grow(tensor.offset) if by_layer else tensor.offset,
            )
        )
    return replace(config, num_blocks=new, kv_cache_tensors=tensors)


def scratch_of_groups(num_blocks: int, num_groups: int, slot_blocks: int) -> list[ScratchBlocks]:
    """Scratch blocks per KV cache group. Groups overlay the same memory, so ids differ."""
    return [
        ScratchBlocks(num_blocks + group * slot_blocks, num_groups * slot_blocks)
        for group in range(num_groups)
    ]


def copy_blocks(
    kv_caches: Sequence[torch.Tensor], copies: Sequence[tuple[int, int]] | torch.Tensor
) -> None:
    """Copy whole blocks, (source, destination) each, in every layer's [num_blocks, ...] cache."""
    if len(copies) == 0:
        return
    source, destination = torch.as_tensor(copies, dtype=torch.int64).unbind(1)
    for cache in kv_caches:
        cache.index_copy_(0, destination, cache.index_select(0, source))
