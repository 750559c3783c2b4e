"""Branches: a token tree as pseudo-sequences of an ordinary causal paged-attention batch.

Every branch of a tree (see `TokenTree.branch_starts`) becomes a sequence of the attention batch.
Its queries are the nodes that no branch before it holds, which are its last ones, so the causal
rule "a query sees everything up to its own index" is exactly "a node sees its ancestors".
Branch 0, the primary candidate, lives in the request's own blocks. The others share the
request's full blocks and continue in private scratch blocks, into which the keys and values of
the whole path, shared nodes included, are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_lookahead.core.tree import IntArray, TokenTree

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlacedTree:
    """A token tree with its place in the step's batch."""

    tree: TokenTree
    root_position: int
    """Index of the root in its sequence: that many tokens are cached."""
    scratch: tuple[int, ...]
    """First scratch block of each branch after branch 0; the branch takes the run of
    `blocks_touched` from there."""

    @property
    def positions(self) -> LongArray:
        """[tree.size] position of each node: the root's, plus its depth."""
        return self.tree.depths.astype(np.int64) + self.root_position


@dataclass(frozen=True, slots=True)
class BranchBatch:
    """The attention batch of one step for one KV cache group.

    Shapes: ``S`` pseudo-sequences, ``M`` keys to write, ``B`` columns of a block table row.
    """

    query_start_loc: IntArray
    """[S + 1] offsets of each pseudo-sequence's queries; queries keep the model's order."""
    seq_lens: IntArray
    """[S] length of each pseudo-sequence, queries included."""
    block_table: IntArray
    """[S, B] block ids."""
    key_rows: LongArray
    """[M] row of the model's key and value tensors to write ..."""
    key_slots: LongArray
    """[M] ... into this slot of the KV cache."""
    copies: Sequence[tuple[int, int]]
    """(source, destination) blocks to copy before the step: the request's partly filled last
    block, once per scratch branch."""


def blocks_touched(first: int, depth: int, block_size: int) -> int:
    """Number of blocks that hold positions ``first`` to ``first + depth``."""
    return (first + depth) // block_size - first // block_size + 1


def expand(
    num_tokens: Sequence[int],
    num_cached: Sequence[int],
    trees: Sequence[PlacedTree | None],
    block_table: IntArray,
    block_size: int,
    scratch_base: int,
) -> BranchBatch:
    """Lay out a batch of requests, some with trees, as pseudo-sequences.

    Args:
        num_tokens: [num_reqs] tokens that each request feeds, tree nodes included.
        num_cached: [num_reqs] tokens of each request that the KV cache holds.
        trees: [num_reqs] the request's tree, None for one that feeds plain consecutive tokens.
        block_table: [num_reqs, B] block ids of the requests.
        block_size: tokens per block.
        scratch_base: block id of the group's first scratch block.
    """
    layout = _Layout(block_size)
    copies: list[tuple[int, int]] = []
    first_row = 0
    for count, cached, placed, table in zip(
        num_tokens, num_cached, trees, block_table, strict=True
    ):
        primary = count if placed is None else 1 + placed.tree.primary_size
        layout.add(table, cached, range(first_row, first_row + primary), num_queries=primary)
        if placed is not None:
            copies += _add_branches(layout, placed, first_row, table, scratch_base)
        first_row += count
    return layout.finish(copies)


class _Layout:
    """Pseudo-sequences, one after the other."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._query_lens: list[int] = []
        self._seq_lens: list[int] = []
        self._tables: list[IntArray] = []
        self._rows: list[LongArray] = []
        self._slots: list[LongArray] = []

    def add(self, table: IntArray, first: int, rows: Sequence[int], num_queries: int) -> None:
        """Add one that writes ``rows`` from position ``first`` on and queries the last ones."""
        end = first + len(rows)
        positions = np.arange(first, end, dtype=np.int64)
        blocks = table[positions // self.block_size].astype(np.int64)
        self._query_lens.append(num_queries)
        self._seq_lens.append(end)
        self._tables.append(table)
        self._rows.append(np.array(rows, dtype=np.int64))
        self._slots.append(blocks * self.block_size + positions % self.block_size)

    def finish(self, copies: list[tuple[int, int]]) -> BranchBatch:
        query_start_loc = np.zeros(len(self._query_lens) + 1, dtype=np.int32)
        np.cumsum(self._query_lens, out=query_start_loc[1:])
        return BranchBatch(
            query_start_loc=query_start_loc,
            seq_lens=np.array(self._seq_lens, dtype=np.int32),
            block_table=np.stack(self._tables),
            key_rows=np.concatenate(self._rows),
            key_slots=np.concatenate(self._slots),
            copies=copies,
        )


def _add_branches(
    layout: _Layout, placed: PlacedTree, first_row: int, table: IntArray, scratch_base: int
) -> list[tuple[int, int]]:
    """Add all branches but the first; returns the block copies that they need."""
    tree, root, block_size = placed.tree, placed.root_position, layout.block_size
    tail = root // block_size
    starts = tree.branch_starts().tolist()
    ends = [*starts[1:], tree.size]
    copies = []
    for run, start, end in zip(placed.scratch, starts[1:], ends[1:], strict=True):
        path = [*tree.ancestry(int(tree.parents[start])), *range(start, end)]
        first_block = scratch_base + run
        num_blocks = blocks_touched(root, len(path) - 1, block_size)
        branch_table = table.copy()
        branch_table[tail : tail + num_blocks] = np.arange(first_block, first_block + num_blocks)
        layout.add(branch_table, root, [first_row + node for node in path], end - start)
        if root % block_size:
            copies.append((int(table[tail]), first_block))
    return copies


def copies_back(
    placed: PlacedTree,
    last_node: int,
    table: IntArray,
    block_size: int,
    scratch_base: int,
) -> list[tuple[int, int]]:
    """(source, destination) blocks that bring accepted keys home, [] when they are home.

    Args:
        placed: the request's tree.
        last_node: the last accepted node.
        table: [B] the request's block ids.
        block_size: tokens per block.
        scratch_base: block id of the group's first scratch block.
    """
    tree = placed.tree
    if last_node <= tree.primary_size:
        return []
    branch = int(np.searchsorted(tree.branch_starts(), last_node, side="right")) - 1
    first_block = scratch_base + placed.scratch[branch - 1]
    tail = placed.root_position // block_size
    num_blocks = blocks_touched(placed.root_position, int(tree.depths[last_node]), block_size)
    return [(first_block + i, int(table[tail + i])) for i in range(num_blocks)]
