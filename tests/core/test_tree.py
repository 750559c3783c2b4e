"""The token tree: merging, order, visibility and limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import (
    NO_LIMITS,
    TOKENS,
    TreeInput,
    chains,
    lineage,
    path_of,
    prefixes,
    tree_inputs,
    windows,
)
from vllm_lookahead.core.tree import TokenTree, build_tree, linear_tree


def shape(tree: TokenTree) -> list[tuple[int, int]]:
    """(token, parent) of every node."""
    return list(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True))


def branches(tree: TokenTree) -> list[tuple[list[int], int]]:
    """Each branch's nodes as attention sees them, and how many of the last are its own."""
    starts = tree.branch_starts().tolist()
    ends = [*starts[1:], tree.size]
    found = []
    for start, end in zip(starts, ends, strict=True):
        before = tree.ancestry(int(tree.parents[start])) if start else []
        found.append(([*before, *range(start, end)], end - start))
    return found


# By hand


def test_chains_with_equal_prefixes_share_nodes_in_preorder() -> None:
    tree = build_tree(9, [1, 2], [[1, 3], [2, 1]], [[1, 4], [5, 6, 7]], **NO_LIMITS)
    # root 9 -+- 1 -+- 2            primary
    #         |     +- 3            first candidate
    #         |     +- 4 --- 7      row 0 and its column 2
    #         |     +- 6            column 1
    #         +- 2 --- 1            second candidate
    #         +- 5                  column 0
    assert shape(tree) == [
        (9, -1),
        (1, 0),
        (2, 1),
        (3, 1),
        (4, 1),
        (7, 4),
        (6, 1),
        (2, 0),
        (1, 7),
        (5, 0),
    ]
    assert tree.depths.tolist() == [0, 1, 2, 2, 2, 3, 2, 1, 2, 1]
    assert tree.primary_size == 2
    assert tree.window_leaves.tolist() == [9, 6, 5]
    assert np.flatnonzero(~tree.acceptable).tolist() == [5]  # deeper than the primary
    assert tree.branch_starts().tolist() == [0, 3, 4, 6, 7, 9]


def test_primary_inside_the_window_ends_branch_0() -> None:
    tree = build_tree(9, [1], (), [[1, 2, 3]], **NO_LIMITS)
    assert shape(tree) == [(9, -1), (1, 0), (2, 1), (3, 2)]
    assert tree.branch_starts().tolist() == [0, 2]


def test_root_alone_is_branch_0_when_nothing_was_granted() -> None:
    tree = build_tree(9, [], (), [[1], [2, 3]], **NO_LIMITS)
    assert shape(tree) == [(9, -1), (1, 0), (3, 1), (2, 0)]
    assert tree.branch_starts().tolist() == [0, 1, 3]
    assert tree.acceptable.tolist() == [True, False, False, False]


def test_candidate_is_cut_at_the_depth_of_the_primary() -> None:
    tree = build_tree(9, [1], [[2, 3, 4]], **NO_LIMITS)
    assert shape(tree) == [(9, -1), (1, 0), (2, 0)]


def test_candidates_without_a_granted_draft_are_not_fed() -> None:
    assert shape(build_tree(9, [], [[2, 3, 4]], **NO_LIMITS)) == [(9, -1)]


def test_window_nodes_are_acceptable_only_when_the_window_is_verified() -> None:
    arguments = (9, [1, 2], [[3, 3]], [[1, 4], [3, 6, 7]])
    verified = build_tree(*arguments, **NO_LIMITS)
    assert shape(verified) == [
        (9, -1),
        (1, 0),
        (2, 1),
        (4, 1),
        (7, 3),
        (6, 1),
        (3, 0),
        (3, 6),
    ]
    assert np.flatnonzero(~verified.acceptable).tolist() == [4]  # deeper than the primary
    unverified = build_tree(*arguments, **NO_LIMITS, verify_window=False)
    assert shape(unverified) == shape(verified)
    assert np.flatnonzero(~unverified.acceptable).tolist() == [3, 4, 5]


