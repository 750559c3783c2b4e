"""What the sources propose together: token by token against the sources asked one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import prefixes
from vllm_lookahead.config import LookaheadConfig
from vllm_lookahead.core.acceptance import (
    BIGRAM_RANKS,
    NUM_CLASSES,
    SUFFIX,
    AcceptanceModel,
    bigram_class,
    classify,
    custom_class,
    pool_class,
    shared_first,
)
from vllm_lookahead.core.candidates import CandidateTree, Chain
from vllm_lookahead.core.proposals import Bigrams, Proposals
from vllm_lookahead.core.shared import SharedTexts
from vllm_lookahead.core.suffix import SuffixIndex

PLENTY = 1000


class Fixed:
    """A source that always proposes 5 and 7 8."""

    def __init__(self, config: LookaheadConfig) -> None:
        pass

    def propose(self, context: Sequence[int], length: int, limit: int) -> Sequence[Sequence[int]]:
        return [[5], [7, 8]]


NAME = f"{__name__}:Fixed"


def index_of(*texts: list[int], vocab_size: int | None = None) -> SuffixIndex:
    index = SuffixIndex(PLENTY, vocab_size)
    for text in texts:
        index.extend(text, 0)
    return index


def proposed(
    sources: Sequence[str],
    text: list[int],
    *,
    length: int = 2,
    G: int = 8,
    shared: SuffixIndex | None = None,
    bigrams: Bigrams | None = None,
    vocab_size: int | None = None,
    model: AcceptanceModel | None = None,
    floor: float = 0.0,
) -> CandidateTree:
    """The tree of what the sources propose after a prompt, from 3-grams, ``length`` deep."""
    config = LookaheadConfig(
        window_size=1,
        ngram_size=3,
        verification_set_size=G,
        draft_length=length,
        sources=tuple(sources),
    )
    proposals = Proposals(config, len(text), vocab_size, lambda: shared, bigrams)
    proposals.extend(text, 0)
    tree = CandidateTree(model or AcceptanceModel(), floor=floor)
    proposals.ask(tree, text)
    return tree


def one_chance(chance: float) -> AcceptanceModel:
    """A model in which every token is right with the same chance."""
    model = AcceptanceModel()
    model.probability = [chance] * NUM_CLASSES
    return model


def spelt(tree: CandidateTree) -> dict[Chain, int]:
    """Classes of all tokens by the chain that ends with them; no two chains are the same."""
    chains: list[Chain] = [()]
    for node in range(1, len(tree.tokens)):
        chains.append((*chains[tree.parents[node]], tree.tokens[node]))
    classes = dict(zip(chains, tree.classes, strict=True))
    assert len(classes) == len(chains)
    del classes[()]
    return classes


def after(chain: Chain, classified: list[tuple[int, int]]) -> dict[Chain, int]:
    return {(*chain, token): token_class for token, token_class in classified}


# The own text


def test_all_that_followed_the_longest_match_is_proposed_by_count_and_rivals() -> None:
    text = [1, 2, 5, 1, 2, 6, 1, 2, 5, 8, 2, 9, 1, 2]
    # After 1 2 came 6, and 5 twice; the 9 after the shorter 2 doesn't matter.
    expected = after((), classify(SUFFIX, 1, [(6, 1), (5, 2)]))
    assert spelt(proposed(["suffix"], text, length=1)) == expected


def test_what_follows_a_proposed_token_is_what_followed_the_text_with_it() -> None:
    text = [1, 2, 5, 1, 3, 5, 7, 1, 2]
    # 5 alone was followed by 7 last, but after 1 2 it was followed by 1.
    assert spelt(proposed(["suffix"], text)) == {
        **after((), classify(SUFFIX, 1, [(5, 1)])),
        **after((5,), classify(SUFFIX, 2, [(1, 1)])),
    }


# Other requests' texts


def test_other_texts_are_proposed_beside_the_own_one() -> None:
    shared = index_of([9, 1, 2, 7])
    assert spelt(proposed(["suffix", "shared"], [1, 2, 5, 1, 2], length=1, shared=shared)) == {
        **after((), classify(SUFFIX, 1, [(5, 1)])),
        **after((), classify(shared_first(1, 1), 1, [(7, 1)])),
    }


def test_other_texts_are_asked_behind_proposed_tokens_too() -> None:
    shared = index_of([5, 7, 8])
    # 5 is from the own text, 7 from the other one.
    chains = spelt(proposed(["suffix", "shared"], [2, 5, 2], length=3, shared=shared))
    assert {(5,), (5, 2), (5, 7), (5, 7, 8)} <= set(chains)
    assert chains[5, 7] == classify(shared_first(0, 1), 0, [(7, 1)])[0][1]


@pytest.mark.parametrize("shared", [None, index_of([])], ids=["none", "empty"])
def test_without_other_texts_nothing_is_found_there(shared: SuffixIndex | None) -> None:
    assert spelt(proposed(["shared"], [1, 2, 1], shared=shared)) == {}


def test_other_texts_are_not_asked_unless_they_are_a_source() -> None:
    shared = index_of([1, 2, 3])
    assert spelt(proposed(["suffix"], [2], shared=shared)) == {}
    assert set(spelt(proposed(["shared"], [2], shared=shared))) == {(3,)}


def test_texts_that_finish_later_are_found_from_then_on() -> None:
    texts = SharedTexts(PLENTY)
    config = LookaheadConfig(sources=("shared",)).largest
    proposals = Proposals(config, 1, find_shared=lambda: texts.get("key"))
    sizes = []
    for _ in range(2):
        tree = CandidateTree(AcceptanceModel())
        proposals.ask(tree, [1])
        sizes.append(len(spelt(tree)))
        texts.add("key", [1, 2])
    assert sizes == [0, 1]


def test_token_that_several_texts_propose_is_one_candidate() -> None:
    shared = index_of([1, 5], [1, 6])
    bigrams = {1: [6, 5, 7]}
    tree = proposed(
        ["suffix", "shared", "bigram"], [1, 5, 1], length=1, shared=shared, bigrams=bigrams
    )
    assert sorted(tree.tokens[1:]) == [5, 6, 7]


# Bigrams


def test_successors_of_the_last_token_and_of_proposed_ones_are_proposed() -> None:
    bigrams = {2: [3, 4], 3: [5]}
    assert spelt(proposed(["bigram"], [1, 2], bigrams=bigrams)) == {
        (3,): bigram_class(0, -1),
        (4,): bigram_class(1, -1),
        (3, 5): bigram_class(0, -1),
    }


def test_successors_rank_as_they_stand_in_the_table_beside_the_match() -> None:
    # After 2 came 9, and the model's second guess is what the text proposes already.
    chains = spelt(proposed(["suffix", "bigram"], [2, 9, 2], length=1, bigrams={2: [5, 9, 6]}))
    assert chains == {
        **after((), classify(SUFFIX, 0, [(9, 1)])),
        (5,): bigram_class(0, 0),
        (6,): bigram_class(2, 0),
    }


def test_no_more_successors_than_are_told_apart_are_proposed() -> None:
    tree = proposed(["bigram"], [2], length=1, bigrams={2: range(10, 20)})
    assert tree.tokens[1:] == list(range(10, 10 + BIGRAM_RANKS))


def test_successors_are_not_proposed_unless_they_are_a_source() -> None:
    assert spelt(proposed(["suffix"], [2], bigrams={2: [5]})) == {}


# The pool


def test_ngrams_after_the_same_two_tokens_rank_before_the_others_beside_suffix_matches() -> None:
    # After 2 came 5 6 last; the n-grams 4 1 and 3 1 are from where 1 preceded it.
    text = [1, 2, 3, 1, 2, 4, 1, 9, 2, 5, 6, 1, 2]
    model = AcceptanceModel()
    # So that tokens which the text proposes, too, are of the n-grams' classes.
    own = range(SUFFIX, shared_first(0, -1))
    model.probability[own.start : own.stop] = [0.0] * len(own)
    beside, alone = (
        {chain[0]: each for chain, each in spelt(tree).items() if len(chain) == 1}
        for tree in (
            proposed(["suffix", "prompt"], text, model=model),
            proposed(["prompt"], text, model=model),
        )
    )
    assert beside == {
        4: pool_class(0, True, False),
        3: pool_class(1, True, False),
        5: pool_class(2, False, False),
    }
    assert alone == {
        5: pool_class(0, False, False),
        4: pool_class(1, True, False),
        3: pool_class(2, True, False),
    }


def test_of_ngrams_under_the_floor_only_the_first_ones_first_token_is_kept() -> None:
    text, model = [1, 2, 3, 1, 4, 5, 1], one_chance(0.5)
    assert set(spelt(proposed(["prompt"], text, model=model))) == {(4,), (4, 5), (2,), (2, 3)}
    assert set(spelt(proposed(["prompt"], text, model=model, floor=0.6))) == {(4,)}


def test_ngrams_of_the_window_are_proposed_as_guesses() -> None:
    config = LookaheadConfig(
        window_size=2, ngram_size=3, verification_set_size=4, sources=("window",)
    )
    proposals = Proposals(config, 1)
    proposals.add_ngrams([(1, (2, 3)), (4, (5, 6))], previous=9)
    assert proposals.pool_size == 2
    for text, chain, pair in [([9, 1], (2, 3), True), ([1, 4], (5, 6), True), ([4], (5, 6), False)]:
        tree = CandidateTree(AcceptanceModel())
        proposals.ask(tree, text)
        first = pool_class(0, pair, True)
        assert spelt(tree) == {chain[:1]: first, chain: first + 1}


# All together


@pytest.mark.parametrize(
    ("sources", "firsts"),
    [
        (["suffix", "prompt", NAME], [3, 6, 5, 7]),
        ([NAME, "prompt", "suffix"], [5, 7, 3, 6]),
        ([NAME, "bigram", "prompt", "suffix"], [5, 7, 3, 9, 6]),
        (["prompt", NAME, "shared"], [6, 3, 5, 7, 8]),
    ],
)
def test_candidates_come_in_the_order_of_their_sources(
    sources: list[str], firsts: list[int]
) -> None:
    # After 1 2 came 3, and after 2 alone 6 later on.
    tree = proposed(
        sources,
        [1, 2, 3, 4, 2, 6, 1, 2],
        shared=index_of([2, 8]),
        bigrams={2: [9]},
        length=1,
    )
    assert [tree.tokens[child] for child in tree.children[0]] == firsts


@pytest.mark.parametrize(
    "sources",
    [[NAME, "prompt", "suffix"], ["suffix", NAME, "prompt"], ["prompt", "suffix", NAME]],
)
def test_token_that_several_sources_propose_is_one_candidate_of_the_likeliest(
    sources: list[str],
) -> None:
    # All three propose 5 after the root, the n-gram and the text go on with 6.
    text = [1, 2, 5, 6, 1, 2]
    tree = proposed(sources, text)
    classes = {
        5: [classify(SUFFIX, 1, [(5, 1)])[0][1], pool_class(0, True, False), custom_class(0)],
        6: [classify(SUFFIX, 2, [(6, 1)])[0][1], pool_class(0, True, False) + 1],
    }
    probability = AcceptanceModel().probability
    best = {token: max(each, key=probability.__getitem__) for token, each in classes.items()}
    chains = spelt(tree)
    assert set(chains) == {(5,), (5, 6), (7,), (7, 8)}
    assert (chains[5,], chains[5, 6]) == (best[5], best[6])


def test_pool_before_the_suffix_source_takes_no_room_from_it() -> None:
    # After 1 2 came 3, but the two n-grams that the pool keeps are those after 8 2.
    text = [1, 2, 3, 8, 2, 4, 8, 2, 5, 1, 2]
    assert set(spelt(proposed(["prompt"], text, G=2))) == {(4,), (4, 8), (5,), (5, 1)}
    for sources in (["prompt", "suffix"], ["suffix", "prompt"]):
        assert {(3,), (3, 8)} <= set(spelt(proposed(sources, text, G=2)))


def test_one_candidate_is_as_long_as_the_draft() -> None:
    assert set(spelt(proposed(["suffix"], [1, 2, 1, 2], length=4, G=1))) == {
        (1,),
        (1, 2),
        (1, 2, 1),
        (1, 2, 1, 2),
    }


@pytest.mark.parametrize("sources", [["suffix", "bigram", "shared", "prompt", NAME], []])
def test_without_candidates_nothing_is_asked_or_kept(sources: list[str]) -> None:
    text = [1, 2, 1]
    tree = proposed(sources, text, G=0, shared=index_of(text), bigrams={1: [2]})
    assert spelt(tree) == {}


@pytest.mark.parametrize(
    ("sources", "text", "kind"),
    [
        (["suffix"], [1, 2], 0),
        (["suffix"], [1, 1], 1),
        (["suffix"], [1, 2, 1, 2], 1),
        (["suffix"], [1, 2, 3, 1, 2, 3], 2),
        (["prompt"], [1, 2, 3, 1, 2, 3], 0),
    ],
)
def test_kind_of_the_step_is_that_of_the_match_in_the_own_text(
    sources: list[str], text: list[int], kind: int
) -> None:
    proposals = Proposals(LookaheadConfig(sources=tuple(sources)).largest, len(text))
    proposals.extend(text, 0)
    assert proposals.match(text) == kind


# Any texts

TEXTS = st.lists(st.integers(0, 4), min_size=1, max_size=30)
BIGRAMS = st.dictionaries(st.integers(0, 4), st.lists(st.integers(0, 3), unique=True))
TOKEN_SOURCES = st.sets(st.sampled_from(["suffix", "shared", "bigram"]), min_size=1).map(sorted)


@given(TEXTS, TEXTS, BIGRAMS, TOKEN_SOURCES)
def test_each_token_is_followed_by_what_the_sources_say_of_the_text_with_it(
    text: list[int], other: list[int], bigrams: Bigrams, sources: list[str]
) -> None:
    own, shared = index_of(text), index_of(other)
    tree = proposed(sources, text, shared=shared, bigrams=bigrams, length=3, G=3)
    chains: list[Chain] = [()]
    expanded = 0
    for node in range(len(tree.tokens)):
        if node:
            chains.append((*chains[tree.parents[node]], tree.tokens[node]))
        tail = (*text, *chains[node])
        said: set[int] = set()
        if "suffix" in sources:
            said |= dict(own.followers(tail)[1]).keys()
        if "shared" in sources:
            said |= dict(shared.followers(tail)[1]).keys()
        if "bigram" in sources:
            said |= set(bigrams.get(tail[-1], [])[:BIGRAM_RANKS])
        children = [tree.tokens[child] for child in tree.children[node]]
        assert len(children) == len(set(children))
        assert set(children) in (said, set())
        assert not children or len(chains[node]) < 3
        expanded += bool(children)
    assert bool(expanded) is (len(tree.tokens) > 1)


@given(TEXTS, TEXTS, BIGRAMS, st.permutations(["suffix", "shared", "bigram", "prompt"]))
def test_no_token_outside_of_the_vocabulary_is_proposed(
    text: list[int], other: list[int], bigrams: Bigrams, sources: list[str]
) -> None:
    # The model's bigrams are of its vocabulary, which ends before 4.
    tree = proposed(
        sources, text, shared=index_of(other, vocab_size=4), bigrams=bigrams, vocab_size=4
    )
    assert max(tree.tokens) < 4


@given(TEXTS, TEXTS, BIGRAMS, st.permutations(["suffix", "shared", "bigram", "prompt", NAME]))
def test_no_chain_is_proposed_twice_in_whichever_order_the_sources_are_asked(
    text: list[int], other: list[int], bigrams: Bigrams, sources: list[str]
) -> None:
    tree = proposed(sources, text, shared=index_of(other), bigrams=bigrams)
    assert prefixes(list(spelt(tree))) == {*spelt(tree), ()}


@given(TEXTS, st.lists(st.integers(1, 30), max_size=4), TOKEN_SOURCES)
def test_text_taken_in_any_pieces_is_known_like_the_whole_text(
    text: list[int], cuts: list[int], sources: list[str]
) -> None:
    config = LookaheadConfig(
        window_size=0,
        ngram_size=3,
        verification_set_size=4,
        sources=(*sources, "output", "prompt"),
    )
    trees = []
    for edges in ([0, len(text)], sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})):
        proposals = Proposals(config, len(text) // 2)
        for first, last in pairwise(edges):
            proposals.extend(text[:last], first)
        tree = CandidateTree(AcceptanceModel())
        proposals.ask(tree, text)
        trees.append(tree)
    assert spelt(trees[0]) == spelt(trees[1])
