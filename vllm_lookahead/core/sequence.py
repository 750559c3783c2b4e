"""State of one sequence between steps: its text, candidates and lookahead window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_lookahead.config import LookaheadConfig
from vllm_lookahead.core.acceptance import AcceptanceModel
from vllm_lookahead.core.candidates import CandidateTree, Chain
from vllm_lookahead.core.controller import EVERYTHING, NOTHING
from vllm_lookahead.core.followers import FollowerTable
from vllm_lookahead.core.proposals import FindShared, Proposals
from vllm_lookahead.core.tree import IntArray, TokenTree, build_tree
from vllm_lookahead.core.verify import Walk
from vllm_lookahead.core.window import LookaheadWindow


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
        model_text: FollowerTable | None = None,
    ) -> None:
        """
        Args:
            config: the lookahead parameters; "auto" sizes are taken as large as they get.
            tokens: prompt and output token ids, root last; at least one.
            prompt_size: how many of them are prompt.
            vocab_size: as for `Proposals`.
            acceptance: what the engine has learned; by default something of its own.
            find_shared: as for `Proposals`.
            model_text: as for `Proposals`.
        """
        if not tokens:
            raise ValueError("a sequence has at least one token")
        config = config.largest
        self._config = config
        self._tokens = list(tokens)
        self._acceptance = acceptance or AcceptanceModel()
        self._proposals = Proposals(config, prompt_size, vocab_size, find_shared, model_text)
        self._num_known = 0
        self._take_in()
        self._window = self._new_window(vocab_size) if config.window_size else None
        # Filled by gather and select for the coming step; before, there is but the window.
        self._tree = CandidateTree(self._acceptance)
        self._match = 0
        self._window_value = 0.0
        self._candidates: list[Chain] = []
        self._feeds_window = self._window is not None
        self._rests = False

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
        return self._proposals.pool_size

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
            branch_price: as for `CandidateTree`.
            floor: as for `CandidateTree`.

        Returns:
            The values (`CandidateTree`) of all tokens that the step could feed, the
            window's among them.

        Raises:
            ValueError: a custom source proposed a token that isn't one, or whatever it raises.
        """
        self._take_in()
        self._rests = False
        tree = self._tree = CandidateTree(self._acceptance, branch_price, floor)
        self._proposals.ask(tree, self._tokens)
        values = tree.values[1:]
        window = self._window
        if window is not None:
            # Fed whole or not at all, so its tokens share its value evenly.
            self._match = self._proposals.match
            value = self._acceptance.window_value(self._match)
            value -= (window.width - (not values)) * branch_price
            # A new window of one column is the root, which is fed anyway.
            self._window_value = value / window.size if window.size else NOTHING
            values += [self._window_value] * window.size
        return values

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
        self._candidates = self._tree.select(cutoff, self._config.verification_set_size)
        self._feeds_window = self._window is not None and (explore or self._window_value >= cutoff)
        if self._candidates:
            longest = max(map(len, self._candidates))
            return list(next(chain for chain in self._candidates if len(chain) == longest))
        if self._feeds_window and self._config.verify_window:
            assert self._window is not None
            return self._window.deepest_path()[: self._config.num_draft_tokens]
        return []

    def rest(self) -> None:
        """Have no draft, instead of `gather` and `select`."""
        self._tree = CandidateTree(self._acceptance)
        self._candidates = []
        self._feeds_window = False
        self._rests = True

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
        self._tokens.extend(walk.tokens)
        if not self._rests:
            self._take_in()

    def _take_in(self) -> None:
        """Tell the sources what is new in the text."""
        if self._num_known == len(self._tokens):
            return
        self._proposals.extend(self._tokens, self._num_known)
        self._num_known = len(self._tokens)

    def _learn(self, walk: Walk, window_fed: bool) -> None:
        tree, model = self._tree, self._acceptance
        tree.learn(walk.tokens)
        if tree.accepted:
            model.learn_return(tree.num_guessed)
        if window_fed:
            model.learn_window(self._match, max(0, walk.accepted - tree.num_accepted))

    def _advance_window(self, walk: Walk, new_row: IntArray) -> None:
        assert self._window is not None
        ngrams = self._window.advance(self.root, new_row.tolist(), walk.accepted)
        self._proposals.add_ngrams(ngrams, self._tokens[-2] if len(self._tokens) > 1 else -1)

    def _new_window(self, vocab_size: int | None) -> LookaheadWindow:
        width = self._config.window_size
        # Guesses drawn from the text are likelier to come true than any others (reference
        # implementation, `set_token`). Seeded, so that ranks and reruns agree.
        rng = np.random.default_rng([self._config.seed, len(self._tokens)])
        tokens = np.asarray(self._tokens)
        if vocab_size is not None:
            tokens = tokens[tokens < vocab_size]
        guesses = rng.choice(tokens, size=width - 1).tolist()
        return LookaheadWindow(width, self._config.ngram_size, guesses, self._config.is_jacobi)
