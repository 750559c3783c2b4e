"""The tree of candidates: values multiplied by hand, and what holds for any candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import TOKENS, prefixes
from vllm_lookahead.core.acceptance import (
    NUM_CLASSES,
    NUM_DEPTHS,
    AcceptanceModel,
    custom_class,
    pool_class,
)
from vllm_lookahead.core.candidates import CandidateTree, Chain
from vllm_lookahead.core.controller import EVERYTHING, NOTHING
from vllm_lookahead.core.suffix import LONGEST_MATCH

SURE, LIKELY, RARE = custom_class(0), custom_class(1), custom_class(3)
GUESSED = pool_class(0, True, True)
CLASSES = [SURE, LIKELY, RARE, GUESSED]

PLENTY = 1000
LEAST = -PLENTY
"""A cutoff below all values here."""

Candidate = tuple[int, Chain]
"""The class of the first token, and the tokens."""
Table = dict[int, list[tuple[int, int]]]
"""(token, class) of what follows a token, whatever was before it."""


def model_of(**firsts: float) -> AcceptanceModel:
    """A model in which all tokens of a class have the given chance, at any depth."""
    model = AcceptanceModel()
    for name, chance in {"sure": 1.0, "likely": 0.5, "rare": 0.25, **firsts}.items():
        first = {"sure": SURE, "likely": LIKELY, "rare": RARE, "guessed": GUESSED}[name]
        model.probability[first : first + NUM_DEPTHS] = [chance] * NUM_DEPTHS
    return model


def candidate(first_class: int, *tokens: int) -> Candidate:
    return first_class, tokens


def tree_of(
    candidates: Iterable[Candidate],
    model: AcceptanceModel | None = None,
    branch_price: float = 0.0,
    floor: float = 0.0,
) -> CandidateTree:
    """The tree to which all candidates were added."""
    tree = CandidateTree(model or model_of(), branch_price, floor)
    for first_class, tokens in candidates:
        tree.add(tokens, first_class)
    return tree


def predictor(table: Table) -> Callable[[Chain], list[tuple[int, int]]]:
    return lambda tail: list(table.get(tail[-1], []))


def grown(
    table: Table,
    root: int = 0,
    model: AcceptanceModel | None = None,
    max_depth: int = 3,
    max_nodes: int = PLENTY,
    branch_price: float = 0.0,
    floor: float = 0.0,
) -> CandidateTree:
    """The tree that was grown behind ``root`` by what the table says."""
    tree = CandidateTree(model or model_of(), branch_price, floor)
    tree.grow(predictor(table), [root], max_depth, max_nodes)
    return tree


def path(tree: CandidateTree, node: int) -> list[int]:
    """Nodes from the root, which is left out, to ``node``."""
    return [*path(tree, tree.parents[node]), node] if node else []


def spell(tree: CandidateTree, node: int) -> Chain:
    return tuple(tree.tokens[each] for each in path(tree, node))


def spelt(tree: CandidateTree) -> dict[Chain, int]:
    """All nodes by the tokens from the root to there; no two may have the same."""
    chains: list[Chain] = [()]
    for node in range(1, len(tree.tokens)):
        chains.append((*chains[tree.parents[node]], tree.tokens[node]))
    nodes = {chain: node for node, chain in enumerate(chains)}
    assert len(nodes) == len(chains)
    return nodes


# Values


def test_value_of_a_token_is_the_chance_that_it_and_all_before_it_are_right() -> None:
    assert tree_of([candidate(LIKELY, 7, 8, 9)]).values == [1, 0.5, 0.25, 0.125]


def test_chance_of_a_token_is_that_of_its_depth_up_to_the_deepest_class() -> None:
    model = model_of(likely=1.0)
    model.probability[LIKELY + 1] = 0.25
    model.probability[LIKELY + NUM_DEPTHS - 1] = 0.5
    tree = tree_of([(LIKELY, tuple(range(18)))], model)
    # The tokens at depth 15 and deeper, counted from 0, are of the same class.
    assert tree.values == [1, 1, *[0.25] * 14, 0.125, 0.0625, 0.03125]
    assert tree.classes[-3:] == [LIKELY + 15] * 3


def test_candidates_share_their_common_prefix() -> None:
    tree = tree_of([candidate(LIKELY, 7, 8), candidate(RARE, 7, 9), candidate(RARE, 5)])
    assert tree.tokens == [-1, 7, 8, 9, 5]
    assert tree.parents == [-1, 0, 1, 1, 0]
    assert tree.children == [[1, 4], [2, 3], [], [], []]
    # 9 follows a token that is right with a chance of 0.5.
    assert tree.values == [1, 0.5, 0.25, 0.125, 0.25]


def test_token_found_by_a_better_source_too_has_that_ones_chance_and_class() -> None:
    tree = tree_of([candidate(RARE, 7, 8), candidate(LIKELY, 7, 9)])
    assert tree.values == [1, 0.5, 0.0625, 0.25]
    assert tree.classes == [-1, LIKELY, RARE + 1, LIKELY + 1]


def test_token_found_by_a_worse_source_too_stays_as_it_is() -> None:
    tree = tree_of([candidate(LIKELY, 7), candidate(RARE, 7)])
    assert (tree.values, tree.classes) == ([1, 0.5], [-1, LIKELY])


def test_branch_beside_the_first_one_pays_its_price_where_it_starts() -> None:
    tree = tree_of(
        [candidate(LIKELY, 7, 8), candidate(SURE, 5, 6), candidate(SURE, 7, 9)],
        model_of(sure=0.5),
        branch_price=0.125,
    )
    # The root's second child, and 7's; not the only child of the former.
    assert tree.tokens == [-1, 7, 8, 5, 6, 9]
    assert tree.values == [1, 0.5, 0.25, 0.375, 0.25, 0.125]


def test_token_behind_the_start_of_a_branch_is_worth_no_more_than_that() -> None:
    tree = tree_of([candidate(LIKELY, 7), candidate(SURE, 5, 6)], branch_price=0.125)
    assert tree.values == [1, 0.5, 0.875, 0.875]


def test_price_is_paid_still_when_a_better_source_finds_the_branch_too() -> None:
    tree = tree_of(
        [candidate(LIKELY, 7), candidate(RARE, 5), candidate(LIKELY, 5)], branch_price=0.125
    )
    assert tree.values == [1, 0.5, 0.375]


def test_branch_may_be_worth_less_than_nothing() -> None:
    tree = tree_of([candidate(LIKELY, 7), candidate(RARE, 5)], branch_price=0.5)
    assert tree.values == [1, 0.5, -0.25]


def test_candidate_ends_before_a_token_less_likely_than_the_floor() -> None:
    chain = [candidate(LIKELY, 7, 8, 9)]
    assert tree_of(chain, floor=0.25).tokens == [-1, 7, 8]
    assert tree_of(chain, floor=0.26).tokens == [-1, 7]


def test_first_token_is_kept_however_unlikely_unless_that_is_not_wanted() -> None:
    tree = tree_of([candidate(RARE, 7, 8)], floor=0.9)
    assert tree.tokens == [-1, 7]
    tree.add([5], RARE, keep_first=False)
    assert tree.tokens == [-1, 7]
    tree.add([5], SURE, keep_first=False)
    assert tree.tokens == [-1, 7, 5]


def test_without_candidates_there_is_nothing() -> None:
    for tree in (tree_of([]), tree_of([candidate(SURE)]), grown({})):
        assert (tree.tokens, tree.values) == ([-1], [1])
        assert tree.select(EVERYTHING, PLENTY) == []


# Growth


def test_tree_grows_by_what_follows_each_token() -> None:
    tree = grown({0: [(1, LIKELY), (2, RARE)], 1: [(3, LIKELY)], 2: [(3, SURE)]}, max_depth=2)
    assert {chain: tree.values[node] for chain, node in spelt(tree).items()} == {
        (): 1,
        (1,): 0.5,
        (2,): 0.25,
        (1, 3): 0.25,
        (2, 3): 0.25,
    }


def test_likeliest_token_is_expanded_first() -> None:
    table = {
        0: [(1, RARE), (2, SURE)],
        1: [(5, SURE)],
        2: [(3, LIKELY)],
        3: [(4, RARE)],
        4: [(6, SURE)],
    }
    tree = grown(table, max_depth=9)
    # Expanded are the root, 2 (1), 2 3 (0.5), 1 (0.25), and the later of the two with 0.125.
    chains = [spell(tree, node) for node in range(1, 7)]
    assert chains == [(2,), (1,), (2, 3), (2, 3, 4), (1, 5), (2, 3, 4, 6)]
    assert tree.values == [1, 1, 0.25, 0.5, 0.125, 0.25, 0.125]


def test_no_candidate_is_longer_than_the_depth() -> None:
    for depth in (1, 2, 5):
        assert grown({0: [(0, SURE)]}, max_depth=depth).tokens == [-1, *[0] * depth]


@pytest.mark.parametrize(("max_nodes", "size"), [(1, 3), (2, 3), (3, 5), (4, 5), (5, 7)])
def test_no_node_is_expanded_when_many_have_been_added(max_nodes: int, size: int) -> None:
    table = {0: [(0, LIKELY), (1, LIKELY)], 1: [(0, LIKELY), (1, LIKELY)]}
    assert len(grown(table, max_depth=9, max_nodes=max_nodes).tokens) == size


def test_growth_ends_before_tokens_less_likely_than_the_floor() -> None:
    table = {0: [(1, RARE), (0, LIKELY)], 1: [(0, SURE)]}
    assert set(spelt(grown(table, floor=0.25))) == {(), (0,), (1,), (0, 0), (1, 0)}


def test_what_may_follow_the_root_is_all_added_but_expanded_only_if_likely() -> None:
    table = {0: [(1, RARE), (2, LIKELY), (3, RARE)], 1: [(4, SURE)], 2: [(4, SURE)]}
    assert set(spelt(grown(table, floor=0.3))) == {(), (1,), (2,), (3,), (2, 4)}
    assert set(spelt(grown(table, floor=0.9))) == {(), (1,), (2,), (3,)}


def test_likeliest_of_siblings_pays_no_branch_price() -> None:
    tree = grown({0: [(1, RARE), (2, LIKELY), (3, RARE)]}, branch_price=0.125)
    assert (tree.tokens, tree.values) == ([-1, 2, 1, 3], [1, 0.5, 0.125, 0.125])


def test_prediction_is_asked_for_the_end_of_the_text_with_what_was_added() -> None:
    asked = []

    def predict(tail: Chain) -> list[tuple[int, int]]:
        asked.append(tail)
        return [(len(asked), SURE)]

    CandidateTree(model_of()).grow(predict, list(range(10, 20)), 3, PLENTY)
    assert asked == [
        (12, 13, 14, 15, 16, 17, 18, 19),
        (13, 14, 15, 16, 17, 18, 19, 1),
        (14, 15, 16, 17, 18, 19, 1, 2),
    ]
    assert {len(tail) for tail in asked} == {LONGEST_MATCH}


def test_growth_merges_with_what_other_sources_have_added() -> None:
    tree = tree_of([candidate(RARE, 1, 2), candidate(SURE, 3, 4)])
    tree.grow(predictor({0: [(1, LIKELY), (3, LIKELY), (5, RARE)], 1: [(2, LIKELY)]}), [0], 3, 9)
    nodes = spelt(tree)
    assert {chain: (tree.values[node], tree.classes[node]) for chain, node in nodes.items()} == {
        (): (1, -1),
        (1,): (0.5, LIKELY),
        (1, 2): (0.25, LIKELY),
        (3,): (1, SURE),
        (3, 4): (1, SURE + 1),
        (5,): (0.25, RARE),
    }


def test_growth_goes_on_behind_a_token_with_the_better_chance() -> None:
    tree = tree_of([candidate(SURE, 1)], floor=0.4)
    tree.grow(predictor({0: [(1, RARE)], 1: [(2, LIKELY)]}), [0], 3, PLENTY)
    assert (tree.tokens, tree.values) == ([-1, 1, 2], [1, 1, 0.5])


def test_what_other_sources_have_added_takes_no_room_from_growth() -> None:
    tree = tree_of([candidate(RARE, token) for token in range(10, 20)])
    tree.grow(predictor({0: [(1, SURE)], 1: [(2, SURE)], 2: [(3, SURE)]}), [0], 3, max_nodes=2)
    assert {(1,), (1, 2)} <= set(spelt(tree))
    assert (1, 2, 3) not in spelt(tree)


# Choosing


def test_selected_are_the_tokens_worth_the_cutoff() -> None:
    tree = tree_of([candidate(LIKELY, 7, 8, 9), candidate(RARE, 5)])
    for cutoff, candidates in [
        (NOTHING, []),
        (0.6, []),
        (0.5, [(7,)]),
        (0.25, [(7, 8), (5,)]),
        (0.2, [(7, 8), (5,)]),
        (0.125, [(7, 8, 9), (5,)]),
        (EVERYTHING, [(7, 8, 9), (5,)]),
    ]:
        assert tree.select(cutoff, PLENTY) == candidates


def test_candidates_that_are_expected_to_add_most_tokens_come_first() -> None:
    tree = tree_of(
        [candidate(LIKELY, 1), candidate(SURE, 2), candidate(RARE, 3), candidate(LIKELY, 4, 5, 6)]
    )
    # 1 is worth 0.5, but 4 5 6 is worth 0.5 + 0.25 + 0.125.
    assert tree.select(0.0, PLENTY) == [(2,), (4, 5, 6), (1,), (3,)]


def test_candidates_worth_the_same_come_in_the_order_in_which_they_were_added() -> None:
    tree = tree_of([candidate(RARE, 3), candidate(LIKELY, 2), candidate(LIKELY, 1)])
    assert tree.select(0.0, PLENTY) == [(2,), (1,), (3,)]


def test_most_valuable_tokens_are_kept_where_there_are_too_many_candidates() -> None:
    tree = tree_of([candidate(RARE, 1), candidate(LIKELY, 2, 3), candidate(SURE, 4, 5)])
    assert [tree.select(0.0, limit) for limit in range(4)] == [
        [],
        [(4, 5)],
        [(4, 5), (2, 3)],
        [(4, 5), (2, 3), (1,)],
    ]


def test_candidate_goes_on_where_no_further_one_may_start() -> None:
    # 1 2 and 1 3 share a token; with one candidate only the better one goes on.
    tree = tree_of([candidate(RARE, 1, 2), candidate(LIKELY, 1, 3, 4)])
    assert tree.select(0.0, 1) == [(1, 3, 4)]
    assert tree.select(0.0, 2) == [(1, 3, 4), (1, 2)]


def test_candidates_come_in_the_order_in_which_they_were_added_when_everything_is_fed() -> None:
    tree = tree_of([candidate(RARE, 1, 2), candidate(LIKELY, 3), candidate(SURE, 4, 5)])
    assert [tree.select(EVERYTHING, limit) for limit in range(4)] == [
        [],
        [(4, 5)],
        [(3,), (4, 5)],
        [(1, 2), (3,), (4, 5)],
    ]


def test_selection_may_be_made_anew() -> None:
    tree = tree_of([candidate(LIKELY, 7, 8)])
    assert tree.select(EVERYTHING, PLENTY) == [(7, 8)]
    assert tree.select(NOTHING, PLENTY) == []
    tree.learn([7, 8])
    assert tree.num_accepted == 0


# Learning


class Recorder(AcceptanceModel):
    """A model that writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.probability = model_of().probability
        self.told: list[tuple[int, bool]] = []

    def learn(self, token_class: int, hit: bool) -> None:
        self.told.append((token_class, hit))


