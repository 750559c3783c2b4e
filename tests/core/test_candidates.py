"""Merged and valued candidates: values multiplied by hand, and what holds for any candidates."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import TOKENS
from vllm_lookahead.core.acceptance import (
    NUM_CLASSES,
    NUM_DEPTHS,
    AcceptanceModel,
    custom_class,
    pool_class,
    suffix_class,
)
from vllm_lookahead.core.candidates import Candidate, ValuedCandidates

SURE, LIKELY, RARE = suffix_class(4), suffix_class(0), custom_class(3)
GUESSED = pool_class(0, True, True)


def model_of(**firsts: float) -> AcceptanceModel:
    """A model in which all tokens of a class have the given chance, at any depth."""
    model = AcceptanceModel()
    for name, chance in {"sure": 1.0, "likely": 0.5, "rare": 0.25, **firsts}.items():
        first = {"sure": SURE, "likely": LIKELY, "rare": RARE, "guessed": GUESSED}[name]
        model.probability[first : first + NUM_DEPTHS] = [chance] * NUM_DEPTHS
    return model


def candidate(first_class: int, *tokens: int) -> Candidate:
    return Candidate(tokens, first_class)


# Values


def test_value_of_a_token_is_the_chance_that_it_and_all_before_it_are_right() -> None:
    valued = ValuedCandidates.of([candidate(LIKELY, 7, 8, 9)], model_of())
    assert valued.values == [1, 0.5, 0.25, 0.125]


def test_chance_of_a_token_is_that_of_its_depth_up_to_the_deepest_class() -> None:
    model = model_of(likely=1.0)
    model.probability[LIKELY + 1] = 0.25
    model.probability[LIKELY + NUM_DEPTHS - 1] = 0.5
    valued = ValuedCandidates.of([Candidate(tuple(range(18)), LIKELY)], model)
    # The tokens at depth 15 and deeper, counted from 0, are of the same class.
    assert valued.values == [1, 1, *[0.25] * 14, 0.125, 0.0625, 0.03125]
    assert valued.classes[-3:] == [LIKELY + 15] * 3


def test_candidates_share_their_common_prefix() -> None:
    valued = ValuedCandidates.of(
        [candidate(LIKELY, 7, 8), candidate(RARE, 7, 9), candidate(RARE, 5)], model_of()
    )
    assert valued.tokens == [-1, 7, 8, 9, 5]
    assert valued.paths == [[1, 2], [1, 3], [4]]
    assert valued.children == [[1, 4], [2, 3], [], [], []]
    # 9 follows a token that is right with a chance of 0.5.
    assert valued.values == [1, 0.5, 0.25, 0.125, 0.25]


def test_token_found_by_a_better_source_too_has_that_ones_chance_and_class() -> None:
    valued = ValuedCandidates.of([candidate(RARE, 7, 8), candidate(LIKELY, 7, 9)], model_of())
    assert valued.values == [1, 0.5, 0.0625, 0.25]
    assert valued.classes == [-1, LIKELY, RARE + 1, LIKELY + 1]


def test_branch_beside_the_first_one_pays_its_price_where_it_starts() -> None:
    valued = ValuedCandidates.of(
        [candidate(LIKELY, 7, 8), candidate(SURE, 5, 6), candidate(SURE, 7, 9)],
        model_of(sure=0.5),
        branch_price=0.125,
    )
    # The root's second child, and 7's; not the only child of the former.
    assert valued.tokens == [-1, 7, 8, 5, 6, 9]
    assert valued.values == [1, 0.5, 0.25, 0.375, 0.25, 0.125]


def test_token_behind_the_start_of_a_branch_is_worth_no_more_than_that() -> None:
    valued = ValuedCandidates.of(
        [candidate(LIKELY, 7), candidate(SURE, 5, 6)], model_of(), branch_price=0.125
    )
    assert valued.values == [1, 0.5, 0.875, 0.875]


def test_price_is_paid_still_when_a_better_source_finds_the_branch_too() -> None:
    valued = ValuedCandidates.of(
        [candidate(LIKELY, 7), candidate(RARE, 5), candidate(LIKELY, 5)],
        model_of(),
        branch_price=0.125,
    )
    assert valued.values == [1, 0.5, 0.375]


def test_branch_may_be_worth_less_than_nothing() -> None:
    valued = ValuedCandidates.of(
        [candidate(LIKELY, 7), candidate(RARE, 5)], model_of(), branch_price=0.5
    )
    assert valued.values == [1, 0.5, -0.25]


def test_candidate_ends_before_a_token_less_likely_than_the_floor() -> None:
    chain = [candidate(LIKELY, 7, 8, 9)]
    assert ValuedCandidates.of(chain, model_of(), floor=0.25).paths == [[1, 2]]
    assert ValuedCandidates.of(chain, model_of(), floor=0.26).paths == [[1]]


def test_first_token_is_kept_however_unlikely() -> None:
    valued = ValuedCandidates.of([candidate(RARE, 7, 8)], model_of(), floor=0.9)
    assert valued.tokens == [-1, 7]


def test_without_candidates_there_is_nothing() -> None:
    valued = ValuedCandidates.of([], model_of())
    assert (valued.tokens, valued.values, valued.paths) == ([-1], [1], [])


# Choosing


def test_chosen_are_the_leading_tokens_worth_the_cutoff() -> None:
    valued = ValuedCandidates.of([candidate(LIKELY, 7, 8, 9), candidate(RARE, 5)], model_of())
    for cutoff, counts in [
        (float("inf"), [0, 0]),
        (0.5, [1, 0]),
        (0.25, [2, 1]),
        (0.2, [2, 1]),
        (0.125, [3, 1]),
        (float("-inf"), [3, 1]),
    ]:
        assert [valued.chosen(index, cutoff) for index in range(2)] == counts


# Learning


class Recorder(AcceptanceModel):
    """A model that writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, bool]] = []

    def learn(self, token_class: int, hit: bool) -> None:
        self.told.append((token_class, hit))


