"""The KV cache with scratch blocks: laying trees out, filling blocks, bringing keys home."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from vllm_lookahead.attention.branches import BranchBatch, PlacedTree, copies_back, expand
from vllm_lookahead.core.verify import Walk
from vllm_lookahead.engine.scratch import CacheBlocks

if TYPE_CHECKING:
    from vllm.v1.worker.block_table import BlockTable


@dataclass(frozen=True, slots=True)
class ScratchCache:
    """One entry per KV cache group in both fields."""

    bases: Sequence[int]
    """Block id of the group's first scratch block. Groups overlay the same memory, so each has
    its own ids."""
    blocks: Sequence[CacheBlocks]

    def expand(
        self,
        tables: Sequence[BlockTable],
        num_tokens: Sequence[int],
        num_cached: Sequence[int],
        trees: Sequence[PlacedTree | None],
    ) -> list[BranchBatch]:
        """The attention batch of each group.

        Args:
            tables: the groups' block tables.
            num_tokens: as in `branches.expand`.
            num_cached: as in `branches.expand`.
            trees: as in `branches.expand`.
        """
        return [
            expand(
                num_tokens,
                num_cached,
                trees,
                table.get_numpy_array()[: len(num_tokens)],
                table.block_size,
                base,
            )
            for table, base in zip(tables, self.bases, strict=True)
        ]

    def fill(self, batches: Sequence[BranchBatch]) -> None:
        """Copy the requests' partly filled blocks into their branches'."""
        for blocks, batch in zip(self.blocks, batches, strict=True):
            blocks.copy(batch.copies)

    def seconds_to_fill(self, between: Callable[[], object], rounds: int = 5) -> float:
        """Median time that one branch takes to be filled, over all groups.

        Uses scratch blocks only, so that no request's content changes.

        Args:
            between: what a step does between two fillings, so that the blocks leave the CPU's
                caches.
            rounds: fillings that are timed, after a first one.
        """
        seconds = []
        for _ in range(1 + rounds):
            between()
            begin = time.perf_counter()
            for base, blocks in zip(self.bases, self.blocks, strict=True):
                blocks.copy([(base, base + 1)])
            seconds.append(time.perf_counter() - begin)
        return median(seconds[1:])

    def keep_accepted(
        self,
        tables: Sequence[BlockTable],
        walks: Sequence[Walk],
        trees: Sequence[PlacedTree | None],
    ) -> None:
        """Copy the keys and values of accepted nodes into the requests' own blocks.

        Args:
            tables: the groups' block tables.
            walks: [num_reqs] finished.
            trees: [num_reqs] None where the request had no tree.
        """
        for table, base, blocks in zip(tables, self.bases, self.blocks, strict=True):
            rows = table.get_numpy_array()
            for index, (walk, placed) in enumerate(zip(walks, trees, strict=True)):
                if placed is not None:
                    blocks.copy(copies_back(placed, walk.node, rows[index], table.block_size, base))
