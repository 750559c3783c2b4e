"""Branches: what paged causal attention sees, computed slot by slot on a labelled cache.

A label stands for a key: ("cached", request, position) for text that was there before the step,
("fed", request, index) for the step's own tokens. So a query must see the labels of the cached
text, of its ancestors and of itself, in the order of their positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trees import lineage, tree_inputs
from vllm_lookahead.attention.branches import (
    BranchBatch,
    PlacedTree,
    blocks_touched,
    copies_back,
    expand,
)
from vllm_lookahead.core.tree import TokenTree, build_tree

Label = tuple[str, int, int]


@dataclass(frozen=True)
class Request:
    """A request of the step: ``tree`` is None for a chunk of consecutive tokens."""

    cached: int
    count: int
    tree: PlacedTree | None

    def visible(self, request: int, index: int) -> list[Label]:
        """Labels that the query of the request's token ``index`` must see."""
        fed = list(range(index + 1)) if self.tree is None else lineage(self.tree.tree, index)
        return [
            *(("cached", request, position) for position in range(self.cached)),
            *(("fed", request, each) for each in fed),
        ]


@dataclass(frozen=True)
class Batch:
    """A step, and the block tables as the scheduler made them."""

    requests: list[Request]
    tables: np.ndarray
    block_size: int
    scratch_base: int
    num_blocks: int

    def expand(self) -> BranchBatch:
        return expand(
            [request.count for request in self.requests],
            [request.cached for request in self.requests],
            [request.tree for request in self.requests],
            self.tables,
            self.block_size,
            self.scratch_base,
        )

    def slot(self, table: np.ndarray, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return int(table[block]) * self.block_size + offset

    def cache_before(self) -> list[Label | None]:
        """The cache with all text of earlier steps."""
        cache: list[Label | None] = [None] * (self.num_blocks * self.block_size)
        for index, request in enumerate(self.requests):
            for position in range(request.cached):
                slot = self.slot(self.tables[index], position)
                assert cache[slot] is None
                cache[slot] = ("cached", index, position)
        return cache

    def labels(self) -> list[Label]:
        """Labels of the rows that the model computes."""
        return [
            ("fed", index, token)
            for index, request in enumerate(self.requests)
            for token in range(request.count)
        ]

    def copied(
        self, cache: list[Label | None], copies: list[tuple[int, int]]
    ) -> list[Label | None]:
        """The cache after block copies, all read before any is written."""
        after, size = list(cache), self.block_size
        for source, destination in copies:
            after[destination * size : (destination + 1) * size] = cache[
                source * size : (source + 1) * size
            ]
        return after

    def cache_after(self, branches: BranchBatch) -> list[Label | None]:
        """The cache as the step's attention finds it."""
        cache = self.copied(self.cache_before(), list(branches.copies))
        labels = self.labels()
        for row, slot in zip(branches.key_rows.tolist(), branches.key_slots.tolist(), strict=True):
            cache[slot] = labels[row]
        return cache


def blocks_of(first: int, last: int, block_size: int) -> set[int]:
    return {position // block_size for position in range(first, last + 1)}


def place(tree: TokenTree, root: int, block_size: int, first_block: int) -> PlacedTree:
    """Scratch runs one behind the other, each just long enough."""
    starts = tree.branch_starts().tolist()
    ends = [*starts[1:], tree.size]
    runs = []
    for end in ends[1:]:
        runs.append(first_block)
        depth = len(lineage(tree, end - 1)) - 1
        first_block += len(blocks_of(root, root + depth, block_size))
    return PlacedTree(tree, root, tuple(runs))


def scratch_needed(placed: PlacedTree, block_size: int) -> int:
    """Scratch blocks up to the end of the tree's last run."""
    if not placed.scratch:
        return 0
    root = placed.root_position
    depth = len(lineage(placed.tree, placed.tree.size - 1)) - 1
    return placed.scratch[-1] + len(blocks_of(root, root + depth, block_size))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    block_size = draw(st.integers(2, 8))
    requests: list[Request] = []
    next_scratch = 0
    for _ in range(draw(st.integers(1, 4))):
        cached = draw(st.integers(0, 20))
        if draw(st.booleans()):
            tree = draw(tree_inputs(limited=True)).build(draw(st.booleans()))
            placed = place(tree, cached, block_size, next_scratch)
            next_scratch = max(next_scratch, scratch_needed(placed, block_size))
            requests.append(Request(cached, tree.size, placed))
        else:
            requests.append(Request(cached, draw(st.integers(1, 9)), None))

    # The scheduler's blocks: for text, chunk and primary candidate only, scattered.
    columns = max(
        max(
            len(blocks_of(0, request.cached + request.count, block_size)),
            len(blocks_of(0, request.cached + int(request.tree.tree.depths.max()), block_size))
            if request.tree
            else 0,
        )
        for request in requests
    )
    own = [
        len(
            blocks_of(
                0,
                request.cached
                + (request.tree.tree.primary_size if request.tree else request.count - 1),
                block_size,
            )
        )
        for request in requests
    ]
    scratch_base = 1 + sum(own) + draw(st.integers(0, 3))
    ids = draw(st.permutations(range(1, scratch_base)))
    tables = np.zeros((len(requests), columns), dtype=np.int32)
    for table, count in zip(tables, own, strict=True):
        table[:count], ids = ids[:count], ids[count:]
    return Batch(requests, tables, block_size, scratch_base, scratch_base + next_scratch)


# By hand


def example(primary: list[int], candidates: list[list[int]], root: int, run: int) -> PlacedTree:
    tree = build_tree(0, primary, candidates, max_nodes=99, max_depth=99, max_branches=99)
    return PlacedTree(tree, root, (run,))


def test_branch_continues_in_a_copy_of_the_partial_last_block() -> None:
    # Blocks of 4; 5 tokens cached in blocks 7 and 9. The root stands at 5, in block 9.
    placed = example([1, 2], [[3, 4]], root=5, run=0)
    batch = expand([5], [5], [placed], np.array([[7, 9, 0]], dtype=np.int32), 4, 20)
    assert batch.query_start_loc.tolist() == [0, 3, 5]
    assert batch.seq_lens.tolist() == [8, 8]
    assert batch.block_table.tolist() == [[7, 9, 0], [7, 20, 0]]
    # Branch 1 holds the root's key, too, behind the one copied cached token.
    assert batch.key_rows.tolist() == [0, 1, 2, 0, 3, 4]
    assert batch.key_slots.tolist() == [37, 38, 39, 81, 82, 83]
    assert batch.copies == [(9, 20)]
    assert copies_back(placed, 4, np.array([7, 9, 0]), 4, 20) == [(20, 9)]


def test_branch_from_a_block_edge_copies_nothing_before_the_step() -> None:
    placed = example([1], [[2]], root=4, run=3)
    batch = expand([3], [4], [placed], np.array([[7, 9]], dtype=np.int32), 4, 20)
    assert batch.block_table.tolist() == [[7, 9], [7, 23]]
    assert batch.copies == []
    assert batch.key_slots.tolist() == [36, 37, 92, 93]


def test_branch_across_a_block_edge_comes_home_with_all_its_blocks() -> None:
    placed = example([1, 2, 3], [[4, 5, 6]], root=6, run=2)
    table = np.array([[7, 9, 5]], dtype=np.int32)
    batch = expand([7], [6], [placed], table, 4, 20)
    assert batch.block_table.tolist() == [[7, 9, 5], [7, 22, 23]]
    assert batch.copies == [(9, 22)]
    # Nodes 4, 5, 6 stand at 7, 8, 9: the first in the partial block, the others in the next.
    assert copies_back(placed, 4, table[0], 4, 20) == [(22, 9)]
    assert copies_back(placed, 5, table[0], 4, 20) == [(22, 9), (23, 5)]


@pytest.mark.parametrize("node", [0, 1, 2])
def test_keys_of_the_primary_are_home_already(node: int) -> None:
    placed = example([1, 2], [[3, 4]], root=5, run=0)
    assert copies_back(placed, node, np.array([7, 9, 0]), 4, 20) == []


def test_batch_without_trees_is_left_as_it_is() -> None:
    table = np.array([[3, 4], [5, 6]], dtype=np.int32)
    batch = expand([3, 1], [2, 5], [None, None], table, 4, 20)
    assert batch.query_start_loc.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [5, 6]
    assert batch.block_table.tolist() == table.tolist()
    assert batch.key_rows.tolist() == [0, 1, 2, 3]
    assert batch.key_slots.tolist() == [14, 15, 16, 25]
    assert batch.copies == []


@given(st.integers(0, 40), st.integers(0, 20), st.integers(1, 9))
def test_blocks_touched_counts_the_blocks_of_all_positions(
    first: int, depth: int, block_size: int
) -> None:
    blocks = blocks_of(first, first + depth, block_size)
    assert blocks_touched(first, depth, block_size) == len(blocks)


# Any batch


@given(batches())
@settings(max_examples=150)
def test_every_query_sees_cached_text_ancestors_and_itself_in_order(batch: Batch) -> None:
    branches = batch.expand()
    cache = batch.cache_after(branches)
    seen = []
    starts = branches.query_start_loc.tolist()
    for sequence, (start, end) in enumerate(pairwise(starts)):
        length = int(branches.seq_lens[sequence])
        table = branches.block_table[sequence]
        for index in range(length - (end - start), length):
            seen.append([cache[batch.slot(table, each)] for each in range(index + 1)])
    expected = [
        request.visible(number, token)
        for number, request in enumerate(batch.requests)
        for token in range(request.count)
    ]
    assert seen == expected


@given(batches())
def test_no_slot_is_written_twice(batch: Batch) -> None:
    slots = batch.expand().key_slots.tolist()
    assert len(set(slots)) == len(slots)


@given(batches())
def test_only_primaries_and_chunks_are_written_to_the_schedulers_blocks(batch: Batch) -> None:
    branches = batch.expand()
    labels = batch.labels()
    home = {
        labels[row]
        for row, slot in zip(branches.key_rows.tolist(), branches.key_slots.tolist(), strict=True)
        if slot < batch.scratch_base * batch.block_size
    }
    assert home == {
        ("fed", number, token)
        for number, request in enumerate(batch.requests)
        for token in range(1 + request.tree.tree.primary_size if request.tree else request.count)
    }
    assert all(block >= batch.scratch_base for _, block in branches.copies)


@given(batches())
def test_no_block_is_copied_from_and_to(batch: Batch) -> None:
    copies = batch.expand().copies
    assert not {source for source, _ in copies} & {destination for _, destination in copies}


@given(batches(), st.data())
@settings(max_examples=150)
def test_accepted_keys_are_in_the_requests_own_blocks_after_the_step(
    batch: Batch, data: st.DataObject
) -> None:
    cache = batch.cache_after(batch.expand())
    winners = []
    copies: list[tuple[int, int]] = []
    for table, request in zip(batch.tables, batch.requests, strict=True):
        winner = request.count - 1
        if request.tree is not None:
            acceptable = np.flatnonzero(request.tree.tree.acceptable).tolist()
            winner = data.draw(st.sampled_from(acceptable))
            copies += copies_back(request.tree, winner, table, batch.block_size, batch.scratch_base)
        winners.append(winner)
    # No block is both source and destination.
    assert all(destination < batch.scratch_base <= source for source, destination in copies)
    cache = batch.copied(cache, copies)
    for number, request in enumerate(batch.requests):
        expected = request.visible(number, winners[number])
        table = batch.tables[number]
        assert [cache[batch.slot(table, each)] for each in range(len(expected))] == expected