def learned(candidates: list[Candidate], *emitted: int) -> list[tuple[int, bool]]:
    recorder = Recorder()
    ValuedCandidates.of(candidates, model_of()).learn(emitted, recorder)
    return recorder.told


def test_tokens_that_came_true_are_hits_up_to_the_first_that_did_not() -> None:
    chain = [candidate(LIKELY, 7, 8, 9, 10)]
    assert learned(chain, 7, 8, 3, 10) == [(LIKELY, True), (LIKELY + 1, True), (LIKELY + 2, False)]


def test_token_that_nobody_can_tell_about_is_not_learned() -> None:
    # What follows a wrong token, and what would follow the text that was emitted.
    assert learned([candidate(LIKELY, 7, 8)], 3, 8) == [(LIKELY, False)]
    assert learned([candidate(LIKELY, 7, 8)], 7) == [(LIKELY, True)]
    assert learned([candidate(LIKELY, 7)], 7, 5) == [(LIKELY, True)]


def test_all_candidates_for_the_same_place_learn() -> None:
    candidates = [candidate(LIKELY, 7, 8), candidate(RARE, 5, 6), candidate(SURE, 5, 4)]
    assert learned(candidates, 5, 6) == [
        (LIKELY, False),
        (SURE, True),
        (RARE + 1, True),
        (SURE + 1, False),
    ]


def test_accepted_nodes_are_those_that_came_true() -> None:
    valued = ValuedCandidates.of([candidate(LIKELY, 7, 8), candidate(RARE, 7, 9)], model_of())
    valued.learn([7, 9, 1], AcceptanceModel())
    assert [valued.tokens[node] for node in valued.accepted] == [7, 9]


def test_guessed_are_accepted_tokens_of_the_windows_ngrams_that_were_worth_feeding() -> None:
    model = model_of(guessed=0.5)
    valued = ValuedCandidates.of([candidate(RARE, 7), candidate(GUESSED, 7, 8, 9)], model)
    valued.learn([7, 8, 3], AcceptanceModel())
    # 7 and 8, worth 0.5 and 0.25: the window's n-gram is the better source of 7.
    assert [valued.num_guessed(cutoff) for cutoff in (0.6, 0.5, 0.25)] == [0, 1, 2]


def test_token_that_a_better_source_found_too_is_not_guessed() -> None:
    model = model_of(guessed=0.25)
    valued = ValuedCandidates.of([candidate(LIKELY, 7), candidate(GUESSED, 7, 8)], model)
    valued.learn([7, 8], AcceptanceModel())
    assert [valued.tokens[node] for node in valued.accepted] == [7, 8]
    assert valued.num_guessed(0.0) == 1


# Any candidates


@st.composite
def models(draw: st.DrawFn) -> AcceptanceModel:
    model = AcceptanceModel()
    for first in (SURE, LIKELY, RARE, GUESSED):
        chances = st.lists(st.floats(0, 1), min_size=NUM_DEPTHS, max_size=NUM_DEPTHS)
        model.probability[first : first + NUM_DEPTHS] = draw(chances)
    return model


def candidate_lists() -> st.SearchStrategy[list[Candidate]]:
    chains = st.lists(TOKENS, min_size=1, max_size=6).map(tuple)
    classes = st.sampled_from([SURE, LIKELY, RARE, GUESSED])
    return st.lists(st.builds(Candidate, chains, classes), max_size=6)


PRICES = st.floats(0, 0.5)


def parents(valued: ValuedCandidates) -> dict[int, int]:
    return {child: node for node, own in enumerate(valued.children) for child in own}


@given(candidate_lists(), models(), PRICES)
def test_paths_spell_the_candidates(
    candidates: list[Candidate], model: AcceptanceModel, price: float
) -> None:
    valued = ValuedCandidates.of(candidates, model, price)
    above = parents(valued)
    for given_candidate, path in zip(candidates, valued.paths, strict=True):
        assert tuple(valued.tokens[node] for node in path) == given_candidate.tokens
        assert all(above[child] == node for node, child in pairwise([0, *path]))


