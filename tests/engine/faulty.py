"""Candidate sources that fail."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_lookahead.config import LookaheadConfig


class RaisingSource:
    """Raises in the middle of texts that begin with token 13."""

    def __init__(self, config: LookaheadConfig) -> None:
        pass

    def propose(self, context: Sequence[int], length: int, limit: int) -> list[list[int]]:
        if context[0] == 13 and len(context) > 20:
            raise RuntimeError("unlucky")
        return []


class OutOfVocabularySource(RaisingSource):
    """Proposes a token that there isn't, for the same texts."""

    def propose(self, context: Sequence[int], length: int, limit: int) -> list[list[int]]:
        return [[1_000_000]] if context[0] == 13 and len(context) > 20 else []
