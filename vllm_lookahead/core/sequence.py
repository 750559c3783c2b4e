"""State of one sequence between steps: its text, n-gram pool and lookahead window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_lookahead.config import BUILTIN_SOURCES, LookaheadConfig
from vllm_lookahead.core.pool import NgramPool
from vllm_lookahead.core.sources import make_custom_sources
from vllm_lookahead.core.tree import IntArray, TokenTree, build_tree
from vllm_lookahead.core.verify import Walk
from vllm_lookahead.core.window import LookaheadWindow


class SequenceState:
    """One sequence: `propose` a draft, `plan` the tree around what was granted, `commit`.

    The last token of the text is the root: sampled, but without a KV entry yet.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        tokens: Sequence[int],
        prompt_size: int,
        vocab_size: int | None = None,
    ) -> None:
        """
        Args:
            config: the engine's lookahead parameters.
            tokens: prompt and output token ids, root last; at least one.
            prompt_size: how many of them are prompt.
            vocab_size: when given, tokens of custom sources are checked against it, and those
                of the text that lie outside of it (placeholders of images) are never proposed.
        """
        if not tokens:
            raise ValueError("a sequence has at least one token")
        self._config = config
        self._vocab_size = vocab_size
        self._tokens = list(tokens)
        self._custom_sources = make_custom_sources(config)
        self._candidates: list[tuple[int, ...]] = []
        self._pool = NgramPool(
            config.ngram_size - 1, max(1, config.verification_set_size), config.pool_capacity
        )
        self._insert_text(0, prompt_size, "prompt")
        self._insert_text(prompt_size, len(self._tokens), "output")
        self._window = self._new_window() if config.window_size else None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, the root included."""
        return len(self._tokens)

    @property
    def root(self) -> int:
        """The current token."""
        return self._tokens[-1]

    @property
    def pool_size(self) -> int:
        """N-grams in the pool."""
        return len(self._pool)

    @property
    def candidates(self) -> list[list[int]]:
        """The candidates behind the last draft, best first."""
        return [list(chain) for chain in self._candidates]

    def propose(self) -> list[int]:
        """Draft tokens to ask the scheduler for, at most `LookaheadConfig.num_draft_tokens`.

        This is the primary candidate: the longest of the candidates and, among equals, the
        first. Without a candidate it is a path of the window, so that KV slots are granted for
        what the window may turn out to have right.

        Raises:
            ValueError: a custom source proposed a token that isn't one, or whatever it raises.
        """
        length = self._config.num_draft_tokens
        self._candidates = self._gather(length)
        if self._candidates:
            longest = max(len(chain) for chain in self._candidates)
            return list(next(chain for chain in self._candidates if len(chain) == longest))
        if self._window is not None and self._config.verify_window:
            return self._window.deepest_path()[:length]
        return []

    def plan(
        self, granted: Sequence[int], *, max_nodes: int, max_depth: int, max_branches: int
    ) -> TokenTree:
        """The tree for the coming step around the draft tokens that the scheduler granted.

        Arguments as in `build_tree`. Without changing the state, so a step may be planned anew.
        """
        return build_tree(
            self.root,
            granted,
            self._candidates,
            self._window.rows if self._window is not None else (),
            max_nodes=max_nodes,
            max_depth=max_depth,
            max_branches=max_branches,
            verify_window=self._config.verify_window,
        )

    def commit(self, walk: Walk, new_row: IntArray) -> None:
        """Take the step's outcome: emitted tokens and the window's new row.

        Args:
            walk: the finished walk down the planned tree.
            new_row: [W] argmax at the tree's ``window_leaves``; [0] if the window wasn't fed.
        """
        if self._window is not None and len(new_row):
            ngrams = self._window.advance(self.root, new_row.tolist(), walk.accepted)
            if "window" in self._config.sources and self._config.uses_pool:
                for key, value in ngrams:
                    self._pool.insert(key, value)
        first = len(self._tokens)
        self._tokens.extend(walk.tokens)
        self._insert_text(first, len(self._tokens), "output")

    def _insert_text(self, first: int, last: int, source: str) -> None:
        if self._config.uses_pool and source in self._config.sources:
            self._pool.insert_text(self._tokens, first, last, self._vocab_size)

    def _gather(self, length: int) -> list[tuple[int, ...]]:
        limit = self._config.verification_set_size
        found: dict[tuple[int, ...], None] = {}
        pool_asked = False
        for name in self._config.sources:
            if name not in BUILTIN_SOURCES:
                proposed = self._custom_sources[name].propose(self._tokens, length, limit)
                chains = [tuple(chain[:length]) for chain in proposed if len(chain)]
                self._check_tokens(name, chains)
                found.update(dict.fromkeys(chains))
            elif not pool_asked:
                pool_asked = True
                found.update(dict.fromkeys(self._pool.lookup(self.root, limit)))
        return list(found)[:limit]

    def _check_tokens(self, name: str, chains: Sequence[tuple[int, ...]]) -> None:
        for token in (token for chain in chains for token in chain):
            if token < 0 or (self._vocab_size is not None and token >= self._vocab_size):
                raise ValueError(
                    f"source {name} proposed token {token}, outside of a vocabulary of "
                    f"{self._vocab_size}"
                )

    def _new_window(self) -> LookaheadWindow:
        width = self._config.window_size
        # Guesses drawn from the text are likelier to come true than any others (reference
        # implementation, `set_token`). Seeded, so that ranks and reruns agree.
        rng = np.random.default_rng([self._config.seed, len(self._tokens)])
        tokens = np.asarray(self._tokens)
        if self._vocab_size is not None:
            tokens = tokens[tokens < self._vocab_size]
        guesses = rng.choice(tokens, size=width - 1).tolist()
        return LookaheadWindow(width, self._config.ngram_size, guesses, self._config.is_jacobi)
