"""Scratch blocks: how many, where they lie in vLLM's KV cache, and copying them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_lookahead.config import LookaheadConfig
from vllm_lookahead.engine.scratch import CacheBlocks, ScratchSize, with_extra_blocks

OLD, EXTRA = 6, 5


def attention(num_kv_heads: int = 2, block_size: int = 4) -> FullAttentionSpec:
    """A page of ``num_kv_heads * block_size * (3 + 3) * 4`` bytes."""
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=3, dtype=torch.float32
    )


def kv_cache_config(groups: list[KVCacheGroupSpec], layout: KVCacheLayout) -> KVCacheConfig:
    """vLLM's own configuration of ``OLD`` blocks."""
    vllm_config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=OLD,
            prefix_cache_retention_interval=None,
        ),
    )
    config = get_kv_cache_config_from_groups(
        cast(VllmConfig, vllm_config), groups, available_memory=1 << 30
    )
    assert config.num_blocks == OLD
    return config


def one_group() -> list[KVCacheGroupSpec]:
    return [KVCacheGroupSpec(["a", "b", "c"], attention())]


def two_groups() -> list[KVCacheGroupSpec]:
    """Full and sliding-window layers, whose blocks overlay each other."""
    sliding = SlidingWindowSpec(
        block_size=4, num_kv_heads=2, head_size=3, dtype=torch.float32, sliding_window=8
    )
    return [KVCacheGroupSpec(["a", "b"], attention()), KVCacheGroupSpec(["c", "d"], sliding)]


def mixed_pages() -> list[KVCacheGroupSpec]:
    """One group of layers with pages of different sizes, a single layer of each."""
    specs: dict[str, KVCacheSpec] = {"a": attention(2), "b": attention(1), "c": attention(4)}
    return [KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(4, specs))]


def fill(
    caches: dict[str, torch.Tensor], blocks: dict[str, Sequence[int]]
) -> dict[tuple[str, int], int]:
    """Write a number of its own into every block of every layer; returns the numbers."""
    numbers: dict[tuple[str, int], int] = {}
    for name, cache in caches.items():
        for block in blocks[name]:
            numbers[name, block] = len(numbers) + 1
            cache[block] = numbers[name, block]
    return numbers


# Where the blocks lie

ALL = list(KVCacheLayout)
BLOCK_COMPACT = [layout for layout in ALL if layout.is_block_compact]


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_old_and_extra_blocks_of_all_layers_are_apart(layout: KVCacheLayout) -> None:
    grown = with_extra_blocks(kv_cache_config(one_group(), layout), EXTRA)
    caches = allocate_kv_cache(grown, torch.device("cpu"), layout)
    assert {name: len(cache) for name, cache in caches.items()} == dict.fromkeys("abc", 11)
    numbers = fill(caches, dict.fromkeys("abc", range(11)))
    for (name, block), number in numbers.items():
        assert torch.all(caches[name][block] == number)


@pytest.mark.parametrize("layout", BLOCK_COMPACT, ids=lambda layout: layout.name)
def test_layers_with_pages_of_different_sizes_stay_apart(layout: KVCacheLayout) -> None:
    grown = with_extra_blocks(kv_cache_config(mixed_pages(), layout), EXTRA)
    caches = allocate_kv_cache(grown, torch.device("cpu"), layout)
    numbers = fill(caches, dict.fromkeys("abc", range(11)))
    for (name, block), number in numbers.items():
        assert torch.all(caches[name][block] == number)


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_groups_with_block_ids_of_their_own_stay_apart(layout: KVCacheLayout) -> None:
    grown = with_extra_blocks(kv_cache_config(two_groups(), layout), EXTRA)
    caches = allocate_kv_cache(grown, torch.device("cpu"), layout)
    first, second = [0, 2, 4, 6, 8], [1, 3, 5, 7, 9, 10]
    numbers = fill(caches, {"a": first, "b": first, "c": second, "d": second})
    for (name, block), number in numbers.items():
        assert torch.all(caches[name][block] == number)


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_extra_blocks_cost_as_much_memory_each_as_the_old_ones(layout: KVCacheLayout) -> None:
    config = kv_cache_config(two_groups(), layout)
    grown = with_extra_blocks(config, EXTRA)
    assert grown.num_blocks == OLD + EXTRA
    assert [tensor.size for tensor in grown.kv_cache_tensors] == [
        tensor.size // OLD * (OLD + EXTRA) for tensor in config.kv_cache_tensors
    ]


def test_configuration_that_the_scheduler_knows_is_left_as_it_is() -> None:
    config = kv_cache_config(one_group(), KVCacheLayout.LBHNC)
    before = replace(config, kv_cache_tensors=[replace(t) for t in config.kv_cache_tensors])
    with_extra_blocks(config, EXTRA)
    assert config == before


def test_no_extra_blocks_change_nothing() -> None:
    config = kv_cache_config(one_group(), KVCacheLayout.LBHNC)
    assert with_extra_blocks(config, 0) == config


def test_region_that_is_not_made_of_equal_blocks_is_refused() -> None:
    config = kv_cache_config(one_group(), KVCacheLayout.LBHNC)
    [tensor] = config.kv_cache_tensors
    odd = replace(config, kv_cache_tensors=[replace(tensor, size=tensor.size + 1)])
    with pytest.raises(ValueError, match=f"{tensor.size + 1} bytes is not made of 6 equal blocks"):
        with_extra_blocks(odd, EXTRA)


# How many


