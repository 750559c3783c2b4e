"""The token tree of one step: what is fed, in which order, and who sees whom.

**The order.** A tree is flat parallel arrays in depth-first preorder, the primary candidate
first. Plan, attention and verification all rely on it: a root-to-leaf path owns a contiguous
run of nodes behind the nodes that it shares with paths before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Tokens to feed for one sequence; position = root position + depth, visibility = ancestry.

    Shapes: ``n`` nodes, node 0 is the root; ``W`` window columns (0 when the window isn't fed).
    """

    token_ids: IntArray
    """[n]"""
    parents: IntArray
    """[n], -1 for the root; a parent comes before its children."""
    depths: IntArray
    """[n]"""
    primary_size: int
    """Draft tokens of the primary candidate: nodes 1 to ``primary_size`` are its chain."""
    window_leaves: IntArray
    """[W]: the node whose output is column i of the window's new row."""
    acceptable: npt.NDArray[np.bool_]
    """[n]: whether the node may be accepted when the text arrives there."""
    successors: Mapping[tuple[int, int], Sequence[int]]
    """Children by (node, token); several only where the tree wasn't merged."""

    @property
    def size(self) -> int:
        """Number of tokens fed."""
        return len(self.token_ids)

    def accepting_primary(self, limit: int) -> TokenTree:
        """The same tree, of which only the first ``limit`` primary draft tokens may be accepted."""
        allowed = np.arange(self.size) <= min(limit, self.primary_size)
        return replace(self, acceptable=self.acceptable & allowed)

    def ancestry(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def branch_starts(self) -> IntArray:
        """[num_branches] first own node of each branch, ascending, the first is 0.

        Branch k is the pseudo-sequence ``ancestry(parent of start) + own nodes``, where its own
        nodes run to the next start. Branch 0 is the primary candidate and nothing more.
        """
        nodes = np.arange(self.size, dtype=np.int32)
        breaks = self.parents != nodes - 1
        breaks[0] = True
        if self.primary_size + 1 < self.size:
            breaks[self.primary_size + 1] = True
        return nodes[breaks]


class _Trie:
    """Nodes in insertion order, with undo; `freeze` puts them into preorder."""

    def __init__(self, root: int, merge: bool) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.acceptable = [True]
        self.children: list[dict[tuple[int, int], int]] = [{}]
        self._merge = merge

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, parent: int, token: int, acceptable: bool) -> int:
        """The child of ``parent`` with ``token``, made, with ``acceptable``, if it isn't there."""
        key = (token, 0 if self._merge else len(self))
        node = self.children[parent].get(key)
        if node is None:
            node = len(self)
            self.children[parent][key] = node
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.acceptable.append(acceptable)
            self.children.append({})
        return node

    def chain(self, node: int, tokens: Sequence[int], acceptable: bool = True) -> int:
        """Add ``tokens`` below ``node``; returns the last one's node."""
        for token in tokens:
            node = self.child(node, token, acceptable)
        return node

    def truncate(self, size: int) -> None:
        """Undo all insertions since there were ``size`` nodes."""
        while len(self.tokens) > size:
            node = len(self.tokens) - 1
            siblings = self.children[self.parents[node]]
            del siblings[next(key for key, child in siblings.items() if child == node)]
            for column in (self.tokens, self.parents, self.depths, self.acceptable, self.children):
                column.pop()

    def preorder(self) -> list[int]:
        """Nodes depth first, children in the order in which they were inserted."""
        order: list[int] = []
        stack = [0]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(reversed(self.children[node].values()))
        return order