@given(candidate_lists(), models(), PRICES)
def test_every_prefix_of_a_candidate_is_one_node(
    candidates: list[Candidate], model: AcceptanceModel, price: float
) -> None:
    valued = ValuedCandidates.of(candidates, model, price)
    prefixes = {each.tokens[:size] for each in candidates for size in range(len(each.tokens) + 1)}
    assert len(valued.tokens) == len(prefixes | {()})
    for columns in (valued.classes, valued.values, valued.children):
        assert len(columns) == len(valued.tokens)
    assert all(node < child for child, node in parents(valued).items())


@given(candidate_lists(), models(), PRICES, st.floats(0, 1))
def test_child_is_never_worth_more_than_its_parent(
    candidates: list[Candidate], model: AcceptanceModel, price: float, floor: float
) -> None:
    valued = ValuedCandidates.of(candidates, model, price, floor)
    assert all(
        valued.values[child] <= valued.values[node] for child, node in parents(valued).items()
    )


@given(candidate_lists(), models())
def test_value_without_prices_lies_between_one_candidates_chance_and_the_best_ones(
    candidates: list[Candidate], model: AcceptanceModel
) -> None:
    valued = ValuedCandidates.of(candidates, model)
    for each, path in zip(candidates, valued.paths, strict=True):
        least = most = 1.0
        for depth, node in enumerate(path):
            prefix = each.tokens[: depth + 1]
            sharing = [other for other in candidates if other.tokens[: depth + 1] == prefix]
            least *= model.probability[each.first_class + depth]
            most *= max(model.probability[other.first_class + depth] for other in sharing)
            assert least - 1e-9 <= valued.values[node] <= most + 1e-9


@given(candidate_lists(), models(), PRICES)
def test_price_lowers_a_value_by_no_more_than_the_prices_on_its_path(
    candidates: list[Candidate], model: AcceptanceModel, price: float
) -> None:
    free, priced = ValuedCandidates.of(candidates, model), ValuedCandidates.of(
        candidates, model, price
    )  # fmt: skip
    above = parents(priced)
    for node in range(1, len(priced.tokens)):
        branches, each = 0, node
        while each:
            branches += priced.children[above[each]][0] != each
            each = above[each]
        fall = free.values[node] - priced.values[node]
        assert -1e-9 <= fall <= branches * price + 1e-9


@given(candidate_lists(), models(), PRICES, st.floats(-0.5, 1))
def test_tokens_worth_a_cutoff_are_a_tree_and_all_that_is_worth_it(
    candidates: list[Candidate], model: AcceptanceModel, price: float, cutoff: float
) -> None:
    valued = ValuedCandidates.of(candidates, model, price)
    chosen = {
        node
        for index, path in enumerate(valued.paths)
        for node in path[: valued.chosen(index, cutoff)]
    }
    nodes = range(1, len(valued.values))
    assert chosen == {node for node in nodes if valued.values[node] >= cutoff}


@given(candidate_lists(), models(), st.floats(0, 1))
def test_floor_cuts_candidates_and_leaves_at_least_their_first_token(
    candidates: list[Candidate], model: AcceptanceModel, floor: float
) -> None:
    valued = ValuedCandidates.of(candidates, model, floor=floor)
    for each, path in zip(candidates, valued.paths, strict=True):
        spelt = tuple(valued.tokens[node] for node in path)
        assert spelt
        assert spelt == each.tokens[: len(spelt)]
        assert all(valued.values[node] >= floor - 1e-9 for node in path[1:])


@given(candidate_lists(), models(), st.lists(TOKENS, min_size=1, max_size=8))
def test_accepted_nodes_spell_the_longest_prefix_of_the_text_that_a_candidate_holds(
    candidates: list[Candidate], model: AcceptanceModel, emitted: list[int]
) -> None:
    valued = ValuedCandidates.of(candidates, model)
    valued.learn(emitted, Recorder())
    prefixes = {each.tokens[:size] for each in candidates for size in range(len(each.tokens) + 1)}
    longest = max(
        size for size in range(len(emitted) + 1) if tuple(emitted[:size]) in prefixes | {()}
    )
    assert [valued.tokens[node] for node in valued.accepted] == emitted[:longest]


def test_classes_of_these_tests_do_not_overlap() -> None:
    firsts = [SURE, LIKELY, RARE, GUESSED]
    covered = {first + depth for first in firsts for depth in range(NUM_DEPTHS)}
    assert len(covered) == 4 * NUM_DEPTHS
    assert max(covered) < NUM_CLASSES


@pytest.mark.parametrize("emitted", [[], [9]])
def test_nothing_is_accepted_of_candidates_that_were_all_wrong(emitted: list[int]) -> None:
    valued = ValuedCandidates.of([candidate(LIKELY, 7)], model_of())
    valued.learn(emitted, AcceptanceModel())
    assert valued.accepted == []
    assert valued.num_guessed(0.0) == 0
