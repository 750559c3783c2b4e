"""The step plan: which requests of a scheduled step get which token trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vllm_lookahead.attention.branches import PlacedTree, blocks_touched
from vllm_lookahead.core.sequence import SequenceState
from vllm_lookahead.core.tree import TokenTree, linear_tree

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_lookahead.engine.proposer import LookaheadProposer


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The trees of one step, by request id."""

    trees: Mapping[str, PlacedTree]
    """Trees that are more than the draft that vLLM scheduled."""
    linear: Mapping[str, TokenTree] = field(default_factory=dict)
    """Trees that are just that: they need nothing but verification."""

    @property
    def needs_branches(self) -> bool:
        """Whether any tree is more than the linear draft that vLLM handles by itself."""
        return bool(self.trees)

    @property
    def num_requests(self) -> int:
        """Requests that decode in this step, each with its own state."""
        return len(self.trees) + len(self.linear)

    @property
    def num_branches(self) -> int:
        """Branches beside the primary ones."""
        return sum(len(placed.scratch) for placed in self.trees.values())

    def has(self, req_id: str) -> bool:
        """Whether the request decodes in this step, with its own state."""
        return req_id in self.trees or req_id in self.linear

    def widen(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """A copy of ``scheduled`` in which every planned request feeds its whole tree."""
        if not self.trees:
            return scheduled
        num_tokens = dict(scheduled.num_scheduled_tokens)
        drafts = dict(scheduled.scheduled_spec_decode_tokens)
        for req_id, placed in self.trees.items():
            num_tokens[req_id] = placed.tree.size
            drafts[req_id] = placed.tree.token_ids[1:].tolist()
            if not drafts[req_id]:
                del drafts[req_id]
        return replace(
            scheduled,
            num_scheduled_tokens=num_tokens,
            total_num_scheduled_tokens=sum(num_tokens.values()),
            scheduled_spec_decode_tokens=drafts,
        )


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a widened step must fit into."""

    max_tokens: int
    """Rows of the runner's input buffers (``max_num_batched_tokens``)."""
    max_model_len: int
    scratch_blocks: int
    """Scratch blocks of a KV cache group."""
    block_size: int
    """Tokens per block, the smallest of the groups."""


EMPTY_PLAN = StepPlan({})


def plan_step(
    scheduled: SchedulerOutput,
    proposer: LookaheadProposer,
    limits: StepLimits,
) -> StepPlan:
    """Plan a tree for every request that decodes in this step.

    The scheduler's own decisions stand: each request feeds at least what it was granted. Rows
    and scratch blocks that are left over are shared out evenly, in the order of the batch.
    """
    decoding = _decoding(scheduled, proposer)
    if not decoding:
        return EMPTY_PLAN
    if proposer.controller is not None and _has_prompts(scheduled):
        # Beside a prompt no token is free. What was granted is fed.
        return StepPlan(
            {}, {req_id: _granted_tree(scheduled, req_id, state) for req_id, state in decoding}
        )
    spare_rows = limits.max_tokens - scheduled.total_num_scheduled_tokens
    next_block = 0
    trees: dict[str, PlacedTree] = {}
    linear: dict[str, TokenTree] = {}
    for index, (req_id, state) in enumerate(decoding):
        waiting = len(decoding) - index
        granted = scheduled.scheduled_spec_decode_tokens.get(req_id, ())
        if state.is_linear:
            linear[req_id] = _granted_tree(scheduled, req_id, state)
            continue
        root = state.num_tokens - 1
        # `_prepare_inputs` reads the token buffer at consecutive positions before the tree is
        # put in its place, so also the number of nodes must fit what is left of the length.
        left = limits.max_model_len - root
        longest = blocks_touched(root, proposer.limits.max_depth, limits.block_size)
        affordable = (limits.scratch_blocks - next_block) // waiting // longest
        tree = state.plan(
            granted,
            max_nodes=max(1 + len(granted), min(left, 1 + len(granted) + spare_rows // waiting)),
            max_depth=left - 1,
            max_branches=1 + min(affordable, proposer.limits.max_branches - 1),
        )
        if tree.size == 1 + len(granted):
            linear[req_id] = tree
            continue
        runs = []
        for size in _branch_blocks(tree, root, limits.block_size):
            runs.append(next_block)
            next_block += size
        trees[req_id] = PlacedTree(tree, root, tuple(runs))
        spare_rows -= tree.size - 1 - len(granted)
    return StepPlan(trees, linear)


def _has_prompts(scheduled: SchedulerOutput) -> bool:
    drafts = scheduled.scheduled_spec_decode_tokens
    return any(
        count > 1 + len(drafts.get(req_id, ()))
        for req_id, count in scheduled.num_scheduled_tokens.items()
    )


def _granted_tree(scheduled: SchedulerOutput, req_id: str, state: SequenceState) -> TokenTree:
    return linear_tree(scheduled.scheduled_spec_decode_tokens.get(req_id, ()), state.root)


def _branch_blocks(tree: TokenTree, root: int, block_size: int) -> list[int]:
    """Blocks that each branch after branch 0 needs."""
    starts = tree.branch_starts()
    leaves = [*(starts[2:] - 1), tree.size - 1] if len(starts) > 1 else []
    return [blocks_touched(root, int(tree.depths[leaf]), block_size) for leaf in leaves]


def _decoding(
    scheduled: SchedulerOutput, proposer: LookaheadProposer
) -> list[tuple[str, SequenceState]]:
    cached = scheduled.scheduled_cached_reqs
    found = []
    for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        state = proposer.get(req_id)
        if state is None or req_id in cached.resumed_req_ids:
            continue
        num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(req_id, ()))
        feeds = scheduled.num_scheduled_tokens[req_id]
        if num_computed == state.num_tokens - 1 and feeds == 1 + num_drafts:
            found.append((req_id, state))
    return found
