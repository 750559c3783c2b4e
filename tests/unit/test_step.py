"""The step plan over vLLM's own scheduler output."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from tests.trees import NO_LIMITS, lineage
from vllm_lookahead.attention.branches import PlacedTree, expand
from vllm_lookahead.config import DEFAULT_SOURCES
from vllm_lookahead.core.cost import FLAT, StepCost
from vllm_lookahead.core.tree import TokenTree, build_tree, linear_tree
from vllm_lookahead.engine.proposer import LookaheadProposer
from vllm_lookahead.engine.speculative import LookaheadSpeculativeConfig
from vllm_lookahead.engine.step import EMPTY_PLAN, StepLimits, StepPlan, plan_step

PROMPT = [1, 2, 3, 1, 2, 4, 1]
"""Ends in 1, which 2 4 followed last and 2 3 before."""

PLENTY = StepLimits(max_tokens=1000, max_model_len=1000, scratch_blocks=1000, block_size=16)


def make_proposer(**parameters: Any) -> LookaheadProposer:
    parameters = {
        "window_size": 3,
        "ngram_size": 3,
        "verification_set_size": 2,
        "sources": ("window", "output", "prompt"),
    } | parameters
    config = SimpleNamespace(
        speculative_config=LookaheadSpeculativeConfig(
            method="custom_class", model="a.B", num_speculative_tokens=2, lookahead=parameters
        ),
        model_config=SimpleNamespace(get_vocab_size=lambda: 1000),
    )
    return LookaheadProposer(cast(VllmConfig, config))


@dataclass
class Step:
    """A scheduled step under construction."""

    proposer: LookaheadProposer
    running: dict[str, int] = field(default_factory=dict)
    """Computed tokens of the requests that were scheduled before."""
    feeds: dict[str, int] = field(default_factory=dict)
    texts: dict[str, Sequence[int]] = field(default_factory=dict)
    """Of the decoding requests."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    resumed: set[str] = field(default_factory=set)
    new: list[str] = field(default_factory=list)

    def decode(
        self, req_id: str, text: Sequence[int] = PROMPT, granted: int = 1000, computed: int = -1
    ) -> None:
        """Schedule a decoding request with the first ``granted`` tokens of its own draft."""
        self.proposer.start(req_id, text, len(text))
        self.texts[req_id] = text
        draft = self.proposer.draft([req_id])[req_id][:granted]
        self.running[req_id] = len(text) - 1 if computed < 0 else computed
        self.feeds[req_id] = 1 + len(draft)
        if draft:
            self.drafts[req_id] = draft

    def prefill(self, req_id: str, computed: int, feeds: int) -> None:
        """Schedule the next chunk of a prompt."""
        self.running[req_id] = computed
        self.feeds[req_id] = feeds

    def start(self, req_id: str, feeds: int) -> None:
        """Schedule a request for the first time."""
        self.new.append(req_id)
        self.feeds[req_id] = feeds

    def scheduled(self) -> SchedulerOutput:
        count = len(self.running)
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=req_id,
                    prompt_token_ids=list(PROMPT),
                    mm_features=[],
                    sampling_params=None,
                    pooling_params=None,
                    block_ids=([1],),
                    num_computed_tokens=0,
                    lora_request=None,
                )
                for req_id in self.new
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=list(self.running),
                resumed_req_ids=self.resumed,
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[None] * count,
                num_computed_tokens=list(self.running.values()),
                num_output_tokens=[1] * count,
            ),
            num_scheduled_tokens=dict(self.feeds),
            total_num_scheduled_tokens=sum(self.feeds.values()),
            scheduled_spec_decode_tokens=dict(self.drafts),
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )

    def plan(self, limits: StepLimits = PLENTY) -> StepPlan:
        return plan_step(self.scheduled(), self.proposer, limits)


def tree_of(plan: StepPlan, req_id: str) -> TokenTree:
    placed = plan.trees.get(req_id)
    return plan.linear[req_id] if placed is None else placed.tree


@pytest.fixture
def step() -> Step:
    return Step(make_proposer())


# Who gets a tree


