"""Owner of all per-sequence lookahead state in a worker."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger

from vllm_lookahead.config import LookaheadConfig
from vllm_lookahead.core.acceptance import AcceptanceModel
from vllm_lookahead.core.controller import EVERYTHING, Controller
from vllm_lookahead.core.cost import StepCost
from vllm_lookahead.core.followers import FollowerTable
from vllm_lookahead.core.sequence import SequenceState
from vllm_lookahead.core.shared import SharedTexts
from vllm_lookahead.engine.speculative import LookaheadSpeculativeConfig
from vllm_lookahead.request import config_of_request

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

logger = init_logger("vllm.lookahead")

WRONG_WAY_IN = (
    "LookaheadProposer works inside lookahead's own worker only: ask for it by "
    '--speculative-config \'{"method": "lookahead"}\', not by method custom_class.'
)


class LookaheadProposer:
    """What vLLM's runner holds as its ``drafter`` for the method ``lookahead``.

    A sequence starts with its first sampled token (`start`) and is released when its request
    finishes, is aborted or is preempted.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        speculative_config = vllm_config.speculative_config
        if not isinstance(speculative_config, LookaheadSpeculativeConfig):
            raise RuntimeError(WRONG_WAY_IN)
        self.config = LookaheadConfig.from_mapping(speculative_config.lookahead)
        self.limits = self.config.largest
        """The configuration with the largest sizes that a sequence may get."""
        self.acceptance = AcceptanceModel()
        self.controller: Controller | None = None
        self.model_text: FollowerTable | None = None
        """For the source ``model``; filled at start-up."""
        self._free_tokens: int | None = None
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._shared: SharedTexts | None = None
        if "shared" in self.config.sources:
            self._shared = SharedTexts(self.config.shared_capacity, self._vocab_size)
        self._shared_keys: dict[str, Hashable] = {}
        self._sequences: dict[str, SequenceState] = {}
        # Requests that decode plainly: they asked for it, or had a fault.
        self._plain: set[str] = set()

    def use_cost(self, cost: StepCost, branch_cost: float = 0.0, draft_cost: float = 0.0) -> None:
        """Take what steps cost: once before the first sequence, and as often as it is corrected.

        Arguments as for `Controller`.
        """
        if self._free_tokens is None:
            self._free_tokens = cost.free_tokens()
        if self.config.controller:
            if self.controller is None:
                self.controller = Controller(cost)
            self.controller.cost = cost
            self.controller.branch_cost = branch_cost
            self.controller.draft_cost = draft_cost

    def use_model_text(self, texts: Sequence[Sequence[int]]) -> None:
        """Take what the model wrote at start-up, once before the first sequence."""
        self.model_text = FollowerTable(texts)

    def load_model(self, model: Any) -> None:
        """Nothing to load: lookahead has no draft model. vLLM's CPU runner calls this."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's protocol for custom proposers, which knows no request ids.

        Raises:
            RuntimeError: always; only lookahead's own runner drives this class.
        """
        raise RuntimeError(WRONG_WAY_IN)

    def start(
        self,
        req_id: str,
        tokens: Sequence[int],
        prompt_size: int,
        params: SamplingParams | None = None,
        shared_key: Hashable = None,
    ) -> None:
        """Make the state of a sequence (anew, if it has one), if its request wants lookahead.

        Args:
            req_id: the request.
            tokens: as `SequenceState`.
            prompt_size: as `SequenceState`.
            params: the request's; it decodes plainly if its ``extra_args`` say so (see
                `config_of_request`) or if it has a thinking budget, which vLLM counts by steps.
            shared_key: only with sequences of the same key are texts shared.
        """
        if req_id in self._plain:
            return
        config: LookaheadConfig | None = self.config
        try:
            if params is not None:
                config = config_of_request(self.config, params.extra_args)
            if config is None or (params and params.thinking_token_budget is not None):
                self._plain.add(req_id)
                return
            if self.controller is not None and self._free_tokens is not None:
                config = config.sized(self._free_tokens)
            find_shared = None
            if self._shared is not None:
                self._shared_keys[req_id] = shared_key
                find_shared = partial(self._shared.get, shared_key)
            self._sequences[req_id] = SequenceState(
                config,
                tokens,
                prompt_size,
                self._vocab_size,
                self.acceptance,
                find_shared,
                self.model_text,
            )
        except Exception:
            self._go_on_plainly(req_id)

    def is_plain(self, req_id: str) -> bool:
        """Whether the request decodes plainly until its end."""
        return req_id in self._plain

    def get(self, req_id: str) -> SequenceState | None:
        """The sequence's state; None before `start`, after `release`, and after a fault."""
        return self._sequences.get(req_id)

    def draft(self, req_ids: Sequence[str], num_others: int = 0) -> dict[str, list[int]]:
        """Draft tokens for the next step of the batch's sequences.

        Args:
            req_ids: those that may have drafts.
            num_others: requests beside them in the batch.

        Returns:
            By request, nothing for those that have nothing to propose, and for none of them
            where the controller rests.
        """
        if self.controller is not None and self.controller.rests(len(req_ids) + num_others):
            for req_id in req_ids:
                if req_id in self._sequences:
                    self._sequences[req_id].rest()
            return {}
        price = floor = 0.0
        if self.controller is not None:
            price, floor = self.controller.branch_price, self.controller.floor
        values: list[float] = []
        gathered = []
        for req_id in req_ids:
            state = self._sequences.get(req_id)
            if state is None:
                continue
            try:
                values += state.gather(price, floor)
                gathered.append((req_id, state))
            except Exception:
                self._go_on_plainly(req_id)
        cutoff, explorer = EVERYTHING, None
        if self.controller is not None:
            cutoff = self.controller.cutoff(np.array(values), len(req_ids) + num_others)
            explorer = self.controller.explorer(len(gathered))
        drafts = {}
        for index, (req_id, state) in enumerate(gathered):
            try:
                draft = state.select(cutoff, explore=index == explorer)
                # A request's own sizes may make it longer than what the scheduler expects.
                drafts[req_id] = draft[: self.limits.num_draft_tokens]
            except Exception:
                self._go_on_plainly(req_id)
        return drafts

    def candidates(self, req_id: str) -> list[list[int]]:
        """The candidates behind the request's last draft, best first."""
        state = self._sequences.get(req_id)
        return [] if state is None else state.candidates

    def finish(self, req_id: str) -> None:
        """Forget a sequence, but for its text if texts are shared."""
        state = self._sequences.get(req_id)
        if self._shared is not None and state is not None:
            self._shared.add(self._shared_keys[req_id], state.tokens)
        self.release(req_id)

    def release(self, req_id: str) -> None:
        """Forget a sequence; unknown ones are fine (a request may end before it starts)."""
        self._sequences.pop(req_id, None)
        self._shared_keys.pop(req_id, None)
        self._plain.discard(req_id)

    def _go_on_plainly(self, req_id: str) -> None:
        """After a fault, the exception in hand. The request's neighbours don't notice."""
        logger.exception("Lookahead failed for request %s, which goes on plainly.", req_id)
        self._sequences.pop(req_id, None)
        self._plain.add(req_id)

    @property
    def shared_tokens(self) -> int:
        """Tokens of finished requests that are held."""
        return 0 if self._shared is None else len(self._shared)

    @property
    def num_sequences(self) -> int:
        """Sequences that hold state."""
        return len(self._sequences)

    @property
    def pool_ngrams(self) -> int:
        """N-grams held by all pools."""
        return sum(state.pool_size for state in self._sequences.values())