def learned(candidates: list[Candidate], *emitted: int) -> list[tuple[int, bool]]:
    recorder = Recorder()
    tree_of(candidates, recorder).learn(emitted)
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


def test_grown_tokens_learn_wherever_the_token_before_them_came_true() -> None:
    recorder = Recorder()
    table = {0: [(1, LIKELY), (2, RARE)], 1: [(3, SURE)], 2: [(4, GUESSED), (5, LIKELY)]}
    grown(table, model=recorder).learn([2, 5, 6])
    assert sorted(recorder.told) == sorted(
        [(LIKELY, False), (RARE, True), (GUESSED, False), (LIKELY, True)]
    )


def test_tokens_are_learned_about_whether_they_were_fed_or_not() -> None:
    told = []
    for cutoff in (EVERYTHING, NOTHING):
        recorder = Recorder()
        tree = tree_of([candidate(LIKELY, 7, 8), candidate(RARE, 5)], recorder)
        tree.select(cutoff, PLENTY)
        tree.learn([7, 8, 9])
        told.append(recorder.told)
    assert told[0] == told[1] == [(LIKELY, True), (RARE, False), (LIKELY + 1, True)]


def test_accepted_nodes_are_those_that_came_true() -> None:
    tree = tree_of([candidate(LIKELY, 7, 8), candidate(RARE, 7, 9)])
    tree.learn([7, 9, 1])
    assert [tree.tokens[node] for node in tree.accepted] == [7, 9]