def test_unmerged_tree_feeds_every_chain_by_itself() -> None:
    tree = build_tree(9, [1, 2], [[1, 2], [1, 3]], [[1], [1, 1]], **NO_LIMITS, merge=False)
    assert shape(tree) == [
        (9, -1),
        *[(1, 0), (2, 1)],
        *[(1, 0), (2, 3)],
        *[(1, 0), (3, 5)],
        *[(1, 0), (1, 7)],
        (1, 0),
    ]
    assert tree.window_leaves.tolist() == [9, 8]


def test_linear_tree_is_one_acceptable_chain_in_one_branch() -> None:
    tree = linear_tree([4, 5], root=3)
    assert shape(tree) == [(3, -1), (4, 0), (5, 1)]
    assert tree.acceptable.all()
    assert tree.branch_starts().tolist() == [0]


# Numbers of the paper


@pytest.mark.parametrize(("W", "N"), [(1, 2), (1, 5), (7, 2), (7, 5), (15, 5)])
def test_full_window_without_candidates_has_w_times_n_minus_1_nodes(W: int, N: int) -> None:
    numbers = iter(range(1, 1000))
    rows = [[next(numbers) for _ in range(size)] for size in [W - 1, *[W] * (N - 2)]]
    tree = build_tree(0, [], (), rows, **NO_LIMITS, merge=False)
    assert tree.size == W * (N - 1)


@pytest.mark.parametrize(("W", "N", "G"), [(1, 2, 1), (7, 5, 7), (3, 4, 2), (0, 5, 7), (0, 2, 1)])
def test_unmerged_step_feeds_window_and_candidates(W: int, N: int, G: int) -> None:
    rows = [[1] * size for size in [W - 1, *[W] * (N - 2)]] if W else []
    candidates = [[1] * (N - 1)] * G
    tree = build_tree(0, candidates[0], candidates[1:], rows, **NO_LIMITS, merge=False)
    assert tree.size == ((N - 1) * (W + G) if W else 1 + (N - 1) * G)


@given(st.data(), st.integers(0, 4), st.integers(2, 5), st.integers(1, 4))
def test_merged_step_feeds_no_more_than_an_unmerged_one(
    data: st.DataObject, W: int, N: int, G: int
) -> None:
    rows = [
        data.draw(st.lists(TOKENS, min_size=size, max_size=size))
        for size in ([W - 1, *[W] * (N - 2)] if W else [])
    ]
    candidates = data.draw(
        st.lists(st.lists(TOKENS, min_size=N - 1, max_size=N - 1), min_size=1, max_size=G)
    )
    tree = build_tree(0, candidates[0], candidates[1:], rows, **NO_LIMITS)
    assert tree.size <= ((N - 1) * (W + G) if W else 1 + (N - 1) * G)


# What every tree holds


@given(tree_inputs())
def test_merged_tree_holds_each_prefix_of_its_chains_once(asked: TreeInput) -> None:
    tree = asked.build()
    paths = [path_of(tree, node) for node in range(tree.size)]
    assert len(set(paths)) == len(paths)
    assert set(paths) == prefixes([*asked.candidate_chains, *asked.window_chains])


@given(tree_inputs())
def test_unmerged_tree_holds_each_chain_as_often_as_it_was_given(asked: TreeInput) -> None:
    tree = asked.build(merge=False)
    expected = [path[:size] for path in asked.candidate_chains for size in range(1, len(path) + 1)]
    if asked.window_rows:
        first, *upper = asked.window_rows
        expected += [tuple(first[:size]) for size in range(1, len(first) + 1)]
        for column in range(len(first) + 1):
            stem = (*first[:column], *(row[column] for row in upper))
            expected += [stem[:size] for size in range(column + 1, len(stem) + 1)]
    paths = [path_of(tree, node) for node in range(1, tree.size)]
    assert sorted(paths) == sorted(expected)


