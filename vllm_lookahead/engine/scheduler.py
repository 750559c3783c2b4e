"""vLLM's scheduler, with drafts that starve no neighbour and suit their grammar."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from vllm_lookahead.engine.grammar import CandidateDraftTokenIds, longest_valid


class LookaheadScheduler(Scheduler):
    """Decides how long drafts may be, and which candidate is the draft under a grammar."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # vLLM grants running requests their drafts first come first served, so under a small
        # max_num_batched_tokens those at the end of the list would never run.
        drafting = [request for request in self.running if request.spec_token_ids]
        if drafting:
            spare = self.max_num_scheduled_tokens - len(self.running)
            allowed = max(0, spare // len(drafting))
            for request in drafting:
                del request.spec_token_ids[allowed:]
        return super().schedule(*args, **kwargs)

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
