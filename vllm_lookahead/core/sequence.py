"""State of one sequence between steps: its text, candidates, n-gram pool and lookahead window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

import numpy as np

from vllm_lookahead.config import BUILTIN_SOURCES, POOLED_SOURCES, LookaheadConfig
from vllm_lookahead.core.acceptance import (
    AcceptanceModel,
    custom_class,
    pool_class,
    shared_class,
    suffix_class,
)
from vllm_lookahead.core.candidates import Candidate, Chain, ValuedCandidates
from vllm_lookahead.core.controller import EVERYTHING, NOTHING
from vllm_lookahead.core.pool import NgramPool
from vllm_lookahead.core.sources import make_custom_sources
from vllm_lookahead.core.suffix import MATCH_LENGTHS, SuffixIndex, continuation
from vllm_lookahead.core.tree import IntArray, TokenTree, build_tree
from vllm_lookahead.core.verify import Walk
from vllm_lookahead.core.window import LookaheadWindow

FindShared = Callable[[Sequence[int], int], tuple[int, Chain]]


class SequenceState:
    """One sequence: `gather` and `select` a draft, `plan` the tree around what was granted,
    `commit`.

    The last token of the text is the root: sampled, but without a KV entry yet.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        tokens: Sequence[int],
        prompt_size: int,
        vocab_size: int | None = None,
        acceptance: AcceptanceModel | None = None,
        find_shared: FindShared | None = None,
    ) -> None:
        """
        Args:
            config: the lookahead parameters; "auto" sizes are taken as large as they get.
            tokens: prompt and output token ids, root last; at least one.
            prompt_size: how many of them are prompt.
            vocab_size: when given, tokens of custom sources are checked against it, and those
                of the text that lie outside of it (placeholders of images) are never proposed.
            acceptance: what the engine has learned; by default something of its own.
            find_shared: `SharedTexts.find` under the sequence's key, for the source ``shared``.
        """
        if not tokens:
            raise ValueError("a sequence has at least one token")
        config = config.largest
        self._config = config
        self._vocab_size = vocab_size
        self._tokens = list(tokens)
        self._acceptance = acceptance or AcceptanceModel()
        self._find_shared = find_shared
        self._custom_sources = make_custom_sources(config)
        self._pool = NgramPool(
            config.ngram_size - 1, max(1, config.verification_set_size), config.pool_capacity
        )
        self._insert_text(0, prompt_size, "prompt")
        self._insert_text(prompt_size, len(self._tokens), "output")
        self._suffixes = SuffixIndex(config.pool_capacity)
        self._uses_suffixes = bool(config.verification_set_size) and "suffix" in config.sources
        if self._uses_suffixes:
            self._suffixes.extend(self._tokens, 0)
        self._sources = self._ask_in_order() if config.verification_set_size else []
        self._window = self._new_window() if config.window_size else None
        # Filled by gather and select for the coming step; before, there is but the window.
        self._valued = ValuedCandidates.of((), self._acceptance)
        self._match = 0
        self._window_value = 0.0
        self._cutoff = EVERYTHING
        self._candidates: list[Chain] = []
        self._feeds_window = self._window is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, the root included."""
        return len(self._tokens)

    @property
    def root(self) -> int:
        """The current token."""
        return self._tokens[-1]

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and output, the root last."""
        return self._tokens

    @property
    def pool_size(self) -> int:
        """N-grams in the pool."""
        return len(self._pool)

    @property
    def candidates(self) -> list[list[int]]:
        """The candidates behind the last draft, best first."""
        return [list(chain) for chain in self._candidates]

    @property
    def is_linear(self) -> bool:
        """Whether the coming step's tree is no more than its draft."""
        return not self._feeds_window and len(self._candidates) <= 1

    # ---- propose ---------------------------------------------------------------------------

    def propose(self) -> list[int]:
        """`gather` and `select` everything: the draft of a step whose tokens cost nothing."""
        self.gather()
        return self.select(EVERYTHING)

    def gather(self, branch_price: float = 0.0, floor: float = 0.0) -> list[float]:
        """Ask the sources what may come next.

        Args:
            branch_price: as in `ValuedCandidates.of`.
            floor: as in `ValuedCandidates.of`.

        Returns:
            The values (`ValuedCandidates`) of all tokens that the step could feed, the
            window's among them.

        Raises:
            ValueError: a custom source proposed a token that isn't one, or whatever it raises.
        """
        self._match = 0
        candidates: list[Candidate] = []
        for ask in self._sources:
            ask(candidates, floor)
        valued = ValuedCandidates.of(
            self._distinct(candidates), self._acceptance, branch_price, floor
        )
        self._valued = valued
        values = valued.values[1:]
        window = self._window
        if window is not None:
            # Fed whole or not at all, so its tokens share its value evenly.
            value = self._acceptance.window_value(self._match)
            value -= (window.width - (not candidates)) * branch_price
            # A new window of one column is the root, which is fed anyway.
            self._window_value = value / window.size if window.size else NOTHING
            values += [self._window_value] * window.size
        return values

    def _distinct(self, candidates: list[Candidate]) -> list[Candidate]:
        found: dict[Chain, Candidate] = {}
        for candidate in candidates:
            found.setdefault(candidate.tokens, candidate)
        return list(found.values())[: self._config.verification_set_size]

    def select(self, cutoff: float, explore: bool = False) -> list[int]:
        """Choose what is worth ``cutoff`` of what was gathered, for the coming step.

        Args:
            cutoff: least value of a token to be fed.
            explore: feed the window, too, whatever it is worth.

        Returns:
            Draft tokens to ask the scheduler for, at most `LookaheadConfig.num_draft_tokens`:
            the primary candidate, which is the longest of the candidates and, among equals, the
            first. Without a candidate it is a path of the window, so that KV slots are granted
            for what the window may turn out to have right.
        """
        self._cutoff = cutoff
        valued = self._valued
        self._candidates = []
        ends: set[int] = set()
        for index, path in enumerate(valued.paths):
            count = valued.chosen(index, cutoff)
            if count and path[count - 1] not in ends:
                # Not for one of which no more is left than of one before it.
                ends.update(path[:count])
                self._candidates.append(tuple([valued.tokens[node] for node in path[:count]]))
        self._feeds_window = self._window is not None and (explore or self._window_value >= cutoff)
        if self._candidates:
            longest = max(map(len, self._candidates))
            return list(next(chain for chain in self._candidates if len(chain) == longest))
        if self._feeds_window and self._config.verify_window:
            assert self._window is not None
            return self._window.deepest_path()[: self._config.num_draft_tokens]
        return []

    # ---- plan and commit -------------------------------------------------------------------

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
            self._window.rows if self._window is not None and self._feeds_window else (),
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
        self._learn(walk, window_fed=len(new_row) > 0)
        if self._window is not None and len(new_row):
            self._advance_window(walk, new_row)
        first = len(self._tokens)
        self._tokens.extend(walk.tokens)
        self._insert_text(first, len(self._tokens), "output")
        if self._uses_suffixes:
            self._suffixes.extend(self._tokens, first)

    def _learn(self, walk: Walk, window_fed: bool) -> None:
        valued, model = self._valued, self._acceptance
        valued.learn(walk.tokens, model)
        model.learn_return(valued.num_guessed(self._cutoff))
        if window_fed:
            expected = sum(valued.values[node] >= self._cutoff for node in valued.accepted)
            model.learn_window(self._match, max(0, walk.accepted - expected))

    def _advance_window(self, walk: Walk, new_row: IntArray) -> None:
        assert self._window is not None
        ngrams = self._window.advance(self.root, new_row.tolist(), walk.accepted)
        if "window" in self._config.sources and self._config.uses_pool:
            previous = self._tokens[-2] if len(self._tokens) > 1 else -1
            for key, value in ngrams:
                self._pool.insert(key, value, previous, guessed=True)
                previous = key

    def _insert_text(self, first: int, last: int, source: str) -> None:
        if self._config.uses_pool and source in self._config.sources:
            self._pool.insert_text(self._tokens, first, last, self._vocab_size)

    # ---- sources ---------------------------------------------------------------------------

    def _ask_in_order(self) -> list[Callable[[list[Candidate], float], None]]:
        """What adds each source's candidates to a list, best first, down to a likelihood."""
        asked: list[Callable[[list[Candidate], float], None]] = []
        pools = False
        for name in self._config.sources:
            if name == "suffix":
                asked.append(self._ask_suffixes)
            elif name == "shared":
                if self._find_shared is not None:
                    asked.append(partial(self._ask_shared, self._find_shared))
            elif name in POOLED_SOURCES and not pools:
                pools = True
                asked.append(self._ask_pool)
            elif name not in BUILTIN_SOURCES:
                asked.append(partial(self._ask_custom, name))
        return asked

    def _ask_suffixes(self, candidates: list[Candidate], floor: float) -> None:
        match, position = self._suffixes.longest(self._tokens)
        if match < 0:
            return
        self._match = 1 if MATCH_LENGTHS[match] <= 2 else 2
        chain = continuation(self._tokens, position, self._config.num_draft_tokens)
        self._add_text(candidates, chain, suffix_class(match))

    def _ask_shared(self, find: FindShared, candidates: list[Candidate], floor: float) -> None:
        match, chain = find(self._tokens, self._config.num_draft_tokens)
        self._add_text(candidates, chain, shared_class(match))

    def _add_text(self, candidates: list[Candidate], chain: Chain, first_class: int) -> None:
        if chain and self._vocab_size is not None and max(chain) >= self._vocab_size:
            chain = tuple(takewhile(self._vocab_size.__gt__, chain))
        if chain:
            candidates.append(Candidate(chain, first_class))

    def _ask_pool(self, candidates: list[Candidate], floor: float) -> None:
        entries = self._pool.lookup(self.root)
        if not entries:
            return
        previous = self._tokens[-2] if len(self._tokens) > 1 else -1
        if self._uses_suffixes and len(entries) > 1:
            # Newest first, but those after the same two tokens before the others.
            entries.sort(key=lambda item: item[1].previous != previous)
        probability = self._acceptance.probability
        for rank, (value, entry) in enumerate(entries):
            first_class = pool_class(rank, entry.previous == previous, entry.guessed)
            if rank and probability[first_class] < floor:
                continue
            candidates.append(Candidate(value[: self._config.num_draft_tokens], first_class))

    def _ask_custom(self, name: str, candidates: list[Candidate], floor: float) -> None:
        length, limit = self._config.num_draft_tokens, self._config.verification_set_size
        proposed = self._custom_sources[name].propose(self._tokens, length, limit)
        for rank, proposal in enumerate(proposed):
            chain = tuple(proposal[:length])
            self._check_tokens(name, chain)
            if chain:
                candidates.append(Candidate(chain, custom_class(rank)))

    def _check_tokens(self, name: str, chain: Chain) -> None:
        for token in chain:
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