@pytest.mark.parametrize(("cutoff", "count"), [(0.6, 0), (0.5, 1), (0.25, 2), (0.1, 2)])
def test_only_accepted_tokens_that_were_fed_are_counted(cutoff: float, count: int) -> None:
    # 7 and 8, worth 0.5 and 0.25: the window's n-gram is the better source of 7.
    candidates = [candidate(RARE, 7), candidate(GUESSED, 7, 8, 9)]
    tree = tree_of(candidates, model_of(guessed=0.5))
    tree.select(cutoff, PLENTY)
    tree.learn([7, 8, 3])
    assert (tree.num_accepted, tree.num_guessed) == (count, count)


def test_accepted_token_beyond_the_limit_of_candidates_was_not_fed() -> None:
    tree = tree_of([candidate(SURE, 5), candidate(GUESSED, 7)], model_of(guessed=0.5))
    tree.select(EVERYTHING, 1)
    tree.learn([7])
    assert (tree.num_accepted, tree.num_guessed) == (0, 0)


def test_token_that_a_better_source_found_too_is_not_guessed() -> None:
    tree = tree_of([candidate(LIKELY, 7), candidate(GUESSED, 7, 8)], model_of(guessed=0.25))
    tree.select(EVERYTHING, PLENTY)
    tree.learn([7, 8])
    assert [tree.tokens[node] for node in tree.accepted] == [7, 8]
    assert (tree.num_accepted, tree.num_guessed) == (2, 1)


