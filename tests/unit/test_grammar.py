"""Grammar bitmasks over token trees."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from vllm_lookahead.attention.branches import PlacedTree
from vllm_lookahead.core.tree import TokenTree, build_tree, linear_tree
from vllm_lookahead.engine.grammar import acceptable_drafts, longest_valid, widen_bitmask
from vllm_lookahead.engine.step import StepPlan

FREE = [-1, -1]
"""Two words of a mask that allows every token."""


def scheduled(**drafts: list[int]) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.scheduled_spec_decode_tokens = drafts
    return output


def grammar(req_ids: list[str], rows: list[list[int]]) -> GrammarOutput:
    return GrammarOutput(req_ids, np.array(rows, dtype=np.int32).reshape(-1, 2))


def plan(**trees: TokenTree) -> StepPlan:
    return StepPlan({req_id: PlacedTree(tree, 9, ()) for req_id, tree in trees.items()})


def tree_of(primary: list[int], *candidates: list[int]) -> TokenTree:
    return build_tree(0, primary, candidates, max_nodes=99, max_depth=99, max_branches=99)


def widened(
    masks: GrammarOutput, step: SchedulerOutput, trees: StepPlan
) -> tuple[list[str], list[list[int]]]:
    result = widen_bitmask(masks, step, trees)
    return result.structured_output_request_ids, result.grammar_bitmask.tolist()


def test_root_and_primary_keep_their_masks_and_other_nodes_are_free() -> None:
    masks = grammar(["a"], [[1, 10], [2, 20], [3, 30]])
    assert widened(masks, scheduled(a=[1, 2]), plan(a=tree_of([1, 2], [3, 4]))) == (
        ["a"],
        [[1, 10], [2, 20], [3, 30], FREE, FREE],
    )


def test_every_request_of_a_step_keeps_its_own_masks() -> None:
    masks = grammar(["b", "new", "a"], [[1, 1], [2, 2], [3, 3], [4, 4], [5, 5]])
    step = scheduled(a=[7], b=[8], other=[1, 2])
    trees = plan(a=tree_of([7], [6]), b=tree_of([8], [5], [4]), other=tree_of([1, 2]))
    assert widened(masks, step, trees) == (
        ["b", "new", "a"],
        [[1, 1], [2, 2], FREE, FREE, [3, 3], [4, 4], [5, 5], FREE],
    )


def test_masks_of_linear_trees_stay_as_they_are() -> None:
    rows = [[1, 1], [2, 2]]
    masks = grammar(["a"], rows)
    assert widened(masks, scheduled(a=[7]), plan(a=linear_tree([7]))) == (["a"], rows)


def test_masks_are_of_vllms_type_and_the_given_ones_are_left_alone() -> None:
    masks = grammar(["a"], [[1, 1]])
    result = widen_bitmask(masks, scheduled(), plan(a=tree_of([])))
    assert result.grammar_bitmask.dtype == np.int32
    assert result is not masks
    assert masks.grammar_bitmask.tolist() == [[1, 1]]


def test_step_without_structured_requests_has_no_masks() -> None:
    assert widened(grammar([], []), scheduled(a=[1]), plan(a=tree_of([1], [2]))) == ([], [])


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([2, 0], {"a": 2, "b": 0}),
        # vLLM's contract for None, an older scheduler: no draft may be accepted.
        (None, {"a": 0, "b": 0}),
    ],
)
def test_drafts_are_acceptable_as_far_as_the_grammar_constrained_them(
    limits: list[int] | None, expected: dict[str, int]
) -> None:
    masks = GrammarOutput(["a", "b"], np.zeros((4, 2), dtype=np.int32), limits)
    assert acceptable_drafts(masks) == expected


def test_draft_under_a_grammar_is_the_candidate_with_the_longest_valid_prefix() -> None:
    def digits(tokens: list[int]) -> list[int]:
        return tokens[: next((i for i, token in enumerate(tokens) if token > 9), len(tokens))]

    candidates = [[10, 1, 2], [1, 10, 2], [1, 2, 10], [3, 4, 11]]
    assert longest_valid(candidates, digits) == [1, 2, 10]
