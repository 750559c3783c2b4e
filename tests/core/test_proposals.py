"""What the sources propose together: token by token against the sources asked one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import prefixes
from vllm_lookahead.config import LookaheadConfig
from vllm_lookahead.core.acceptance import (
    MODEL,
    NUM_CLASSES,
    SUFFIX,
    AcceptanceModel,
    Classified,
    classify,
    classify_model,
    classify_shared,
    confirm,
    custom_class,
    pool_class,
)
from vllm_lookahead.core.candidates import CandidateTree, Chain
from vllm_lookahead.core.followers import FollowerTable, evidence_of
from vllm_lookahead.core.proposals import Proposals
from vllm_lookahead.core.shared import SharedTexts
from vllm_lookahead.core.suffix import MATCH_LENGTHS, SuffixIndex

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


def texts_of(source: str, *texts: list[int]) -> dict[str, Any]:
    """The texts of ``shared`` or ``model``, as `proposed` takes them."""
    if source == "model":
        return {"model_text": FollowerTable(texts)}
    return {"shared": index_of(*texts)}


def once(source: str, match: int, own_match: int, token: int) -> Classified:
    """A token that followed a match in other texts, once and alone."""
    if source == "model":
        return classify_model(match, own_match, [(token, evidence_of(1, 1))])
    return classify_shared(match, own_match, [(token, 1)])


def proposed(
    sources: Sequence[str],
    text: list[int],
    *,
    length: int = 2,
    G: int = 8,
    shared: SuffixIndex | None = None,
    model_text: FollowerTable | None = None,
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
    proposals = Proposals(config, len(text), vocab_size, lambda: shared, model_text)
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
        **after((5,), classify(SUFFIX, 1, [(1, 1)])),
    }


# Other texts: those of other requests, and the model's


@pytest.mark.parametrize("source", ["shared", "model"])
def test_other_texts_are_proposed_beside_the_own_one(source: str) -> None:
    tree = proposed(["suffix", source], [1, 2, 5, 1, 2], length=1, **texts_of(source, [9, 1, 2, 7]))
    # The own text's 5 isn't what followed the same two tokens there.
    assert spelt(tree) == {
        **after((), confirm(classify(SUFFIX, 1, [(5, 1)]), [(7, 1)])),
        **after((), once(source, 1, 1, 7)),
    }


@pytest.mark.parametrize("source", ["shared", "model"])
def test_other_texts_are_asked_behind_proposed_tokens_too(source: str) -> None:
    # 5 is from the own text, 7 from the other one.
    chains = spelt(proposed(["suffix", source], [2, 5, 2], length=3, **texts_of(source, [5, 7, 8])))
    assert {(5,), (5, 2), (5, 7), (5, 7, 8)} <= set(chains)
    # After 2 5 the own text has a match of two tokens.
    [(_, seven)] = once(source, 0, 1, 7)
    assert chains[5, 7] == seven


@pytest.mark.parametrize("source", ["shared", "model"])
def test_own_followers_that_other_texts_have_too_are_confirmed(source: str) -> None:
    # After 1 2 came 5 and 6 in the own text, and 6 in the other one.
    own, others = [(5, 1), (6, 1)], [(6, 1)]
    text = [1, 2, 5, 1, 2, 6, 1, 2]
    tree = proposed(["suffix", source], text, length=1, **texts_of(source, [1, 2, 6]))
    assert spelt(tree) == after((), confirm(classify(SUFFIX, 1, own), others))


@pytest.mark.parametrize("source", ["shared", "model"])
def test_shorter_match_in_other_texts_neither_confirms_nor_denies(source: str) -> None:
    text = [1, 2, 5, 1, 2, 6, 1, 2]
    tree = proposed(["suffix", source], text, length=1, **texts_of(source, [9, 2, 6]))
    assert spelt(tree) == after((), classify(SUFFIX, 1, [(5, 1), (6, 1)]))


@pytest.mark.parametrize(
    ("shared", "model_text", "token", "source", "match"),
    [
        ([1, 2, 7], [2, 8], 7, "shared", 1),
        ([2, 7], [1, 2, 8], 8, "model", 1),
        ([1, 2, 7], [1, 2, 8], 7, "shared", 1),
        ([2, 7], [2, 8], 7, "shared", 0),
        ([2, 7], [9, 8], 7, "shared", 0),
        ([9, 7], [2, 8], 8, "model", 0),
    ],
    ids=["shared longer", "model longer", "both long", "both short", "shared only", "model only"],
)
def test_of_shared_texts_and_the_models_the_longer_match_is_asked_or_else_the_shared_one(
    shared: list[int], model_text: list[int], token: int, source: str, match: int
) -> None:
    for sources in (["model", "shared"], ["shared", "model"]):
        tree = proposed(
            sources,
            [1, 2],
            length=1,
            shared=index_of(shared),
            model_text=FollowerTable([model_text]),
        )
        assert spelt(tree) == after((), once(source, match, -1, token))


def test_own_followers_are_confirmed_by_the_other_texts_that_are_asked() -> None:
    # The model's text would confirm, but the shared one has the longer match.
    own = classify(SUFFIX, 1, [(5, 1)])
    tree = proposed(
        ["suffix", "model", "shared"],
        [0, 3, 1, 2, 5, 1, 2],
        length=1,
        shared=index_of([2, 5, 1, 2, 6]),
        model_text=FollowerTable([[1, 2, 5]]),
    )
    assert spelt(tree) == {
        **after((), confirm(own, [(6, 1)])),
        **after((), once("shared", 2, 1, 6)),
    }


@pytest.mark.parametrize("source", ["shared", "model"])
@pytest.mark.parametrize(("size", "tokens"), [(3, [5, 6]), (4, [5])])
def test_other_texts_are_not_asked_beside_a_match_of_four_tokens_in_the_own_one(
    source: str, size: int, tokens: list[int]
) -> None:
    same = list(range(10, 10 + size))
    others = texts_of(source, [1, 2, 3, 4, 5, *same, 6])
    tree = proposed(["suffix", source], [*same, 5, *same], length=1, **others)
    assert sorted(tree.tokens[1:]) == tokens


@pytest.mark.parametrize(
    ("shared", "model_text"),
    [(None, None), (index_of([]), FollowerTable([]))],
    ids=["none", "empty"],
)
def test_without_other_texts_nothing_is_found_there(
    shared: SuffixIndex | None, model_text: FollowerTable | None
) -> None:
    tree = proposed(["shared", "model"], [1, 2, 1], shared=shared, model_text=model_text)
    assert spelt(tree) == {}


@pytest.mark.parametrize("source", ["shared", "model"])
def test_other_texts_are_not_asked_unless_they_are_a_source(source: str) -> None:
    texts = texts_of(source, [1, 2, 3])
    assert spelt(proposed(["suffix"], [2], **texts)) == {}
    assert set(spelt(proposed([source], [2], **texts))) == {(3,)}


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


@pytest.mark.parametrize("source", ["shared", "model"])
def test_token_that_several_texts_propose_is_one_candidate(source: str) -> None:
    tree = proposed(["suffix", source], [1, 5, 1], length=1, **texts_of(source, [1, 5], [1, 6]))
    assert sorted(tree.tokens[1:]) == [5, 6]


# The pool


def test_ngrams_after_the_same_two_tokens_rank_before_the_others_beside_suffix_matches() -> None:
    # After 2 came 5 6 last; the n-grams 4 1 and 3 1 are from where 1 preceded it.
    text = [1, 2, 3, 1, 2, 4, 1, 9, 2, 5, 6, 1, 2]
    model = AcceptanceModel()
    # So that tokens which the text proposes, too, are of the n-grams' classes.
    own = range(SUFFIX, MODEL)
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
        ([NAME, "model", "prompt", "suffix"], [5, 7, 3, 9, 6]),
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
        model_text=FollowerTable([[2, 9]]),
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
        6: [classify(SUFFIX, 1, [(6, 1)])[0][1], pool_class(0, True, False) + 1],
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


@pytest.mark.parametrize("sources", [["suffix", "model", "shared", "prompt", NAME], []])
def test_without_candidates_nothing_is_asked_or_kept(sources: list[str]) -> None:
    text = [1, 2, 1]
    tree = proposed(sources, text, G=0, shared=index_of(text), model_text=FollowerTable([text]))
    assert spelt(tree) == {}


@pytest.mark.parametrize(
    ("sources", "text", "kind"),
    [
        (["suffix"], [1, 2], 0),
        (["suffix"], [1, 1], 1),
        (["suffix"], [1, 2, 1, 2], 1),
        (["suffix"], [1, 2, 3, 1, 2, 3], 1),
        (["suffix"], [1, 2, 3, 4, 1, 2, 3, 4], 2),
        (["prompt"], [1, 2, 3, 4, 1, 2, 3, 4], 0),
    ],
)
def test_kind_of_the_step_is_that_of_the_match_in_the_own_text(
    sources: list[str], text: list[int], kind: int
) -> None:
    proposals = Proposals(LookaheadConfig(sources=tuple(sources)).largest, len(text))
    proposals.extend(text, 0)
    proposals.ask(CandidateTree(AcceptanceModel()), text)
    assert proposals.match == kind


# Any texts

TEXTS = st.lists(st.integers(0, 4), min_size=1, max_size=30)
TOKEN_SOURCES = st.sets(st.sampled_from(["suffix", "shared", "model"]), min_size=1).map(sorted)


@given(TEXTS, TEXTS, TEXTS, TOKEN_SOURCES)
def test_each_token_is_followed_by_what_the_sources_say_of_the_text_with_it(
    text: list[int], other: list[int], model_text: list[int], sources: list[str]
) -> None:
    shared, written = index_of(other), FollowerTable([model_text])
    indices: dict[str, SuffixIndex | FollowerTable] = {
        "suffix": index_of(text),
        "shared": shared,
        "model": written,
    }
    tree = proposed(sources, text, shared=shared, model_text=written, length=3, G=3)
    chains: list[Chain] = [()]
    expanded = 0
    for node in range(len(tree.tokens)):
        if node:
            chains.append((*chains[tree.parents[node]], tree.tokens[node]))
        tail = (*text, *chains[node])
        found = {name: indices[name].followers(tail) for name in sources}
        # No other texts beside four tokens of the own one, else those with the longer match.
        asked = {"suffix"}
        if found.get("suffix", (-1, ()))[0] < MATCH_LENGTHS.index(4):
            longer = found.get("model", (-2, ()))[0] > found.get("shared", (-2, ()))[0]
            asked.add("model" if longer else "shared")
        said = {token for name in asked & found.keys() for token, _ in found[name][1]}
        children = [tree.tokens[child] for child in tree.children[node]]
        assert len(children) == len(set(children))
        assert set(children) in (said, set())
        assert not children or len(chains[node]) < 3
        expanded += bool(children)
    assert bool(expanded) is (len(tree.tokens) > 1)


@given(TEXTS, TEXTS, TEXTS, st.permutations(["suffix", "shared", "model", "prompt"]))
def test_no_token_outside_of_the_vocabulary_is_proposed(
    text: list[int], other: list[int], model_text: list[int], sources: list[str]
) -> None:
    # What the model writes has none.
    written = FollowerTable([[token for token in model_text if token < 4]])
    tree = proposed(
        sources, text, shared=index_of(other, vocab_size=4), model_text=written, vocab_size=4
    )
    assert max(tree.tokens) < 4


@given(TEXTS, TEXTS, TEXTS, st.permutations(["suffix", "shared", "model", "prompt", NAME]))
def test_no_chain_is_proposed_twice_in_whichever_order_the_sources_are_asked(
    text: list[int], other: list[int], model_text: list[int], sources: list[str]
) -> None:
    tree = proposed(sources, text, shared=index_of(other), model_text=FollowerTable([model_text]))
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