def test_decoding_request_gets_a_tree_rooted_at_its_last_token(step: Step) -> None:
    step.decode("a")
    placed = step.plan().trees["a"]
    assert placed.root_position == 6
    # Primary 2 4, then candidate 2 3; the new window's row 0 are two guesses.
    assert placed.tree.token_ids[:4].tolist() == [1, 2, 4, 3]
    assert len(placed.tree.window_leaves) == 3


def test_request_without_state_gets_no_tree(step: Step) -> None:
    step.prefill("a", computed=6, feeds=1)
    assert step.plan() is EMPTY_PLAN


def test_new_request_gets_no_tree_even_under_an_id_with_state(step: Step) -> None:
    step.proposer.start("a", PROMPT, len(PROMPT))
    step.start("a", feeds=1)
    assert step.plan() is EMPTY_PLAN


def test_resumed_request_gets_no_tree(step: Step) -> None:
    step.decode("a")
    step.resumed.add("a")
    assert step.plan() is EMPTY_PLAN


def test_request_that_still_computes_its_text_gets_no_tree(step: Step) -> None:
    step.decode("a", computed=3)
    assert step.plan() is EMPTY_PLAN


def test_request_that_feeds_more_than_root_and_draft_gets_no_tree(step: Step) -> None:
    step.decode("a")
    step.feeds["a"] += 1
    assert step.plan() is EMPTY_PLAN


def test_only_the_decoding_requests_of_a_mixed_step_get_trees(step: Step) -> None:
    step.start("new", feeds=5)
    step.decode("a")
    step.prefill("chunk", computed=4, feeds=8)
    step.decode("resumed")
    step.resumed.add("resumed")
    step.decode("b", [1, 2, 4, 1, 5, 1])
    step.decode("c", [5, 6])
    plan = step.plan()
    assert list(plan.trees) == ["a", "b"]
    # Its new window is no more than its draft.
    assert list(plan.linear) == ["c"]


def test_window_that_is_no_more_than_the_draft_is_fed_with_its_leaves(step: Step) -> None:
    step.decode("a", [7])
    tree = step.plan().linear["a"]
    assert tree.token_ids.tolist() == [7, 7, 7]
    assert tree.window_leaves.tolist() == [0, 1, 2]


# How large trees may be


def test_step_without_spare_rows_feeds_what_was_granted(step: Step) -> None:
    step.decode("a")
    step.decode("b", granted=1)
    step.start("new", feeds=10)
    plan = step.plan(StepLimits(3 + 2 + 10, 1000, 1000, 16))
    assert plan.linear["a"].token_ids.tolist() == [1, 2, 4]
    assert plan.linear["b"].token_ids.tolist() == [1, 2]
    assert not plan.needs_branches


def test_spare_rows_are_shared_evenly(step: Step) -> None:
    step.proposer = make_proposer(window_size=0)
    for req_id in "abc":
        step.decode(req_id)
    # Each asks for root, 2, 4 and the other candidate's 3: one spare row each.
    plan = step.plan(StepLimits(3 * 3 + 2, 1000, 1000, 16))
    assert [tree_of(plan, req_id).size for req_id in "abc"] == [3, 4, 4]


def test_without_scratch_blocks_only_the_primary_is_fed(step: Step) -> None:
    step.decode("a")
    plan = step.plan(StepLimits(1000, 1000, 0, 16))
    assert plan.linear["a"].token_ids.tolist() == [1, 2, 4]
    assert not plan.needs_branches


def test_scratch_blocks_are_shared_evenly(step: Step) -> None:
    step.proposer = make_proposer(window_size=0, verification_set_size=4)
    text = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1]
    for req_id in "abc":
        step.decode(req_id, text)
    # Root at 9: a branch touches blocks 9 // 16 only. Two further candidates each, one block each.
    plan = step.plan(StepLimits(1000, 1000, 4, 16))
    assert [plan.trees[req_id].scratch for req_id in "abc"] == [(0,), (1,), (2, 3)]


def test_branch_that_crosses_a_block_edge_takes_a_run_of_two_blocks(step: Step) -> None:
    step.proposer = make_proposer(window_size=0, verification_set_size=4)
    step.decode("a", [1, 2, 3, 1, 2, 4, 1, 2, 5, 1])
    # Root at 9, candidates down to 11: blocks of 5 end at 9, blocks of 6 at 11.
    assert step.plan(StepLimits(1000, 1000, 99, 5)).trees["a"].scratch == (0, 2)
    assert step.plan(StepLimits(1000, 1000, 99, 6)).trees["a"].scratch == (0, 1)
    # Three blocks are enough for one such branch only.
    assert step.plan(StepLimits(1000, 1000, 3, 5)).trees["a"].scratch == (0,)


