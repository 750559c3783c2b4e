"""What all sources of one sequence propose for the coming step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from vllm_lookahead.config import POOLED_SOURCES, TOKEN_SOURCES, LookaheadConfig
from vllm_lookahead.core.acceptance import (
    LONG_MATCH,
    SUFFIX,
    Classified,
    classify,
    classify_model,
    classify_shared,
    confirm,
    custom_class,
    kind_of_match,
    pool_class,
)
from vllm_lookahead.core.candidates import CandidateTree, Chain
from vllm_lookahead.core.followers import FollowerTable
from vllm_lookahead.core.pool import NgramPool
from vllm_lookahead.core.sources import CandidateSource, make_custom_sources
from vllm_lookahead.core.suffix import SuffixIndex

FindShared = Callable[[], SuffixIndex | None]
"""Other requests' texts, None while there are none."""
Ask = Callable[[CandidateTree, Sequence[int]], None]
"""Adds a source's candidates for what follows the text."""


class Proposals:
    """The sources of one sequence: its own text, n-gram pool, other texts, custom sources."""

    def __init__(
        self,
        config: LookaheadConfig,
        prompt_size: int,
        vocab_size: int | None = None,
        find_shared: FindShared | None = None,
        model_text: FollowerTable | None = None,
    ) -> None:
        """
        Args:
            config: the lookahead parameters, with numbers for all sizes.
            prompt_size: how many tokens of the text are prompt.
            vocab_size: when given, tokens of custom sources are checked against it, and those
                of the text that lie outside of it (placeholders of images) are never proposed.
            find_shared: for the source ``shared``.
            model_text: for the source ``model``.
        """
        self._config = config
        self._prompt_size = prompt_size
        self._vocab_size = vocab_size
        self._length = config.num_draft_tokens
        self._pool = NgramPool(
            config.ngram_size - 1, max(1, config.verification_set_size), config.pool_capacity
        )
        self._pooled = set(config.sources) if config.uses_pool else set()
        self._suffixes: SuffixIndex | None = None
        self._find_shared: FindShared | None = None
        self._model_text: FollowerTable | None = None
        self._asked: list[Ask] = []
        self._match: int | None = None
        if config.verification_set_size:
            if "suffix" in config.sources:
                self._suffixes = SuffixIndex(config.pool_capacity, vocab_size)
            if "shared" in config.sources:
                self._find_shared = find_shared
            if config.uses_model_text:
                self._model_text = model_text
            self._asked = self._in_order()

    @property
    def pool_size(self) -> int:
        """N-grams in the pool."""
        return len(self._pool)

    def extend(self, tokens: list[int], first: int) -> None:
        """Take ``tokens[first:]`` of the text, all of ``tokens[:first]`` being known."""
        edge = max(first, self._prompt_size)
        if "prompt" in self._pooled:
            self._pool.insert_text(tokens, first, min(edge, len(tokens)), self._vocab_size)
        if "output" in self._pooled:
            self._pool.insert_text(tokens, edge, len(tokens), self._vocab_size)
        if self._suffixes is not None:
            self._suffixes.extend(tokens, first)

    def add_ngrams(self, ngrams: Sequence[tuple[int, Chain]], previous: int) -> None:
        """Take (key, value) n-grams of the lookahead window.

        Args:
            ngrams: each key follows the one before it.
            previous: the token before the first key, -1 if there is none.
        """
        if "window" in self._pooled:
            for key, value in ngrams:
                self._pool.insert(key, value, previous, guessed=True)
                previous = key

    @property
    def match(self) -> int:
        """Kind of the coming step, as in `acceptance.MATCHES`, by the match in the own text.

        0 without the source ``suffix``. For what was asked last.
        """
        return 0 if self._match is None else kind_of_match(self._match)

    def ask(self, tree: CandidateTree, tokens: Sequence[int]) -> None:
        """Add all sources' candidates to the tree.

        Args:
            tree: of the coming step.
            tokens: the text, the root last.

        Raises:
            ValueError: a custom source proposed a token that isn't one, or whatever it raises.
        """
        for ask in self._asked:
            ask(tree, tokens)

    def _in_order(self) -> list[Ask]:
        """In the order of the sources; those that are asked together stand where the first does."""
        custom = make_custom_sources(self._config)
        asked: dict[str, Ask] = {}
        for name in self._config.sources:
            if name in TOKEN_SOURCES:
                asked.setdefault("tokens", self._grow)
            elif name in POOLED_SOURCES:
                asked.setdefault("pool", self._ask_pool)
            else:
                asked[name] = partial(self._ask_custom, name, custom[name])
        return list(asked.values())

    def _grow(self, tree: CandidateTree, tokens: Sequence[int]) -> None:
        """Candidates token by token: each is what the sources know to follow the one before."""
        own, model_text = self._suffixes, self._model_text
        self._match = None
        shared = None if self._find_shared is None else self._find_shared()

        def predict(tail: Chain) -> Classified:
            match, found = -1, []
            if own is not None:
                match, followers = own.followers(tail)
                if followers:
                    found = classify(SUFFIX, match, followers)
                if self._match is None:
                    # The root is asked about first.
                    self._match = match
            if match >= LONG_MATCH:
                # Other texts hardly ever know better.
                return found
            best, others = -1, []
            if model_text is not None:
                best, evidences = model_text.followers(tail)
                others = classify_model(best, match, evidences)
            if shared is not None:
                shared_match, followers = shared.followers(tail)
                if followers and shared_match >= best:
                    best, others = shared_match, classify_shared(shared_match, match, followers)
            if found and best >= match:
                found = confirm(found, others)
            return found + others

        tree.grow(predict, tokens, self._length, self._length * self._config.verification_set_size)

    def _ask_pool(self, tree: CandidateTree, tokens: Sequence[int]) -> None:
        entries = self._pool.lookup(tokens[-1])
        previous = tokens[-2] if len(tokens) > 1 else -1
        if self._suffixes is not None and len(entries) > 1:
            # Newest first, but those after the same two tokens before the others.
            entries.sort(key=lambda item: item[1].previous != previous)
        for rank, (value, entry) in enumerate(entries):
            first_class = pool_class(rank, entry.previous == previous, entry.guessed)
            tree.add(value[: self._length], first_class, keep_first=not rank)

    def _ask_custom(
        self, name: str, source: CandidateSource, tree: CandidateTree, tokens: Sequence[int]
    ) -> None:
        limit = self._config.verification_set_size
        for rank, proposal in enumerate(source.propose(tokens, self._length, limit)):
            chain = proposal[: self._length]
            for token in chain:
                if token < 0 or (self._vocab_size is not None and token >= self._vocab_size):
                    raise ValueError(
                        f"source {name} proposed token {token}, outside of a vocabulary of "
                        f"{self._vocab_size}"
                    )
            tree.add(chain, custom_class(rank))
