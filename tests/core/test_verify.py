"""Verification: what a walk emits, and that whole runs emit what plain decoding emits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.trees import NO_LIMITS, Path, TreeInput, path_of, prefixes, tree_inputs
from vllm_lookahead.config import BUILTIN_SOURCES, DEFAULT_SOURCES, LookaheadConfig
from vllm_lookahead.core.acceptance import AcceptanceModel
from vllm_lookahead.core.controller import EVERYTHING, NOTHING
from vllm_lookahead.core.sequence import SequenceState
from vllm_lookahead.core.tree import TokenTree, build_tree, linear_tree
from vllm_lookahead.core.verify import Walk, walk_tree

Model = Callable[[Sequence[int]], int]
"""The next token of a text."""


@dataclass(frozen=True)
class Markov:
    """A model whose next token follows from the last two, so that its text soon repeats."""

    vocabulary: int
    table: tuple[int, ...]

    def __call__(self, text: Sequence[int]) -> int:
        before, last = [0, *text][-2:]
        return self.table[before * self.vocabulary + last]


@st.composite
def models(draw: st.DrawFn, vocabulary: int = 0) -> Markov:
    vocabulary = vocabulary or draw(st.integers(1, 4))
    size = vocabulary * vocabulary
    table = draw(st.lists(st.integers(0, vocabulary - 1), min_size=size, max_size=size))
    return Markov(vocabulary, tuple(table))


def walk_with(model: Model, tree: TokenTree, before: Sequence[int] = ()) -> Walk:
    """Walk as the model would: its input at a node is the text up to there."""
    root = int(tree.token_ids[0])
    return walk_tree(tree, lambda node: model([*before, root, *path_of(tree, node)]))


def script(*tokens: int) -> Model:
    """A model that says ``tokens`` one after the other, behind a root."""
    return lambda text: tokens[len(text) - 1]


# The rule


def test_wrong_draft_yields_the_models_token() -> None:
    walk = walk_with(script(7), linear_tree([1, 2]))
    assert (walk.tokens, walk.accepted, walk.node) == ([7], 0, 0)


def test_right_draft_yields_its_tokens_and_the_bonus_token() -> None:
    walk = walk_with(script(1, 2, 7), linear_tree([1, 2]))
    assert (walk.tokens, walk.accepted, walk.node) == ([1, 2, 7], 2, 2)


@pytest.mark.parametrize("N", [2, 3, 5])
def test_full_match_of_n_minus_1_drafts_yields_n_tokens(N: int) -> None:
    continuation = list(range(1, N + 1))
    walk = walk_with(script(*continuation), linear_tree(continuation[:-1]))
    assert walk.tokens == continuation


def test_walk_stops_at_the_first_mismatch_even_if_later_drafts_are_right() -> None:
    walk = walk_with(script(1, 7, 3), linear_tree([1, 2, 3]))
    assert (walk.tokens, walk.accepted, walk.node) == ([1, 7], 1, 1)


def test_empty_draft_yields_one_token() -> None:
    assert walk_with(script(7), linear_tree([])).tokens == [7]


def test_placeholder_drafts_match_nothing() -> None:
    walk = walk_with(script(0), linear_tree([-1, -1]))
    assert (walk.tokens, walk.accepted) == ([0], 0)


def test_right_third_candidate_is_accepted_behind_wrong_ones() -> None:
    tree = build_tree(0, [1, 2], [[3, 4], [5, 6]], **NO_LIMITS)
    walk = walk_with(script(5, 6, 7), tree)
    assert (walk.tokens, walk.accepted) == ([5, 6, 7], 2)
    assert path_of(tree, walk.node) == (5, 6)


def test_walk_leaves_a_shared_prefix_for_the_right_candidate() -> None:
    tree = build_tree(0, [1, 2, 3], [[1, 4, 5]], **NO_LIMITS)
    assert walk_with(script(1, 4, 5, 6), tree).tokens == [1, 4, 5, 6]


WINDOW = [[11, 12], [21, 22, 23], [31, 32, 33]]


@pytest.mark.parametrize(
    "path", [[21, 31], [11, 22, 32], [11, 12, 23]], ids=["column 0", "column 1", "column 2"]
)
def test_window_path_is_accepted_as_far_as_the_primary_is_deep(path: list[int]) -> None:
    tree = build_tree(0, [1, 2, 3], (), WINDOW, **NO_LIMITS)
    assert walk_with(script(*path, 7), tree).tokens == [*path, 7]


def test_window_path_is_not_accepted_deeper_than_the_primary() -> None:
    tree = build_tree(0, [1], (), WINDOW, **NO_LIMITS)
    assert walk_with(script(11, 12, 23), tree).tokens == [11, 12]


def test_window_path_is_not_accepted_unless_the_window_is_verified() -> None:
    tree = build_tree(0, [1, 2, 3], (), WINDOW, **NO_LIMITS, verify_window=False)
    assert walk_with(script(11, 22), tree).tokens == [11]


def test_walk_takes_no_token_once_it_is_finished() -> None:
    walk = walk_with(script(7), linear_tree([1]))
    with pytest.raises(RuntimeError, match="finished"):
        walk.emit(1)


@given(tree_inputs(), models(vocabulary=4))
def test_walk_accepts_the_models_text_as_far_as_any_acceptable_chain_holds_it(
    asked: TreeInput, model: Markov
) -> None:
    allowed = asked.candidate_chains
    if asked.verify_window:
        allowed = allowed + asked.window_chains
    chains = {path for path in prefixes(allowed) if len(path) <= len(asked.primary)}
    text = [asked.root, model([asked.root])]
    while tuple(text[1:]) in chains:
        text.append(model(text))
    assert walk_with(model, asked.build()).tokens == text[1:]


@given(tree_inputs(), models(vocabulary=4))
def test_merged_and_unmerged_trees_accept_the_same_tokens(asked: TreeInput, model: Markov) -> None:
    merged, unmerged = asked.build(), asked.build(merge=False)
    assert walk_with(model, merged).tokens == walk_with(model, unmerged).tokens


# Whole runs


def decode_plainly(model: Model, prompt: Sequence[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(model(text))
    return text[len(prompt) :]


class Decoder:
    """Lookahead decoding of one sequence, the model's outputs computed node by node."""

    def __init__(
        self,
        config: LookaheadConfig,
        model: Model,
        prompt: Sequence[int],
        acceptance: AcceptanceModel | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.text = [*prompt, model(prompt)]
        self.state = SequenceState(config, self.text, len(prompt), acceptance=acceptance)

    def step(
        self, granted: int = 1000, choice: tuple[float, float, float] | None = None, **limits: int
    ) -> list[int]:
        """One step; the scheduler grants at most ``granted`` of the draft's tokens.

        ``choice`` are branch price, floor and cutoff; all is fed without.
        """
        if choice is None:
            draft = self.state.propose()
        else:
            price, floor, cutoff = choice
            self.state.gather(price, floor)
            draft = self.state.select(cutoff)
        assert len(draft) <= self.config.num_draft_tokens
        granted = min(granted, len(draft))
        limits = {"max_nodes": 1000, "max_depth": 1000, "max_branches": 1000} | limits
        limits["max_nodes"] = max(limits["max_nodes"], 1 + granted)
        limits["max_depth"] = max(limits["max_depth"], granted)
        tree = self.state.plan(draft[:granted], **limits)
        assert not self.state.is_linear or tree.size == 1 + granted
        assert tree.token_ids[0] == self.text[-1]
        before = self.text[:-1]
        walk = walk_with(self.model, tree, before)
        row = [
            self.model([*self.text, *path_of(tree, leaf)]) for leaf in tree.window_leaves.tolist()
        ]
        self.state.commit(walk, np.array(row, dtype=np.int32))
        self.text += walk.tokens
        assert self.state.num_tokens == len(self.text)
        return walk.tokens


def count_to_3(text: Sequence[int]) -> int:
    """0 1 2 3 0 1 2 3 and so on."""
    return (text[-1] + 1) % 4


@pytest.mark.parametrize("sources", [("output", "prompt"), ("suffix",), DEFAULT_SOURCES])
def test_text_seen_in_the_prompt_is_emitted_n_tokens_per_step(sources: tuple[str, ...]) -> None:
    config = LookaheadConfig(
        window_size=0, ngram_size=3, verification_set_size=1, sources=sources
    )  # fmt: skip
    decoder = Decoder(config, count_to_3, [0, 1, 2, 3, 0, 1, 2, 3])
    assert [decoder.step() for _ in range(3)] == [[1, 2, 3], [0, 1, 2], [3, 0, 1]]


def test_suffix_match_is_emitted_as_far_as_the_draft_length() -> None:
    config = LookaheadConfig(
        window_size=0, ngram_size=3, verification_set_size=1, draft_length=6, sources=("suffix",)
    )
    decoder = Decoder(config, count_to_3, [0, 1, 2, 3, 0, 1])
    assert [decoder.step() for _ in range(2)] == [[3, 0, 1, 2, 3, 0, 1], [2, 3, 0, 1, 2, 3, 0]]


def test_step_of_which_nothing_is_worth_feeding_emits_one_token() -> None:
    config = LookaheadConfig(window_size=2, ngram_size=3, verification_set_size=1)
    decoder = Decoder(config, count_to_3, [0, 1, 2, 3, 0, 1])
    assert decoder.step(choice=(0.0, 0.0, NOTHING)) == [3]


def test_ngrams_of_the_window_are_verified_once_their_key_comes_up() -> None:
    # Without candidates from text, and with window paths unacceptable, a token more than one a
    # step can come from the window's n-grams only.
    config = LookaheadConfig(
        window_size=4, ngram_size=3, verification_set_size=2, sources=("window",),
        verify_window=False,
    )  # fmt: skip
    decoder = Decoder(config, count_to_3, [0])
    assert max(len(decoder.step()) for _ in range(12)) == 3


def test_jacobi_decoding_emits_several_tokens_per_step_of_a_steady_text() -> None:
    config = LookaheadConfig(window_size=4, ngram_size=2, verification_set_size=0)
    decoder = Decoder(config, lambda text: 5, [0])
    # Root 5; all guesses are 0 or 5. After one step, outputs are all 5, and 3 guesses are right.
    decoder.step()
    assert decoder.step() == [5, 5, 5, 5]


def choices() -> st.SearchStrategy[tuple[float, float, float] | None]:
    cutoffs = st.sampled_from([NOTHING, EVERYTHING]) | st.floats(-0.1, 1)
    return st.none() | st.tuples(st.floats(0, 0.2), st.floats(0, 0.3), cutoffs)


def configs() -> st.SearchStrategy[LookaheadConfig]:
    sizes = st.tuples(st.integers(0, 6), st.integers(2, 5), st.integers(0, 4))
    some_sources = st.lists(st.sampled_from(BUILTIN_SOURCES), unique=True).map(tuple)
    return st.builds(
        lambda sizes, draft_length, verify_window, sources, capacity, seed: LookaheadConfig(
            window_size=sizes[0],
            ngram_size=sizes[1],
            verification_set_size=sizes[2],
            draft_length=draft_length,
            verify_window=verify_window,
            # Without a window, something else must propose.
            sources=sources if sizes[0] else (*sources, *{"output"} - {*sources}),
            pool_capacity=capacity,
            seed=seed,
        ),
        sizes.filter(lambda each: each[0] or each[2]),
        st.sampled_from(["auto", 1, 2, 9]),
        st.booleans(),
        st.just(DEFAULT_SOURCES) | some_sources,
        st.sampled_from([1, 3, 16384]),
        st.integers(0, 3),
    )


@given(configs(), models(), st.data())
def test_greedy_run_emits_what_plain_decoding_emits(
    config: LookaheadConfig, model: Markov, data: st.DataObject
) -> None:
    prompt = data.draw(st.lists(st.integers(0, model.vocabulary - 1), min_size=1, max_size=8))
    decoder = Decoder(config, model, prompt)
    emitted = [decoder.text[-1]]
    for _ in range(10):
        tokens = decoder.step()
        assert 1 <= len(tokens) <= 1 + config.num_draft_tokens
        emitted += tokens
    assert emitted == decode_plainly(model, prompt, len(emitted))


@given(configs(), models(), st.data())
def test_greedy_run_under_any_limits_and_choices_emits_what_plain_decoding_emits(
    config: LookaheadConfig, model: Markov, data: st.DataObject
) -> None:
    prompt = data.draw(st.lists(st.integers(0, model.vocabulary - 1), min_size=1, max_size=8))
    limits = st.fixed_dictionaries(
        {
            "granted": st.integers(0, 9),
            "max_nodes": st.integers(1, 30),
            "max_depth": st.integers(0, 10),
            "max_branches": st.integers(1, 12),
        }
    )
    decoder = Decoder(config, model, prompt)
    emitted = [decoder.text[-1]]
    steps = st.lists(st.tuples(choices(), limits), min_size=6, max_size=6)
    for choice, step in data.draw(steps):
        tokens = decoder.step(choice=choice, **step)
        assert 1 <= len(tokens) <= 1 + step["granted"]
        emitted += tokens
    assert emitted == decode_plainly(model, prompt, len(emitted))


@given(configs(), models(), st.data())
def test_window_fed_next_is_the_reference_update_of_the_models_outputs(
    config: LookaheadConfig, model: Markov, data: st.DataObject
) -> None:
    assume(config.window_size and not config.is_jacobi)
    prompt = data.draw(st.lists(st.integers(0, model.vocabulary - 1), min_size=1, max_size=8))
    decoder = Decoder(config, model, prompt)
    rows: list[list[int]] | None = None
    for _ in range(6):
        text = list(decoder.text)
        tree = decoder.state.plan(
            decoder.state.propose(), max_nodes=1000, max_depth=1000, max_branches=1000
        )
        leaves: list[Path] = [path_of(tree, leaf) for leaf in tree.window_leaves.tolist()]
        if rows is not None:
            expected = [
                (*rows[0][1 : 1 + i], *(row[i] for row in rows[1:]))
                for i in range(config.window_size)
            ]
            assert leaves == expected
        else:
            rows = [[-1, *leaves[-1]]]
        rows.append([model([*text, *path]) for path in leaves])
        if len(rows) > config.ngram_size - 1:
            del rows[0]
        decoder.step()


@given(configs(), models(), st.data())
def test_sequences_that_learn_from_each_other_emit_what_plain_decoding_emits(
    config: LookaheadConfig, model: Markov, data: st.DataObject
) -> None:
    acceptance = AcceptanceModel()
    for _ in range(3):
        prompt = data.draw(st.lists(st.integers(0, model.vocabulary - 1), min_size=1, max_size=8))
        decoder = Decoder(config, model, prompt, acceptance)
        emitted = [decoder.text[-1]]
        for choice in data.draw(st.lists(choices(), max_size=5)):
            emitted += decoder.step(choice=choice)
        assert emitted == decode_plainly(model, prompt, len(emitted))
    assert all(0 <= each <= 1 for each in acceptance.probability)