@pytest.mark.parametrize(("left", "depth"), [(1, 0), (2, 1), (3, 2), (5, 4)])
def test_nothing_stands_beyond_the_models_length(step: Step, left: int, depth: int) -> None:
    step.decode("a", granted=left - 1)
    # The root is the text's last token, at 6; positions up to 5 + left exist.
    tree = tree_of(step.plan(StepLimits(1000, 6 + left, 1000, 16)), "a")
    assert tree.size <= left
    assert tree.depths.max() <= depth


# Widening


def test_widened_step_feeds_whole_trees_and_leaves_the_others_alone(step: Step) -> None:
    step.start("new", feeds=5)
    step.decode("a")
    scheduled = step.scheduled()
    widened = StepPlan(
        {"a": PlacedTree(build_tree(1, [2], [[3]], **NO_LIMITS), 6, (0,))},
    ).widen(scheduled)
    assert widened.num_scheduled_tokens == {"new": 5, "a": 3}
    assert widened.total_num_scheduled_tokens == 8
    assert widened.scheduled_spec_decode_tokens == {"a": [2, 3]}


def test_request_that_feeds_its_root_only_has_no_drafts_in_the_widened_step(step: Step) -> None:
    step.proposer = make_proposer(window_size=0)
    step.decode("a", [5, 6])
    plan = step.plan()
    assert plan.linear["a"].size == 1
    widened = plan.widen(step.scheduled())
    assert widened.num_scheduled_tokens == {"a": 1}
    assert "a" not in widened.scheduled_spec_decode_tokens


def test_request_without_draft_feeds_its_window_all_the_same(step: Step) -> None:
    step.decode("a", granted=0)
    widened = step.plan().widen(step.scheduled())
    assert widened.num_scheduled_tokens == {"a": 3}
    assert len(widened.scheduled_spec_decode_tokens["a"]) == 2


def test_widening_leaves_the_schedulers_output_unchanged(step: Step) -> None:
    step.start("new", feeds=5)
    step.decode("a")
    step.decode("b", [5, 6])
    scheduled = step.scheduled()
    before = deepcopy(scheduled)
    plan = plan_step(scheduled, step.proposer, PLENTY)
    assert plan.widen(scheduled).total_num_scheduled_tokens > before.total_num_scheduled_tokens
    assert scheduled == before


def test_step_without_trees_is_not_copied(step: Step) -> None:
    step.start("new", feeds=5)
    scheduled = step.scheduled()
    assert step.plan().widen(scheduled) is scheduled


def test_root_with_no_draft_is_no_drafts_in_the_widened_step(step: Step) -> None:
    step.decode("a", granted=0)
    widened = StepPlan({"a": PlacedTree(linear_tree([], 1), 6, ())}).widen(step.scheduled())
    assert widened.num_scheduled_tokens == {"a": 1}
    assert "a" not in widened.scheduled_spec_decode_tokens


def test_step_of_linear_trees_needs_no_branches_and_is_not_copied(step: Step) -> None:
    step.proposer = make_proposer(window_size=0)
    step.decode("a", [1, 2, 3, 1])
    scheduled = step.scheduled()
    plan = step.plan()
    assert plan.linear["a"].token_ids.tolist() == [1, 2, 3]
    assert not plan.trees
    assert not plan.needs_branches
    assert plan.widen(scheduled) is scheduled


def test_plan_with_a_tree_beyond_the_draft_needs_branches(step: Step) -> None:
    step.decode("a")
    assert step.plan().needs_branches


def test_plan_has_the_requests_that_decode_with_state(step: Step) -> None:
    step.proposer = make_proposer(window_size=0)
    step.start("new", feeds=5)
    step.decode("a")
    step.decode("b", [5, 6])
    plan = step.plan()
    assert (list(plan.trees), list(plan.linear)) == (["a"], ["b"])
    assert plan.num_requests == 2
    assert [plan.has(req_id) for req_id in ("a", "b", "new", "c")] == [True, True, False, False]