@pytest.mark.parametrize("emitted", [[], [9]])
def test_nothing_is_accepted_of_candidates_that_were_all_wrong(emitted: list[int]) -> None:
    tree = tree_of([candidate(LIKELY, 7)])
    tree.select(EVERYTHING, PLENTY)
    tree.learn(emitted)
    assert (tree.accepted, tree.num_accepted, tree.num_guessed) == ([], 0, 0)


# Any candidates


@st.composite
def models(draw: st.DrawFn) -> AcceptanceModel:
    model = AcceptanceModel()
    for first in CLASSES:
        model.probability[first] = draw(st.floats(0, 1))
        model.probability[first + 1 : first + NUM_DEPTHS] = [draw(st.floats(0, 1))] * (
            NUM_DEPTHS - 1
        )
    return model


def candidate_lists() -> st.SearchStrategy[list[Candidate]]:
    chains = st.lists(TOKENS, min_size=1, max_size=6).map(tuple)
    return st.lists(st.tuples(st.sampled_from(CLASSES), chains), max_size=6)


def tables() -> st.SearchStrategy[Table]:
    following = st.dictionaries(TOKENS, st.sampled_from(CLASSES), max_size=3)
    return st.dictionaries(TOKENS, following.map(lambda found: list(found.items())))


PRICES = st.floats(0, 0.5)
CUTOFFS = st.floats(-0.5, 1) | st.sampled_from([EVERYTHING, NOTHING])
FLOORS = st.sampled_from([0.0, 0.1, 0.3, 0.6])


