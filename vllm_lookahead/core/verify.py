"""Verification: a pure function of (tree, sampled tokens)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_lookahead.core.tree import TokenTree


@dataclass(slots=True)
class Walk:
    """Progress of one sequence's text down its token tree.

    The rule: the token sampled at a node is emitted; when the node has an acceptable child with
    that token, the walk moves there and samples again, else it ends. So ``len(tokens)`` is one
    more than the number of accepted draft tokens: the last one is the bonus token.
    """

    tree: TokenTree
    tokens: list[int] = field(default_factory=list)
    """Tokens emitted."""
    nodes: list[int] = field(default_factory=lambda: [0])
    """Nodes that hold the same text as the current one, in tree order. Several only where the
    tree wasn't merged; any of them may be sampled at."""
    finished: bool = False

    @property
    def node(self) -> int:
        """Node to sample at next or, once finished, the last accepted one."""
        return self.nodes[0]

    @property
    def accepted(self) -> int:
        """Draft tokens accepted."""
        return len(self.tokens) - self.finished

    def emit(self, token: int) -> None:
        """Take the token that was sampled at `node`.

        Raises:
            RuntimeError: the walk is finished.
        """
        if self.finished:
            raise RuntimeError("the walk is finished")
        self.tokens.append(token)
        tree = self.tree
        nodes = [
            child
            for node in self.nodes
            for child in tree.successors.get((node, token), ())
            if tree.acceptable[child]
        ]
        if nodes:
            self.nodes = nodes
        else:
            self.finished = True


def walk_tree(tree: TokenTree, next_token: Callable[[int], int]) -> Walk:
    """Walk ``tree`` to the end; ``next_token(node)`` is the token sampled at a node."""
    walk = Walk(tree)
    while not walk.finished:
        walk.emit(next_token(walk.node))
    return walk
