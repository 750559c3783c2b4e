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
    copies: LongArray
    """[C, 2] (source, destination) blocks to copy before the step: the request's partly filled
    last block, once per scratch branch."""


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
    query_lens: list[int] = []
    seq_lens: list[int] = []
    tables: list[IntArray] = []
    rows: list[LongArray] = []
    slots: list[LongArray] = []
    copies: list[tuple[int, int]] = []

    first_row = 0
    for count, cached, placed, table in zip(
        num_tokens, num_cached, trees, block_table, strict=True
    ):
        primary = count if placed is None else 1 + placed.tree.primary_size
        positions = np.arange(cached, cached + primary, dtype=np.int64)
        query_lens.append(primary)
        seq_lens.append(cached + primary)
        tables.append(table)
        rows.append(np.arange(first_row, first_row + primary, dtype=np.int64))
        slots.append(_slots(table, positions, block_size))
        if placed is not None:
            _add_branches(
                placed, first_row, table, block_size, scratch_base,
                query_lens, seq_lens, tables, rows, slots, copies,
            )  # fmt: skip
        first_row += count

    query_start_loc = np.zeros(len(query_lens) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start_loc[1:])
    return BranchBatch(
        query_start_loc=query_start_loc,
        seq_lens=np.array(seq_lens, dtype=np.int32),
        block_table=np.stack(tables),
        key_rows=np.concatenate(rows),
        key_slots=np.concatenate(slots),
        copies=np.array(copies, dtype=np.int64).reshape(-1, 2),
    )


def _slots(table: IntArray, positions: LongArray, block_size: int) -> LongArray:
    blocks = table[positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


def _add_branches(
    placed: PlacedTree,
    first_row: int,
    table: IntArray,
    block_size: int,
    scratch_base: int,
    query_lens: list[int],
    seq_lens: list[int],
    tables: list[IntArray],
    rows: list[LongArray],
    slots: list[LongArray],
    copies: list[tuple[int, int]],
) -> None:
    tree = placed.tree
    starts = tree.branch_starts()
    ends = [*starts[1:].tolist(), tree.size]
    root = placed.root_position
    tail = root // block_size
    for run, start, end in zip(placed.scratch, starts[1:].tolist(), ends[1:], strict=True):
        path = [*tree.ancestry(int(tree.parents[start])), *range(start, end)]
        first_block = scratch_base + run
        num_blocks = blocks_touched(root, len(path) - 1, block_size)
        branch_table = table.copy()
        branch_table[tail : tail + num_blocks] = np.arange(first_block, first_block + num_blocks)
        positions = np.arange(root, root + len(path), dtype=np.int64)
        query_lens.append(end - start)
        seq_lens.append(root + len(path))
        tables.append(branch_table)
        rows.append(first_row + np.array(path, dtype=np.int64))
        slots.append(_slots(branch_table, positions, block_size))
        if root % block_size:
            copies.append((int(table[tail]), first_block))


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
