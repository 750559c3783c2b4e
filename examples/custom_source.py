"""A candidate source of your own: phrases that your texts are known to contain.

Name it in the configuration, beside or instead of the built-in sources:

    --speculative-config '{"method": "lookahead",
                           "sources": ["custom_source:PhraseSource", "window", "output"]}'

with the folder of this file on PYTHONPATH. Wrong candidates cost time and never change an output.
"""

from collections.abc import Sequence

from vllm_lookahead.config import LookaheadConfig

PHRASES: list[list[int]] = []
"""Token ids of each phrase; fill it from your tokenizer."""


class PhraseSource:
    """Continues a phrase whose first two tokens have just been written."""

    def __init__(self, config: LookaheadConfig) -> None:
        self._continuations = {tuple(p[:2]): p[2:] for p in PHRASES if len(p) > 2}

    def propose(self, context: Sequence[int], length: int, limit: int) -> Sequence[Sequence[int]]:
        continuation = self._continuations.get(tuple(context[-2:]))
        return [continuation[:length]] if continuation else []