def build_tree(
    root: int,
    primary: Sequence[int],
    candidates: Sequence[Sequence[int]] = (),
    window_rows: Sequence[Sequence[int]] = (),
    *,
    max_nodes: int,
    max_depth: int,
    max_branches: int,
    verify_window: bool = True,
    merge: bool = True,
) -> TokenTree:
    """Merge the primary candidate, other candidates and the window into one tree.

    The primary candidate is always fed whole. The others follow in order, each whole or not at
    all, cut at the depth of the primary, beyond which nothing can be accepted. The window
    comes last, whole or not at all.

    Args:
        root: the current token.
        primary: draft tokens granted by the scheduler.
        candidates: further chains from the root, best first.
        window_rows: rows of a `LookaheadWindow`, empty for no window.
        max_nodes: most nodes, root included; at least ``1 + len(primary)``.
        max_depth: most depth that a node may have.
        max_branches: most branches, the primary one included.
        verify_window: whether window nodes are acceptable.
        merge: share nodes between chains with equal prefixes. Unmerged trees accept the same
            tokens and cost more; they exist to test just that.
    """
    trie = _Trie(root, merge)
    trie.chain(0, primary)
    branches = 1
    for candidate in candidates:
        mark = len(trie)
        trie.chain(0, candidate[: len(primary)])
        if len(trie) == mark:
            continue
        if len(trie) > max_nodes or branches == max_branches:
            trie.truncate(mark)
            continue
        branches += 1

    leaves: list[int] = []
    if window_rows:
        width = len(window_rows[0]) + 1
        mark = len(trie)
        fits_depth = width - 1 + len(window_rows) - 1 <= max_depth
        if fits_depth and branches + width <= max_branches:
            leaves = _add_window(trie, window_rows, verify_window)
        if len(trie) > max_nodes:
            trie.truncate(mark)
            leaves = []
    return _freeze(trie, len(primary), leaves)


def _add_window(trie: _Trie, rows: Sequence[Sequence[int]], acceptable: bool) -> list[int]:
    columns = [0]
    for token in rows[0]:
        columns.append(trie.child(columns[-1], token, acceptable))
    return [
        trie.chain(node, [row[i] for row in rows[1:]], acceptable) for i, node in enumerate(columns)
    ]


def _freeze(trie: _Trie, primary_size: int, leaves: list[int]) -> TokenTree:
    order = trie.preorder()
    rank = [0] * len(order)
    for new, old in enumerate(order):
        rank[old] = new
    tokens = [trie.tokens[old] for old in order]
    parents = [-1, *(rank[trie.parents[old]] for old in order[1:])]
    successors: dict[tuple[int, int], list[int]] = {}
    for node in range(1, len(order)):
        successors.setdefault((parents[node], tokens[node]), []).append(node)
    depths = np.array([trie.depths[old] for old in order], dtype=np.int32)
    acceptable = np.array([trie.acceptable[old] for old in order], dtype=np.bool_)
    return TokenTree(
        token_ids=np.array(tokens, dtype=np.int32),
        parents=np.array(parents, dtype=np.int32),
        depths=depths,
        primary_size=primary_size,
        window_leaves=np.array([rank[leaf] for leaf in leaves], dtype=np.int32),
        # KV slots are allocated for the primary's length: nothing deeper can be kept.
        acceptable=acceptable & (depths <= primary_size),
        successors=successors,
    )


def linear_tree(drafts: Sequence[int], root: int = 0) -> TokenTree:
    """The tree of a root and one chain of draft tokens."""
    size = len(drafts)
    parents, depths, acceptable = _linear_columns(size)
    return TokenTree(
        token_ids=np.array([root, *drafts], dtype=np.int32),
        parents=parents,
        depths=depths,
        primary_size=size,
        window_leaves=_NO_LEAVES,
        acceptable=acceptable,
        successors={(node, token): (node + 1,) for node, token in enumerate(drafts)},
    )


_NO_LEAVES = np.empty(0, dtype=np.int32)


@cache
def _linear_columns(size: int) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
    nodes = np.arange(size + 1, dtype=np.int32)
    columns = (nodes - 1, nodes, np.ones(size + 1, dtype=np.bool_))
    for column in columns:
        column.flags.writeable = False
    return columns