# The controller


def controlled(step: Step, **parameters: Any) -> Step:
    """The step with a controller for which tokens cost nothing."""
    step.proposer = make_proposer(**parameters)
    step.proposer.use_cost(StepCost(FLAT, 1000))
    assert step.proposer.controller is not None
    return step


def test_step_without_a_prompt_feeds_trees_under_a_controller_too(step: Step) -> None:
    controlled(step).decode("a")
    assert step.plan().trees["a"].tree.token_ids[:4].tolist() == [1, 2, 4, 3]


@pytest.mark.parametrize("kind", ["new", "chunk"])
def test_beside_a_prompt_no_more_is_fed_than_was_granted_under_a_controller(
    step: Step, kind: str
) -> None:
    controlled(step).decode("a")
    step.decode("b", granted=1)
    step.decode("c", [5, 6], granted=0)
    if kind == "new":
        step.start("new", feeds=5)
    else:
        step.prefill("chunk", computed=4, feeds=8)
    plan = step.plan()
    assert not plan.needs_branches
    drafts = {req_id: tree.token_ids.tolist() for req_id, tree in plan.linear.items()}
    assert drafts == {"a": [1, 2, 4], "b": [1, 2], "c": [6]}


def test_neighbour_that_decodes_plainly_is_no_prompt(step: Step) -> None:
    controlled(step)
    step.decode("a")
    # Decodes, too, but has no state.
    step.prefill("plain", computed=7, feeds=1)
    plan = plan_step(step.scheduled(), step.proposer, PLENTY)
    assert tree_of(plan, "a").size > step.feeds["a"]
    assert not plan.has("plain")


def test_beside_a_prompt_trees_are_fed_without_a_controller(step: Step) -> None:
    step.decode("a")
    step.start("new", feeds=5)
    assert step.plan().needs_branches


def test_drafts_are_cut_where_further_tokens_are_not_worth_their_cost(step: Step) -> None:
    # Ten steps a token: nothing is worth that.
    step.proposer = make_proposer(window_size=0)
    step.proposer.use_cost(StepCost([(1, 1.0), (2, 11.0)], 1000))
    step.proposer.start("a", PROMPT, len(PROMPT))
    assert step.proposer.draft(["a"]) == {"a": []}


def test_drafts_of_a_batch_are_by_request_without_those_that_have_no_state(step: Step) -> None:
    step.proposer.start("a", PROMPT, len(PROMPT))
    step.proposer.start("b", [1, 7, 8, 1], 4)
    assert step.proposer.draft(["a", "c", "b"]) == {"a": [2, 4], "b": [7, 8]}
    assert step.proposer.draft([]) == {}


def test_controller_that_is_switched_off_does_not_come_with_a_cost(step: Step) -> None:
    step.proposer = make_proposer(controller=False)
    step.proposer.use_cost(StepCost(FLAT, 1000))
    assert step.proposer.controller is None


def test_corrected_cost_replaces_the_one_before(step: Step) -> None:
    controlled(step)
    corrected = StepCost([(1, 1.0), (2, 11.0)], 1000)
    step.proposer.use_cost(corrected)
    assert step.proposer.controller is not None
    assert step.proposer.controller.cost is corrected


# Any step


def scratch_blocks_written(placed: PlacedTree, limits: StepLimits) -> list[int]:
    """Scratch blocks that the branches' keys go to, each as often as branches use it."""
    columns = placed.root_position // limits.block_size + 20
    batch = expand(
        [placed.tree.size],
        [placed.root_position],
        [placed],
        np.zeros((1, columns), dtype=np.int32),
        limits.block_size,
        scratch_base=1,
    )
    tables = batch.block_table[1:]
    return [int(block) - 1 for table in tables for block in table if block]