@st.composite
def trees(draw: st.DrawFn) -> CandidateTree:
    """Candidates added before and after growth."""
    tree = CandidateTree(draw(models()), draw(PRICES), draw(FLOORS))
    for first_class, tokens in draw(candidate_lists()):
        tree.add(tokens, first_class)
    tree.grow(predictor(draw(tables())), [draw(TOKENS)], 3, draw(st.integers(1, 20)))
    for first_class, tokens in draw(candidate_lists()):
        tree.add(tokens, first_class)
    return tree


def chains_of(candidates: Sequence[Candidate]) -> list[Chain]:
    return [tokens for _, tokens in candidates]


@given(candidate_lists(), models(), PRICES)
def test_every_prefix_of_a_candidate_is_one_node(
    candidates: list[Candidate], model: AcceptanceModel, price: float
) -> None:
    assert set(spelt(tree_of(candidates, model, price))) == prefixes(chains_of(candidates))


@given(trees())
def test_lists_have_one_entry_per_node_and_parents_come_first(tree: CandidateTree) -> None:
    assert len(spelt(tree)) == len(tree.tokens)
    for column in (tree.classes, tree.values, tree.parents, tree.children):
        assert len(column) == len(tree.tokens)
    for node, children in enumerate(tree.children):
        assert all(tree.parents[child] == node < child for child in children)
    assert sum(map(len, tree.children)) == len(tree.tokens) - 1