@given(tree_inputs())
def test_acceptable_is_what_candidates_or_a_verified_window_hold_within_the_primarys_depth(
    asked: TreeInput,
) -> None:
    tree = asked.build()
    allowed = asked.candidate_chains
    if asked.verify_window:
        allowed = allowed + asked.window_chains
    expected = {path for path in prefixes(allowed) if len(path) <= len(asked.primary)}
    accepted = {path_of(tree, node) for node in np.flatnonzero(tree.acceptable).tolist()}
    assert accepted == expected


@given(tree_inputs(limited=True), st.booleans())
def test_primary_comes_first_and_whole(asked: TreeInput, merge: bool) -> None:
    tree = asked.build(merge)
    size = len(asked.primary)
    assert tree.primary_size == size
    assert shape(tree)[: 1 + size] == list(
        zip([asked.root, *asked.primary], range(-1, size), strict=True)
    )


@given(tree_inputs(limited=True), st.booleans())
def test_nodes_are_in_depth_first_preorder(asked: TreeInput, merge: bool) -> None:
    tree = asked.build(merge)
    for node in range(1, tree.size):
        assert tree.parents[node] in lineage(tree, node - 1)


@given(tree_inputs(limited=True), st.booleans())
def test_depth_is_the_number_of_ancestors(asked: TreeInput, merge: bool) -> None:
    tree = asked.build(merge)
    assert tree.depths.tolist() == [len(lineage(tree, node)) - 1 for node in range(tree.size)]


@given(tree_inputs(limited=True), st.booleans())
def test_ancestry_runs_from_the_root_to_the_node(asked: TreeInput, merge: bool) -> None:
    tree = asked.build(merge)
    for node in range(tree.size):
        assert tree.ancestry(node) == lineage(tree, node)


# Branches


@given(tree_inputs(limited=True), st.booleans())
def test_every_node_is_a_branchs_own_exactly_once(asked: TreeInput, merge: bool) -> None:
    own = [node for path, count in branches(asked.build(merge)) for node in path[-count:]]
    assert own == list(range(asked.build(merge).size))


@given(tree_inputs(limited=True), st.booleans())
def test_causal_attention_along_a_branch_sees_exactly_the_ancestors(
    asked: TreeInput, merge: bool
) -> None:
    tree = asked.build(merge)
    for path, count in branches(tree):
        for index in range(len(path) - count, len(path)):
            assert path[: index + 1] == lineage(tree, path[index])


@given(tree_inputs(limited=True), st.booleans())
def test_branch_0_is_the_primary_and_nothing_more(asked: TreeInput, merge: bool) -> None:
    path, count = branches(asked.build(merge))[0]
    assert path == list(range(1 + len(asked.primary)))
    assert count == len(path)


# Limits


@given(tree_inputs(limited=True), st.booleans())
def test_tree_keeps_its_limits(asked: TreeInput, merge: bool) -> None:
    tree = asked.build(merge)
    assert tree.size <= asked.max_nodes
    assert tree.depths.max() <= asked.max_depth
    assert len(tree.branch_starts()) - 1 <= asked.max_branches - 1


@given(tree_inputs(limited=True), st.booleans())
def test_nothing_deeper_than_the_primary_is_acceptable(asked: TreeInput, merge: bool) -> None:
    tree = asked.build(merge)
    assert tree.depths[tree.acceptable].max() <= len(asked.primary)


@given(tree_inputs(limited=True), st.booleans())
def test_window_is_fed_whole_or_not_at_all(asked: TreeInput, merge: bool) -> None:
    tree = asked.build(merge)
    if len(tree.window_leaves):
        leaves = [path_of(tree, node) for node in tree.window_leaves.tolist()]
        assert leaves == asked.window_chains
        return
    without = TreeInput(**{**vars(asked), "window_rows": []}).build(merge)
    assert shape(tree) == shape(without)
    assert tree.acceptable.tolist() == without.acceptable.tolist()


