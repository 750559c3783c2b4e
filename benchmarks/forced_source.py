"""A candidate source whose trees have a chosen size and are never right: for timing steps."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_lookahead.config import LookaheadConfig

FIRST_TOKEN = 3
"""In most vocabularies the first ids are special tokens and bytes that texts don't have."""


class WrongChains:
    """``limit`` chains of ``length`` tokens, the last one a token shorter.

    With the root, ``limit * length`` tokens are fed: none but the root where both are 1. The
    chains part at once, so nothing of the tree is merged.
    """

    def __init__(self, config: LookaheadConfig) -> None:
        pass

    def propose(self, context: Sequence[int], length: int, limit: int) -> Sequence[Sequence[int]]:
        sizes = [length] * (limit - 1) + [length - 1]
        return [[FIRST_TOKEN + index] * size for index, size in enumerate(sizes) if size]