@given(trees())
def test_child_is_never_worth_more_than_its_parent(tree: CandidateTree) -> None:
    for node in range(1, len(tree.values)):
        assert tree.values[node] <= tree.values[tree.parents[node]]


@given(candidate_lists(), models())
def test_value_without_prices_lies_between_one_candidates_chance_and_the_best_ones(
    candidates: list[Candidate], model: AcceptanceModel
) -> None:
    tree = tree_of(candidates, model)
    nodes = spelt(tree)
    for first_class, tokens in candidates:
        least = most = 1.0
        for depth in range(len(tokens)):
            prefix = tokens[: depth + 1]
            sharing = [first for first, other in candidates if other[: depth + 1] == prefix]
            least *= model.probability[first_class + depth]
            most *= max(model.probability[first + depth] for first in sharing)
            assert least - 1e-9 <= tree.values[nodes[prefix]] <= most + 1e-9


@given(candidate_lists(), models(), PRICES)
def test_price_lowers_a_value_by_no_more_than_the_prices_on_its_path(
    candidates: list[Candidate], model: AcceptanceModel, price: float
) -> None:
    free, priced = tree_of(candidates, model), tree_of(candidates, model, price)
    for node in range(1, len(priced.tokens)):
        branches = sum(
            priced.children[parent][0] != child
            for parent, child in pairwise([0, *path(priced, node)])
        )
        fall = free.values[node] - priced.values[node]
        assert -1e-9 <= fall <= branches * price + 1e-9


@given(candidate_lists(), models(), st.floats(0, 1))
def test_floor_cuts_candidates_and_leaves_at_least_their_first_token(
    candidates: list[Candidate], model: AcceptanceModel, floor: float
) -> None:
    nodes = spelt(tree := tree_of(candidates, model, floor=floor))
    assert set(nodes) <= prefixes(chains_of(candidates))
    assert all(tokens[:1] in nodes for tokens in chains_of(candidates))
    for chain, node in nodes.items():
        assert len(chain) <= 1 or tree.values[node] >= floor - 1e-9


@given(trees(), st.floats(-0.5, 1))
def test_tokens_worth_a_cutoff_are_a_tree_and_all_that_is_worth_it(
    tree: CandidateTree, cutoff: float
) -> None:
    selected = tree.select(cutoff, PLENTY)
    worth = {chain for chain, node in spelt(tree).items() if tree.values[node] >= cutoff}
    assert prefixes(selected) == worth | {()}


