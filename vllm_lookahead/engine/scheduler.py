"""vLLM's scheduler, with drafts that starve no neighbour and suit their grammar."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from vllm_lookahead.engine.grammar import CandidateDraftTokenIds, longest_valid
from vllm_lookahead.engine.speculative import LookaheadSpeculativeConfig


@dataclass
class SaltedSchedulerOutput(SchedulerOutput):
    """A step with the cache salts of its new requests, which vLLM keeps from the workers."""

    cache_salts: dict[str, str | None] = field(default_factory=dict)


class LookaheadScheduler(Scheduler):
    """Decides how long drafts may be, and which candidate is the draft under a grammar."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        speculative_config = self.vllm_config.speculative_config
        assert isinstance(speculative_config, LookaheadSpeculativeConfig)
        self._shares_texts = "shared" in speculative_config.lookahead["sources"]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # vLLM grants running requests their drafts first come first served, so under a small
        # max_num_batched_tokens those at the end of the list would never run.
        drafting = [request for request in self.running if request.spec_token_ids]
        if drafting:
            spare = self.max_num_scheduled_tokens - len(self.running)
            allowed = max(0, spare // len(drafting))
            for request in drafting:
                del request.spec_token_ids[allowed:]
        output = super().schedule(*args, **kwargs)
        if not self._shares_texts:
            return output
        salts = {
            request.req_id: self.requests[request.req_id].cache_salt
            for request in output.scheduled_new_reqs
        }
        return SaltedSchedulerOutput(**vars(output), cache_salts=salts)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        if isinstance(draft_token_ids, CandidateDraftTokenIds):
            for index, req_id in enumerate(draft_token_ids.req_ids):
                candidates = draft_token_ids.candidates.get(req_id)
                request = self.requests.get(req_id)
                if candidates and request is not None and not request.is_prefill_chunk:
                    draft_token_ids.draft_token_ids[index] = longest_valid(
                        candidates,
                        partial(self.structured_output_manager.validate_tokens, request),
                    )
        super().update_draft_token_ids(draft_token_ids)