WINDOW = [[11, 12], [21, 22, 23], [31, 32, 33]]
"""W = 3, N = 4: 8 nodes behind the root, the deepest at 4, in 3 branches."""


@pytest.mark.parametrize(
    ("nodes", "depth", "branches", "fits"),
    [(10, 4, 4, True), (9, 4, 4, False), (10, 3, 4, False), (10, 4, 3, False)],
)
def test_window_that_exceeds_one_limit_by_one_is_left_out_whole(
    nodes: int, depth: int, branches: int, fits: bool
) -> None:
    tree = build_tree(0, [1], (), WINDOW, max_nodes=nodes, max_depth=depth, max_branches=branches)
    assert tree.size == (10 if fits else 2)
    assert len(tree.window_leaves) == (3 if fits else 0)


@given(chains(3), windows())
def test_window_always_fits_into_its_own_size(primary: list[int], rows: list[list[int]]) -> None:
    size = sum(len(row) for row in rows)
    width = len(rows[0]) + 1 if rows else 0
    tree = build_tree(
        0,
        primary,
        (),
        rows,
        max_nodes=1 + len(primary) + size,
        max_depth=max(len(primary), width + len(rows) - 2),
        max_branches=1 + width,
    )
    assert len(tree.window_leaves) == width


def test_candidate_with_too_many_nodes_is_left_out_whole_and_a_smaller_one_still_fits() -> None:
    tree = build_tree(0, [1, 2], [[3, 4], [1, 5]], max_nodes=4, max_depth=9, max_branches=9)
    assert shape(tree) == [(0, -1), (1, 0), (2, 1), (5, 1)]


def test_candidate_beyond_the_last_branch_is_left_out_and_one_already_held_is_not_counted() -> None:
    candidates = [[1, 2], [3], [4], [3]]
    tree = build_tree(0, [1, 2], candidates, max_nodes=99, max_depth=9, max_branches=2)
    assert shape(tree) == [(0, -1), (1, 0), (2, 1), (3, 0)]


def test_one_branch_holds_the_primary_alone() -> None:
    tree = build_tree(0, [1, 2], [[3], [1, 3]], [[]], max_nodes=99, max_depth=9, max_branches=1)
    assert shape(tree) == [(0, -1), (1, 0), (2, 1)]
    assert len(tree.window_leaves) == 0


# Grammar


@pytest.mark.parametrize(
    ("limit", "acceptable"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (9, [0, 1, 2])]
)
def test_accepting_primary_leaves_the_first_primary_drafts_acceptable(
    limit: int, acceptable: list[int]
) -> None:
    tree = build_tree(9, [1, 2], [[1, 3], [4]], [[5], [6, 7]], **NO_LIMITS)
    narrowed = tree.accepting_primary(limit)
    assert np.flatnonzero(narrowed.acceptable).tolist() == acceptable
    assert shape(narrowed) == shape(tree)
    assert narrowed.window_leaves.tolist() == tree.window_leaves.tolist()


# Successors


@given(tree_inputs(limited=True), st.booleans())
def test_successors_are_the_children_by_token(asked: TreeInput, merge: bool) -> None:
    tree = asked.build(merge)
    expected: dict[tuple[int, int], list[int]] = {}
    for node in range(1, tree.size):
        key = (int(tree.parents[node]), int(tree.token_ids[node]))
        expected.setdefault(key, []).append(node)
    assert {key: list(nodes) for key, nodes in tree.successors.items()} == expected


@given(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 3))
def test_linear_tree_is_the_tree_of_a_draft_alone(drafts: list[int], root: int) -> None:
    linear, built = linear_tree(drafts, root), build_tree(root, drafts, **NO_LIMITS)
    for column in ("token_ids", "parents", "depths", "window_leaves", "acceptable"):
        ours, theirs = getattr(linear, column), getattr(built, column)
        assert (ours.tolist(), ours.dtype) == (theirs.tolist(), theirs.dtype)
    assert linear.primary_size == built.primary_size
    assert {key: [*nodes] for key, nodes in linear.successors.items()} == built.successors
