"""Scratch blocks: KV cache blocks behind the scheduler's, for the branches of token trees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from vllm_lookahead.attention.branches import blocks_touched
from vllm_lookahead.config import LookaheadConfig

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


@dataclass(frozen=True, slots=True)
class ScratchSize:
    """How many scratch blocks there are to be, per KV cache group."""

    wanted: int
    """Enough for the largest tree of every sequence at once."""
    required: int
    """Enough for the largest tree of one sequence."""
    block_bytes: int
    """Memory of one block in every layer."""

    @classmethod
    def of(
        cls, config: LookaheadConfig, specs: Iterable[KVCacheSpec], max_num_seqs: int
    ) -> ScratchSize:
        """Size for the layers' KV cache ``specs``."""
        specs = list(specs)
        block_size = min(spec.block_size for spec in specs)
        # A branch may start at the last position of a block.
        per_branch = blocks_touched(block_size - 1, config.max_depth, block_size)
        required = (config.max_branches - 1) * per_branch
        return cls(
            wanted=required * max_num_seqs,
            required=required,
            block_bytes=sum(spec.page_size_bytes for spec in specs),
        )

    def reserve(self, available: int, fraction: float) -> int:
        """Bytes to take from the ``available`` ones of the KV cache.

        Raises:
            ValueError: one sequence's tree alone needs more than half of the memory.
        """
        required = self.required * self.block_bytes
        if required > available // 2:
            raise ValueError(
                f"lookahead needs {required / 2**20:.0f} MiB of scratch KV cache for one token "
                f"tree, more than half of the {available / 2**20:.0f} MiB available. Raise "
                "--kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE), lower --block-size, or lower "
                "window_size or verification_set_size in --speculative-config."
            )
        return max(required, min(self.wanted * self.block_bytes, int(available * fraction)))

    def num_blocks(self, num_blocks: int, num_groups: int, fraction: float) -> int:
        """Scratch blocks of each group beside a KV cache of ``num_blocks``.

        This is what `reserve` has left room for. It depends on nothing that differs between
        ranks, so that all ranks plan the same trees.
        """
        share = int(num_blocks * fraction / (1 - fraction)) // num_groups
        return max(self.required, min(self.wanted, share))


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
        by_layer = tensor.layer_stride >= tensor.block_stride * old
        tensors.append(
            replace(
                tensor,
                size=grow(tensor.size),
                layer_stride=grow(tensor.layer_stride) if by_layer else tensor.layer_stride,
                offset=grow(tensor.offset) if by_layer else tensor.offset,
            )
        )
    return replace(config, num_blocks=new, kv_cache_tensors=tensors)


class CacheBlocks:
    """Blocks of one KV cache group, each with its content in every layer."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        """
        Args:
            caches: [num_blocks, ...] per layer; layers that share another one's are left out.
        """
        distinct = [cache for _, cache in sorted({c.data_ptr(): c for c in caches}.items())]
        self._views = _all_layers(distinct) or [cache[None] for cache in distinct]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each; no block is both."""
        for view in self._views:
            for source, destination in copies:
                view[:, destination].copy_(view[:, source])


def _all_layers(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One [num_layers, num_blocks, block] view of all caches if they lie evenly in one storage."""
    first = caches[0]
    offsets = [cache.storage_offset() for cache in caches]
    steps = {right - left for left, right in pairwise(offsets)}
    alike = all(
        cache.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and cache.shape == first.shape
        and cache.stride() == first.stride()
        and cache[0].is_contiguous()
        for cache in caches
    )
    if len(steps) != 1 or not alike:
        return []
    size = (len(caches), first.shape[0], first[0].numel())
    stride = (steps.pop(), first.stride(0), 1)
    return [first.as_strided(size, stride, offsets[0])]