def test_size_is_enough_for_the_largest_trees_at_a_blocks_edge() -> None:
    config = LookaheadConfig(window_size=2, ngram_size=4, verification_set_size=3)
    size = ScratchSize.of(config, [attention(2, 2), attention(1, 4)], max_num_seqs=10)
    # 1 + 2 + 3 branches less the primary; 3 tokens deep from the last position of a 2-token
    # block: positions 1 to 4, blocks 0 to 2. Pages of 2*2*24 and 1*4*24 bytes.
    assert size == ScratchSize(wanted=5 * 3 * 10, required=5 * 3, block_bytes=96 + 96)


SIZE = ScratchSize(wanted=40, required=10, block_bytes=1000)


@pytest.mark.parametrize(
    ("available", "reserved"),
    [
        (20_000, 10_000),  # exactly half for what is required
        (90_000, 10_000),  # required, though more than the fraction
        (200_000, 20_000),  # the fraction
        (900_000, 40_000),  # no more than wanted
    ],
)
def test_a_tenth_of_the_memory_is_reserved_within_required_and_wanted(
    available: int, reserved: int
) -> None:
    assert SIZE.reserve(available, 0.1) == reserved


def test_memory_of_which_one_tree_takes_over_half_is_refused_with_the_flags_to_change() -> None:
    size = ScratchSize(wanted=40, required=10, block_bytes=1 << 20)
    with pytest.raises(ValueError, match="10 MiB of scratch KV cache") as error:
        size.reserve((20 << 20) - 1, 0.1)
    message = str(error.value)
    assert "more than half of the 20 MiB available" in message
    flags = "--kv-cache-memory-bytes VLLM_CPU_KVCACHE_SPACE --block-size --speculative-config"
    assert all(flag in message for flag in flags.split())


@pytest.mark.parametrize(
    ("num_blocks", "num_groups", "expected"),
    [
        (90, 1, 10),  # a tenth of 100
        (180, 1, 20),
        (180, 2, 10),
        (9, 1, 10),  # required
        (9000, 1, 40),  # wanted
    ],
)
def test_scratch_blocks_are_the_fraction_of_all_blocks_within_required_and_wanted(
    num_blocks: int, num_groups: int, expected: int
) -> None:
    assert SIZE.num_blocks(num_blocks, num_groups, 0.1) == expected


@given(
    st.builds(
        lambda required, seqs, pages: ScratchSize(required * seqs, required, pages * 4096),
        st.integers(1, 200),
        st.integers(1, 256),
        st.integers(1, 64),
    ),
    st.integers(1, 1 << 16),
    st.integers(1, 4),
    st.sampled_from([0.01, 0.1, 0.25, 0.5]),
)
def test_scheduler_and_scratch_blocks_together_fit_the_memory(
    size: ScratchSize, mebibytes: int, num_groups: int, fraction: float
) -> None:
    available = mebibytes << 20
    if 2 * size.required * size.block_bytes > available:
        return
    # Groups of as many layers each overlay each other, so a block takes a group's share of bytes.
    block_bytes = size.block_bytes // num_groups
    num_blocks = (available - size.reserve(available, fraction)) // block_bytes
    scratch = num_groups * size.num_blocks(num_blocks, num_groups, fraction)
    assert (num_blocks + scratch) * block_bytes <= available


# Copying


def test_blocks_are_copied_in_every_layer() -> None:
    caches = [torch.arange(12.0).reshape(4, 3), 100 + torch.arange(8.0).reshape(4, 2, 1)]
    CacheBlocks(caches).copy([(0, 2), (0, 3)])
    assert caches[0].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [0, 1, 2]]
    assert caches[1].flatten().tolist() == [100, 101, 102, 103, 100, 101, 100, 101]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 1, 2, 1]])
@pytest.mark.parametrize("blocks_first", [False, True])
def test_blocks_of_layers_in_one_memory_are_copied_in_any_order_of_the_layers(
    order: list[int], blocks_first: bool
) -> None:
    # Three layers with four blocks of two; a layer may share another one's cache.
    memory = torch.arange(24)
    layers = memory.view(4, 3, 2).transpose(0, 1) if blocks_first else memory.view(3, 4, 2)
    expected = layers.clone()
    expected[:, 2] = expected[:, 0]
    expected[:, 3] = expected[:, 1]
    CacheBlocks([layers[layer] for layer in order]).copy([(0, 2), (1, 3)])
    assert layers.tolist() == expected.tolist()


def test_blocks_of_layers_that_lie_unevenly_in_one_memory_are_copied() -> None:
    memory = torch.arange(14)
    layers = [memory[start : start + 4].view(2, 2) for start in (0, 4, 10)]
    CacheBlocks(layers).copy([(0, 1)])
    assert [layer.flatten().tolist() for layer in layers] == [
        [0, 1, 0, 1],
        [4, 5, 4, 5],
        [10, 11, 10, 11],
    ]
    assert memory[8:10].tolist() == [8, 9]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_blocks_of_a_strided_cache_are_copied_in_place(num_layers: int) -> None:
    memory = torch.arange(24).reshape(2, 2, 3, 2)
    # A block is not contiguous: keys and values lie apart.
    layers = [memory[layer].transpose(0, 1) for layer in range(num_layers)]
    CacheBlocks(layers).copy([(0, 2)])
    assert memory[0].tolist() == [[[0, 1], [2, 3], [0, 1]], [[6, 7], [8, 9], [6, 7]]]
    second = [[[12, 13], [14, 15], [12, 13]], [[18, 19], [20, 21], [18, 19]]]
    untouched = [[[12, 13], [14, 15], [16, 17]], [[18, 19], [20, 21], [22, 23]]]
    assert memory[1].tolist() == (second if num_layers == 2 else untouched)


def test_no_copies_change_nothing() -> None:
    cache = torch.tensor([[1], [2]])
    CacheBlocks([cache]).copy([])
    assert cache.tolist() == [[1], [2]]