def random_step(seed: int) -> tuple[Step, StepLimits]:
    """A mixed step, and limits from none to plenty to spare.

    Drawn evenly: hypothesis prefers small values, under which few trees have branches.
    """
    random = Random(seed)
    step = Step(
        make_proposer(
            window_size=random.randint(1, 4),
            ngram_size=random.randint(2, 4),
            verification_set_size=random.randint(0, 4),
            draft_length=random.choice(["auto", 1, 6]),
            sources=random.choice([("window", "output", "prompt"), DEFAULT_SOURCES]),
        )
    )
    if random.random() < 0.3:
        step.proposer.use_cost(StepCost(random.choice([FLAT, [(1, 1.0), (9, 2.0)]]), 1000))
    max_model_len = random.randint(20, 40)
    for index in range(random.randint(1, 4)):
        if random.random() < 0.2:
            step.start(f"new{index}", feeds=random.randint(1, 10))
            continue
        # Three tokens, so that n-grams recur.
        text = random.choices(range(3), k=random.randint(1, max_model_len - 1))
        # vLLM schedules no draft that would not fit the model's length.
        fitting = max_model_len - len(text)
        step.decode(f"old{index}", text, granted=min(fitting, random.choice([0, 1, 9, 9])))
    return step, StepLimits(
        max_tokens=sum(step.feeds.values()) + random.choice([0, 10, 30, 100]),
        max_model_len=max_model_len,
        scratch_blocks=random.choice([0, 4, 8, 16, 32, 200]),
        block_size=random.randint(1, 6),
    )


def steps() -> st.SearchStrategy[tuple[Step, StepLimits]]:
    return st.integers(0, 2**32 - 1).map(random_step)


@given(steps())
def test_every_tree_starts_with_root_and_granted_draft(case: tuple[Step, StepLimits]) -> None:
    step, limits = case
    plan = step.plan(limits)
    assert {*plan.trees, *plan.linear} == set(step.running)
    assert not {*plan.trees} & {*plan.linear}
    for req_id in step.running:
        tree = tree_of(plan, req_id)
        granted = step.drafts.get(req_id, [])
        assert tree.token_ids[0] == step.texts[req_id][-1]
        assert tree.token_ids[1 : 1 + len(granted)].tolist() == granted
        assert tree.primary_size == len(granted)


@given(steps())
def test_linear_are_the_trees_that_are_no_more_than_what_was_granted(
    case: tuple[Step, StepLimits],
) -> None:
    step, limits = case
    plan = step.plan(limits)
    assert all(tree.size == step.feeds[req_id] for req_id, tree in plan.linear.items())
    assert all(placed.tree.size > step.feeds[req_id] for req_id, placed in plan.trees.items())


@given(steps())
def test_widened_step_fits_the_token_buffers(case: tuple[Step, StepLimits]) -> None:
    step, limits = case
    scheduled = step.scheduled()
    widened = step.plan(limits).widen(scheduled)
    assert widened.total_num_scheduled_tokens == sum(widened.num_scheduled_tokens.values())
    assert widened.total_num_scheduled_tokens <= limits.max_tokens
    for req_id, count in scheduled.num_scheduled_tokens.items():
        drafts = widened.scheduled_spec_decode_tokens.get(req_id, [])
        assert widened.num_scheduled_tokens[req_id] >= count
        assert req_id in step.new or widened.num_scheduled_tokens[req_id] == 1 + len(drafts)


@given(steps())
def test_every_tree_fits_the_models_length(case: tuple[Step, StepLimits]) -> None:
    step, limits = case
    plan = step.plan(limits)
    for req_id, root in step.running.items():
        tree = tree_of(plan, req_id)
        assert req_id in plan.linear or plan.trees[req_id].root_position == root
        deepest = max(len(lineage(tree, node)) - 1 for node in range(tree.size))
        assert root + deepest < limits.max_model_len
        assert root + tree.size <= limits.max_model_len


@given(steps())
@settings(max_examples=300)
def test_scratch_blocks_of_all_branches_are_disjoint_and_within_the_limit(
    case: tuple[Step, StepLimits],
) -> None:
    step, limits = case
    blocks = [
        block
        for placed in step.plan(limits).trees.values()
        for block in scratch_blocks_written(placed, limits)
    ]
    assert len(set(blocks)) == len(blocks)
    assert all(0 <= block < limits.scratch_blocks for block in blocks)


def test_runs_are_in_the_order_of_the_branches(step: Step) -> None:
    step.decode("a")
    step.decode("b")
    runs = [run for placed in step.plan().trees.values() for run in placed.scratch]
    assert len(runs) > 2
    assert all(first < second for first, second in pairwise(runs))
