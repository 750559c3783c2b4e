"""Random token trees, and what a tree means, worked out from its parents alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from vllm_lookahead.core.tree import TokenTree, build_tree

Path = tuple[int, ...]

NO_LIMITS: dict[str, Any] = {"max_nodes": 1000, "max_depth": 1000, "max_branches": 1000}
"""Keyword arguments of `build_tree` under which every tree of these tests fits."""

TOKENS = st.integers(0, 3)
"""So few that chains share prefixes most of the time."""


@dataclass(frozen=True)
class TreeInput:
    """What a tree is built from; the limits let everything in unless told otherwise."""

    root: int
    primary: list[int]
    candidates: list[list[int]]
    window_rows: list[list[int]]
    verify_window: bool
    max_nodes: int = 1000
    max_depth: int = 1000
    max_branches: int = 1000

    def build(self, merge: bool = True) -> TokenTree:
        return build_tree(
            self.root,
            self.primary,
            self.candidates,
            self.window_rows,
            max_nodes=self.max_nodes,
            max_depth=self.max_depth,
            max_branches=self.max_branches,
            verify_window=self.verify_window,
            merge=merge,
        )

    @property
    def candidate_chains(self) -> list[Path]:
        """Primary and other candidates, cut at the primary's depth."""
        return [tuple(chain[: len(self.primary)]) for chain in [self.primary, *self.candidates]]

    @property
    def window_chains(self) -> list[Path]:
        """Root paths of the window's columns: along row 0, then up."""
        if not self.window_rows:
            return []
        first, *upper = self.window_rows
        return [
            (*first[:column], *(row[column] for row in upper)) for column in range(len(first) + 1)
        ]


def chains(max_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(TOKENS, max_size=max_size)


@st.composite
def windows(draw: st.DrawFn, max_width: int = 4, max_rows: int = 4) -> list[list[int]]:
    """Rows of a window, [] for none."""
    width = draw(st.integers(0, max_width))
    if not width:
        return []
    sizes = [width - 1, *[width] * draw(st.integers(0, max_rows - 1))]
    return [draw(st.lists(TOKENS, min_size=size, max_size=size)) for size in sizes]


@st.composite
def tree_inputs(draw: st.DrawFn, limited: bool = False) -> TreeInput:
    """What a step may ask for; with ``limited``, often more than the limits let in."""
    primary = draw(chains(4))
    limits = {}
    if limited:
        limits = {
            "max_nodes": 1 + len(primary) + draw(st.integers(0, 25)),
            "max_depth": len(primary) + draw(st.integers(0, 6)),
            "max_branches": 1 + draw(st.integers(0, 9)),
        }
    return TreeInput(
        root=draw(TOKENS),
        primary=primary,
        candidates=draw(st.lists(chains(6), max_size=5)),
        window_rows=draw(windows()),
        verify_window=draw(st.booleans()),
        **limits,
    )


def lineage(tree: TokenTree, node: int) -> list[int]:
    """Nodes from the root to ``node``, both included."""
    parent = int(tree.parents[node])
    return [node] if parent < 0 else [*lineage(tree, parent), node]


def path_of(tree: TokenTree, node: int) -> Path:
    """Tokens from the root, which is left out, to ``node``."""
    return tuple(int(tree.token_ids[each]) for each in lineage(tree, node)[1:])


def prefixes(paths: Sequence[Path]) -> set[Path]:
    """All prefixes of the paths, the empty one included."""
    return {()} | {path[:size] for path in paths for size in range(1, len(path) + 1)}