def kept_in_order(tree: CandidateTree, order: list[int], limit: int) -> set[Chain]:
    """The chains of the nodes that still fit into ``limit`` candidates, taken in turn."""
    chains = list(spelt(tree))
    kept: set[Chain] = {()}
    for node in order:
        more = kept | {chains[node]}
        ends = more - {each[:-1] for each in more if each}
        if chains[node][:-1] in kept and len(ends) <= limit:
            kept = more
    return kept


@given(trees(), CUTOFFS, st.integers(0, 5))
def test_kept_are_the_most_valuable_tokens_that_fit_into_so_many_candidates(
    tree: CandidateTree, cutoff: float, limit: int
) -> None:
    worth = [node for node in range(1, len(tree.values)) if tree.values[node] >= cutoff]
    order = sorted(worth, key=lambda node: (-tree.values[node], node))
    assert prefixes(tree.select(cutoff, limit)) == kept_in_order(tree, order, limit)


@given(trees(), CUTOFFS, st.integers(0, 5))
def test_selected_are_at_most_so_many_candidates_none_the_start_of_another(
    tree: CandidateTree, cutoff: float, limit: int
) -> None:
    selected = tree.select(cutoff, limit)
    assert len(selected) <= limit
    for one in selected:
        assert one
        assert not any(one == other[: len(one)] for other in selected if other is not one)


@given(trees(), st.integers(0, 5))
def test_no_candidate_is_expected_to_add_more_tokens_than_one_before_it(
    tree: CandidateTree, limit: int
) -> None:
    nodes = spelt(tree)
    sums = [
        sum(tree.values[nodes[chain[:size]]] for size in range(1, len(chain) + 1))
        for chain in tree.select(LEAST, limit)
    ]
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(sums))


@given(trees(), st.lists(TOKENS, min_size=1, max_size=8), CUTOFFS, st.integers(0, 5))
def test_accepted_nodes_spell_the_longest_prefix_of_the_text_that_the_tree_holds(
    tree: CandidateTree, emitted: list[int], cutoff: float, limit: int
) -> None:
    fed = prefixes(tree.select(cutoff, limit))
    tree.learn(emitted)
    starts = [tuple(emitted[:size]) for size in range(1, len(emitted) + 1)]
    nodes = spelt(tree)
    longest = sum(start in nodes for start in starts)
    assert [tree.tokens[node] for node in tree.accepted] == emitted[:longest]
    assert tree.num_accepted == sum(start in fed for start in starts)
    assert tree.num_guessed <= tree.num_accepted


@given(tables(), TOKENS, models(), FLOORS, st.integers(1, 4), st.integers(1, 30))
def test_grown_tokens_are_the_likeliest_of_all_that_may_follow(
    table: Table,
    root: int,
    model: AcceptanceModel,
    floor: float,
    max_depth: int,
    max_nodes: int,
) -> None:
    tree = grown(table, root, model, max_depth, max_nodes, floor=floor)
    nodes = spelt(tree)
    expanded, waiting = [1.0], [0.0]
    for chain, node in nodes.items():
        found = table.get((root, *chain)[-1], []) if len(chain) < max_depth else []
        chance = tree.values[node]
        chances = {token: chance * model.probability[each] for token, each in found}
        # All of a place or none of it; unlikely ones only behind the root.
        wanted = {token for token in chances if chances[token] >= floor or not chain}
        added = {tree.tokens[child]: tree.values[child] for child in tree.children[node]}
        assert added in ({token: chances[token] for token in wanted}, {})
        if wanted and chance >= floor:
            (expanded if added else waiting).append(chance)
    assert max(waiting) <= min(expanded)
    # Nothing waits unless there is no room, and the last one that had may add three.
    added_nodes = len(tree.tokens) - 1
    assert len(waiting) == 1 or added_nodes >= max_nodes
    assert added_nodes < max_nodes + 3


def test_classes_of_these_tests_do_not_overlap() -> None:
    covered = {first + depth for first in CLASSES for depth in range(NUM_DEPTHS)}
    assert len(covered) == len(CLASSES) * NUM_DEPTHS
    assert max(covered) < NUM_CLASSES
