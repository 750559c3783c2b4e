"""vLLM's scheduler, with drafts that never starve a neighbour."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler


class LookaheadScheduler(Scheduler):
    """Cuts drafts where together they would eat up the token budget.

    vLLM grants running requests their drafts first come first served, so under a small
    ``max_num_batched_tokens`` those at the end of the list would never run.
    """

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        drafting = [request for request in self.running if request.spec_token_ids]
        if drafting:
            spare = self.max_num_scheduled_tokens - len(self.running)
            allowed = max(0, spare // len(drafting))
            for request in drafting:
                del request.spec_token_ids[allowed:]
        return super().schedule(*args, **kwargs)
