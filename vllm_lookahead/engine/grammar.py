"""Grammars and token trees.

vLLM masks the root and the scheduled draft, which is the tree's primary candidate. Other nodes
have no mask, so structured-output requests accept along the primary candidate only. The scheduler,
which holds the grammars, therefore chooses it: the candidate with the longest valid prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.outputs import DraftTokenIds

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

    from vllm_lookahead.engine.step import StepPlan

_ALLOW_ALL = -1  # every bit of the int32 words set


@dataclass
class CandidateDraftTokenIds(DraftTokenIds):
    """Drafts, and all candidates of the requests whose draft a grammar may cut short."""

    candidates: dict[str, list[list[int]]] = field(default_factory=dict)


def longest_valid(
    candidates: Sequence[list[int]], validate: Callable[[list[int]], list[int]]
) -> list[int]:
    """The candidate of which ``validate`` leaves most, the first among equals."""
    return max(candidates, key=lambda candidate: len(validate(candidate)))


def acceptable_drafts(grammar: GrammarOutput) -> dict[str, int]:
    """How many leading draft tokens each structured-output request may accept."""
    req_ids = grammar.structured_output_request_ids
    limits = grammar.num_acceptable_drafts
    if limits is None:  # vLLM: "None invalidates every draft."
        return dict.fromkeys(req_ids, 0)
    return dict(zip(req_ids, limits, strict=True))


def widen_bitmask(
    grammar: GrammarOutput, scheduled: SchedulerOutput, plan: StepPlan
) -> GrammarOutput:
    """Rows of ``grammar`` for all nodes of the requests' trees, free ones off the primary path.

    Args:
        grammar: vLLM's masks, ``1 + drafts`` rows per structured-output request.
        scheduled: the scheduler's output as the masks were made for it.
        plan: the step's trees; their node order starts with root and primary candidate.
    """
    mask = grammar.grammar_bitmask
    rows = []
    first = 0
    for req_id in grammar.structured_output_request_ids:
        count = 1 + len(scheduled.scheduled_spec_decode_tokens.get(req_id, ()))
        rows.append(mask[first : first + count])
        first += count
        placed = plan.trees.get(req_id)
        if placed is not None:
            free = placed.tree.size - count
            rows.append(np.full((free, mask.shape[1]), _ALLOW_ALL, dtype=mask.dtype))
    return replace(grammar, grammar_bitmask=np.concatenate(rows) if rows else mask)
