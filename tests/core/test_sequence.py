"""One sequence's state: where drafts come from, what planning leaves alone, memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import NO_LIMITS
from vllm_lookahead.config import LookaheadConfig, LookaheadConfigError
from vllm_lookahead.core.acceptance import (
    NUM_CLASSES,
    SUFFIX,
    AcceptanceModel,
    classify,
    pool_class,
)
from vllm_lookahead.core.controller import EVERYTHING, NOTHING
from vllm_lookahead.core.sequence import SequenceState
from vllm_lookahead.core.sources import CandidateSource, load_source
from vllm_lookahead.core.tree import TokenTree, linear_tree
from vllm_lookahead.core.verify import Walk, walk_tree


def config_of(W: int, N: int, G: int, *sources: str) -> LookaheadConfig:
    return LookaheadConfig(
        window_size=W, ngram_size=N, verification_set_size=G, sources=tuple(sources)
    )


def walk_to(tree: TokenTree, *tokens: int) -> Walk:
    """The walk in which the model says ``tokens``."""
    said = iter(tokens)
    return walk_tree(tree, lambda node: next(said))


def row(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


class Fixed:
    """A source that always proposes `answer`, and remembers what it was asked."""

    answer: Sequence[Sequence[int]] = ()

    def __init__(self, config: LookaheadConfig) -> None:
        self.config = config
        self.calls: list[tuple[list[int], int, int]] = []
        instances.append(self)

    def propose(self, context: Sequence[int], length: int, limit: int) -> Sequence[Sequence[int]]:
        self.calls.append((list(context), length, limit))
        return self.answer


instances: list[Fixed] = []
NAME = f"{__name__}:Fixed"


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[int]]:
    """The list to fill with what `Fixed` proposes."""
    instances.clear()
    answers: list[Sequence[int]] = []
    monkeypatch.setattr(Fixed, "answer", answers)
    return answers


# Where drafts come from


def test_primary_is_the_longest_candidate(answer: list[Sequence[int]]) -> None:
    answer += [[1], [2, 3, 4], [5, 6]]
    assert SequenceState(config_of(0, 4, 3, NAME), [9], 1).propose() == [2, 3, 4]


def test_primary_is_the_first_among_equally_long_candidates(answer: list[Sequence[int]]) -> None:
    answer += [[1], [5, 6], [2, 3]]
    assert SequenceState(config_of(0, 4, 3, NAME), [9], 1).propose() == [5, 6]


def test_primary_is_the_newest_ngram_that_starts_with_the_root() -> None:
    state = SequenceState(config_of(0, 3, 2, "prompt"), [9, 1, 2, 9, 3, 4, 9], 7)
    assert state.propose() == [3, 4]


def test_all_candidates_are_in_the_tree() -> None:
    state = SequenceState(config_of(0, 3, 2, "prompt"), [9, 1, 2, 9, 3, 4, 9], 7)
    tree = state.plan(state.propose(), **NO_LIMITS)
    assert tree.token_ids.tolist() == [9, 3, 4, 1, 2]


def test_no_more_candidates_than_g_are_in_the_tree(answer: list[Sequence[int]]) -> None:
    answer += [[1], [2], [1], [3], [4]]
    state = SequenceState(config_of(0, 2, 3, NAME), [9], 1)
    tree = state.plan(state.propose(), **NO_LIMITS)
    assert tree.token_ids.tolist() == [9, 1, 2, 3]


def test_without_candidates_the_draft_is_the_windows_path() -> None:
    # All guesses are tokens of the text, and this one has but one.
    state = SequenceState(config_of(3, 3, 2, "window"), [7], 1)
    assert state.propose() == [7, 7]
    tree = state.plan(state.propose(), **NO_LIMITS)
    state.commit(walk_to(tree, 5), row(5, 6, 8))
    # Row 0 is 7 7, row 1 is 5 6 8: along row 0, then up the last column, N - 1 = 2 tokens.
    assert state.propose() == [7, 7]
    tree = state.plan(state.propose(), **NO_LIMITS)
    state.commit(walk_to(tree, 9), row(1, 2, 3))
    assert state.propose() == [6, 8]


def test_window_path_is_no_draft_unless_the_window_is_verified() -> None:
    config = LookaheadConfig(window_size=3, verify_window=False)
    assert SequenceState(config, [7], 1).propose() == []


def test_without_candidates_and_window_there_is_no_draft() -> None:
    state = SequenceState(config_of(0, 3, 2, "output"), [7, 8], 1)
    assert state.propose() == []
    assert state.plan([], **NO_LIMITS).size == 1


def test_tree_is_built_around_what_was_granted_of_the_draft() -> None:
    state = SequenceState(config_of(0, 4, 2, "prompt"), [9, 1, 2, 3, 9, 1, 2, 4, 9], 9)
    assert state.propose() == [1, 2, 4]
    assert state.plan([1, 2], **NO_LIMITS).token_ids.tolist() == [9, 1, 2]
    assert state.plan([], **NO_LIMITS).token_ids.tolist() == [9]


@pytest.mark.parametrize(
    ("sources", "size"),
    [
        # N = 3; prompt 1 2 3 4, output 5 6: n-grams 123 234 by the prompt, 345 456 by the output.
        (["prompt"], 2),
        (["output"], 2),
        (["prompt", "output"], 4),
        (["window"], 0),
    ],
)
def test_ngrams_of_the_text_belong_to_the_source_of_their_last_token(
    sources: list[str], size: int
) -> None:
    state = SequenceState(config_of(1, 3, 2, *sources), [1, 2, 3, 4, 5, 6], 4)
    assert state.pool_size == size


def test_emitted_tokens_are_pooled_with_the_text_before_them() -> None:
    state = SequenceState(config_of(0, 3, 2, "output"), [1, 2], 1)
    state.commit(walk_to(linear_tree([3, 4], root=2), 3, 4, 1), row())
    # Text 1 2 3 4 1: the root is 1 again, which 2 3 followed.
    assert state.root == 1
    assert state.num_tokens == 5
    assert state.pool_size == 3
    assert state.propose() == [2, 3]


def test_ngrams_of_the_window_are_pooled_with_the_old_root_as_key() -> None:
    state = SequenceState(config_of(1, 3, 2, "window"), [7], 1)
    for token, output in [(5, 1), (6, 2)]:
        tree = state.plan([], **NO_LIMITS)
        state.commit(walk_to(tree, token), row(output))
    # Roots were 7 while row 1 was made and 5 while the n-gram was.
    assert state.pool_size == 1
    tree = state.plan([], **NO_LIMITS)
    state.commit(walk_to(tree, 5), row(3))
    assert state.root == 5
    assert state.propose() == [1, 2]


def test_ngrams_of_the_window_are_not_pooled_unless_it_is_a_source() -> None:
    state = SequenceState(config_of(1, 3, 2, "prompt"), [7], 1)
    for token, output in [(5, 1), (6, 2), (5, 3)]:
        tree = state.plan([], **NO_LIMITS)
        state.commit(walk_to(tree, token), row(output))
    assert state.pool_size == 0


def test_jacobi_guesses_move_up_by_what_was_accepted() -> None:
    state = SequenceState(config_of(4, 2, 0), [7], 1)
    assert state.propose() == [7, 7, 7]
    tree = state.plan([7, 7, 7], **NO_LIMITS)
    # One draft token is right. The outputs stand 1 to 4 after the old root, the new one 2 after.
    state.commit(walk_to(tree, 7, 5), row(7, 5, 6, 8))
    assert state.root == 5
    assert state.propose() == [6, 8, 8]


def test_window_that_was_not_fed_stays_as_it_is() -> None:
    state = SequenceState(config_of(3, 3, 1, "window"), [7], 1)
    tree = state.plan([], max_nodes=1, max_depth=1000, max_branches=1000)
    assert len(tree.window_leaves) == 0
    state.commit(walk_to(tree, 5), row())
    fed = state.plan([], **NO_LIMITS)
    assert fed.token_ids.tolist() == [5, 7, 7]


def test_window_starts_from_equal_guesses_for_equal_seeds_and_texts() -> None:
    def guesses(seed: int) -> list[int]:
        config = LookaheadConfig(window_size=20, seed=seed)
        state = SequenceState(config, list(range(100)), 100)
        return state.plan([], **NO_LIMITS).token_ids.tolist()

    assert guesses(1) == guesses(1) != guesses(2)
    assert set(guesses(1)) <= set(range(100))


def test_window_starts_from_no_guess_outside_of_the_vocabulary() -> None:
    text = [300] * 100 + [1, 2]
    state = SequenceState(LookaheadConfig(window_size=20), text, 100, vocab_size=300)
    assert set(state.plan([], **NO_LIMITS).token_ids.tolist()) == {1, 2}


def test_sequence_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        SequenceState(LookaheadConfig(), [], 0)


# The suffix source


def suffix_config(length: int, *sources: str, G: int = 4) -> LookaheadConfig:
    return LookaheadConfig(
        window_size=0,
        ngram_size=3,
        verification_set_size=G,
        draft_length=length,
        sources=("suffix", *sources),
    )


def test_draft_is_what_followed_the_longest_match_up_to_the_draft_length() -> None:
    # 2 was followed by 4 last, but 1 2 by 3.
    text = [1, 2, 3, 5, 2, 4, 6, 1, 2]
    assert SequenceState(suffix_config(4), text, 9).propose() == [3, 5, 2, 4]


def test_text_that_has_come_round_is_proposed_over_and_over() -> None:
    assert SequenceState(suffix_config(5), [7, 1, 2, 1, 2], 5).propose() == [1, 2, 1, 2, 1]


def test_emitted_tokens_are_matched_and_proposed() -> None:
    state = SequenceState(suffix_config(2), [1, 2], 2)
    assert state.propose() == []
    state.commit(walk_to(linear_tree([], root=2), 3), row())
    assert state.propose() == []
    state.commit(walk_to(linear_tree([], root=3), 1), row())
    assert state.propose() == [2, 3]


def test_suffix_draft_ends_before_what_is_outside_of_the_vocabulary() -> None:
    state = SequenceState(suffix_config(4), [1, 2, 300, 3, 1], 5, vocab_size=300)
    assert state.propose() == [2]
    # What follows the root is outside already.
    assert SequenceState(suffix_config(4), [1, 300, 3, 1], 4, vocab_size=300).propose() == []


def test_all_that_followed_the_longest_match_is_proposed() -> None:
    # After 1 2 came 3 1 2 and 4 1 9, of which the newer is the likelier; 5 6 came after 9 2.
    text = [1, 2, 3, 1, 2, 4, 1, 9, 2, 5, 6, 1, 2]
    state = SequenceState(suffix_config(3), text, 13)
    assert state.propose() == [4, 1, 9]
    assert state.candidates == [[4, 1, 9], [3, 1, 2]]


def test_ngrams_follow_what_the_suffix_match_proposes() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 9, 2, 5, 6, 1, 2]
    state = SequenceState(suffix_config(3, "prompt"), text, 13)
    assert state.propose() == [4, 1, 9]
    # 4 1 and 3 1 were found as n-grams, too.
    assert state.candidates == [[4, 1, 9], [3, 1, 2], [5, 6]]


def test_ngrams_come_newest_first_without_the_suffix_source() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 9, 2, 5, 6, 1, 2]
    state = SequenceState(config_of(0, 3, 4, "prompt"), text, 13)
    state.propose()
    assert state.candidates == [[5, 6], [4, 1], [3, 1]]


def test_ngrams_are_cut_to_the_draft_length() -> None:
    config = LookaheadConfig(
        window_size=0, ngram_size=5, verification_set_size=4, draft_length=2, sources=("prompt",)
    )
    text = [9, 1, 2, 3, 4, 9, 1, 2, 5, 6, 9]
    state = SequenceState(config, text, len(text))
    assert state.propose() == [1, 2]
    assert state.candidates == [[1, 2]]


# Choosing


def one_chance(chance: float) -> AcceptanceModel:
    """A model in which every token is right with the same chance."""
    model = AcceptanceModel()
    model.probability = [chance] * NUM_CLASSES
    return model


def state_of_three_candidates(model: AcceptanceModel | None = None) -> SequenceState:
    """Candidates 3 1 2, 4 1 9 and 5 6 behind the root 2."""
    text = [1, 2, 3, 1, 2, 4, 1, 9, 2, 5, 6, 1, 2]
    return SequenceState(suffix_config(3, "prompt"), text, 13, acceptance=model or one_chance(0.5))


def test_gathered_are_the_values_of_all_tokens() -> None:
    # 3 and 4, what follows them, what follows that; then 5 6.
    free = [0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.5, 0.25]
    assert state_of_three_candidates().gather() == free
    # The second and the third candidate start branches.
    priced = [0.5, 0.25, 0.25, 0.25, 0.125, 0.125, 0.25, 0.25]
    assert state_of_three_candidates().gather(0.25) == priced


def test_tokens_under_the_floor_are_not_gathered_but_for_those_that_follow_the_text() -> None:
    assert state_of_three_candidates().gather(floor=0.25) == [0.5, 0.5, 0.25, 0.25, 0.5, 0.25]
    # 3 and 4; of the n-grams, only the first one's first token is kept, which is 4.
    assert state_of_three_candidates().gather(floor=0.6) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("cutoff", "candidates"),
    [
        (EVERYTHING, [[3, 1, 2], [4, 1, 9], [5, 6]]),
        (0.125, [[3, 1, 2], [4, 1, 9], [5, 6]]),
        (0.2, [[3, 1], [4, 1], [5, 6]]),
        (0.3, [[3], [4], [5]]),
        (0.6, []),
        (NOTHING, []),
    ],
)
def test_selected_are_the_tokens_worth_the_cutoff(
    cutoff: float, candidates: list[list[int]]
) -> None:
    state = state_of_three_candidates()
    state.gather()
    draft = state.select(cutoff)
    assert state.candidates == candidates
    assert draft == (candidates[0] if candidates else [])
    tree = state.plan(draft, **NO_LIMITS)
    assert tree.size == 1 + sum(map(len, candidates))


def test_candidate_of_which_no_more_is_left_than_of_one_before_it_is_left_out(
    answer: list[Sequence[int]],
) -> None:
    answer += [[1, 2], [1, 3]]
    config = config_of(0, 4, 3, NAME)
    state = SequenceState(config, [9], 1, acceptance=one_chance(0.5))
    state.gather()
    assert state.select(0.5) == [1]
    assert state.candidates == [[1]]
    assert state.is_linear


def test_same_candidate_from_two_sources_counts_once() -> None:
    # The suffix match, 2 3 1, and the n-gram 2 3 share all but the last token.
    state = SequenceState(suffix_config(3, "prompt"), [1, 2, 3, 1], 4, acceptance=one_chance(0.5))
    assert state.gather() == [0.5, 0.25, 0.125]
    assert SequenceState(suffix_config(2, "prompt", G=1), [1, 2, 3, 1], 4).propose() == [2, 3]


def test_step_is_linear_if_its_tree_is_no_more_than_its_draft() -> None:
    state = state_of_three_candidates()
    state.gather()
    linear = []
    for cutoff in (EVERYTHING, NOTHING):
        state.select(cutoff)
        linear.append(state.is_linear)
    assert linear == [False, True]
    single = SequenceState(suffix_config(3), [1, 2, 1], 3)
    single.propose()
    assert single.is_linear


# Feeding the window


def test_window_is_gathered_as_so_many_tokens_of_equal_value() -> None:
    state = SequenceState(config_of(3, 3, 2, "window"), [7], 1)
    first, *others = state.gather()
    # Row 0 has two tokens.
    assert others == [first]
    assert 2 * first == pytest.approx(AcceptanceModel().window_value(0))
    state.commit(walk_to(state.plan([], **NO_LIMITS), 5), row(5, 6, 8))
    assert len(state.gather()) == 5


def test_window_is_fed_whole_or_not_at_all() -> None:
    state = SequenceState(config_of(3, 3, 2, "window"), [7], 1)
    value = state.gather()[0]
    for cutoff, size in [(value, 3), (value + 1e-9, 1), (EVERYTHING, 3), (NOTHING, 1)]:
        draft = state.select(cutoff)
        assert len(draft) == size - 1
        assert state.plan(draft, **NO_LIMITS).size == size
        assert state.is_linear is (size == 1)


def test_window_is_fed_whatever_it_is_worth_to_explore() -> None:
    state = SequenceState(config_of(3, 3, 2, "window"), [7], 1)
    state.gather()
    assert state.select(NOTHING, explore=True) == [7, 7]
    assert state.plan([7, 7], **NO_LIMITS).size == 3


def test_window_is_chosen_by_the_value_that_was_gathered_its_branches_paid() -> None:
    state = SequenceState(config_of(3, 3, 2, "window"), [7], 1)
    priced, free = state.gather(0.1)[0], state.gather()[0]
    assert priced < free
    state.gather(0.1)
    assert state.select((priced + free) / 2) == []
    assert state.select(priced) == [7, 7]


def test_window_that_is_fed_is_no_draft_beside_candidates(answer: list[Sequence[int]]) -> None:
    answer += [[5]]
    state = SequenceState(config_of(3, 3, 2, NAME), [7], 1)
    assert state.propose() == [5]
    assert state.plan([5], **NO_LIMITS).token_ids.tolist() == [7, 5, 7, 7]


def test_window_of_one_column_that_feeds_no_token_costs_nothing_and_moves_on() -> None:
    state = SequenceState(config_of(1, 3, 2, "window"), [7], 1)
    assert state.gather(branch_price=0.02) == []
    assert state.select(0.9) == []
    tree = state.plan([], **NO_LIMITS)
    assert tree.window_leaves.tolist() == [0]
    state.commit(walk_to(tree, 5), row(5))
    # Row 1 has a token, which is gathered.
    assert len(state.gather()) == 1


# Learning


def test_hits_and_misses_are_learned_by_source_quality_and_depth() -> None:
    model = one_chance(0.5)
    state = state_of_three_candidates(model)
    draft = state.propose()
    state.commit(walk_to(state.plan(draft, **NO_LIMITS), 4, 8), row())
    learned = {
        token_class: chance for token_class, chance in enumerate(model.probability) if chance != 0.5
    }
    # One observation beside six: 3 and 4 after 1 2, 1 after 1 2 4; 5 doesn't follow 1 2.
    hit, miss = pytest.approx(4 / 7), pytest.approx(3 / 7)
    after_root = dict(classify(SUFFIX, 1, [(3, 1), (4, 1)]))
    after_four = dict(classify(SUFFIX, 1, [(1, 1)]))
    assert learned == {
        after_root[3]: miss,
        after_root[4]: hit,
        after_four[1]: miss,
        pool_class(2, False, False): miss,
    }


def test_candidates_are_learned_about_without_being_fed() -> None:
    fed, not_fed = one_chance(0.5), one_chance(0.5)
    for model, cutoff in [(fed, EVERYTHING), (not_fed, NOTHING)]:
        state = state_of_three_candidates(model)
        state.gather()
        draft = state.select(cutoff)
        state.commit(walk_to(state.plan(draft, **NO_LIMITS), *([4, 8] if draft else [4])), row())
    # All the same, but what follows the first token is told only where it was emitted.
    after_root = dict(classify(SUFFIX, 1, [(3, 1), (4, 1)]))
    assert not_fed.probability[after_root[4]] == fed.probability[after_root[4]] > 0.5
    for token_class in (after_root[3], pool_class(2, False, False)):
        assert not_fed.probability[token_class] == fed.probability[token_class] < 0.5


def test_sequences_with_one_model_learn_from_each_other() -> None:
    model = one_chance(0.5)
    teacher, pupil = state_of_three_candidates(model), state_of_three_candidates(model)
    before = pupil.gather()[0]
    teacher.propose()
    teacher.commit(walk_to(linear_tree([], root=2), 4), row())
    assert pupil.gather()[0] > before


def test_sequence_without_a_model_learns_for_itself() -> None:
    text = [1, 2, 3, 1, 2]
    teacher, other = (SequenceState(suffix_config(2), text, 5) for _ in range(2))
    before = other.gather()
    teacher.propose()
    teacher.commit(walk_to(linear_tree([], root=2), 3), row())
    assert other.gather() == before


def test_window_gains_what_only_it_had_right() -> None:
    gains = []
    for said in [(7, 7, 3), (5,), (7, 4)]:
        model = AcceptanceModel()
        before = model.window_value(0)
        state = SequenceState(config_of(3, 3, 2, "window"), [7], 1, acceptance=model)
        tree = state.plan(state.propose(), **NO_LIMITS)
        state.commit(walk_to(tree, *said), row(5, 6, 8))
        gains.append(model.window_value(0) - before)
    two, none, one = gains
    # A hundredth of a token per token.
    assert two - one == pytest.approx(one - none) == pytest.approx(0.01)


def test_window_gains_nothing_by_tokens_that_a_candidate_had_right_too(
    answer: list[Sequence[int]],
) -> None:
    answer += [[7, 7]]
    model, idle = AcceptanceModel(), AcceptanceModel()
    state = SequenceState(config_of(3, 3, 2, NAME), [7], 1, acceptance=model)
    tree = state.plan(state.propose(), **NO_LIMITS)
    state.commit(walk_to(tree, 7, 7, 3), row(5, 6, 8))
    idle.learn_window(0, 0)
    assert model.window_value(0) == idle.window_value(0)


def test_window_gains_by_tokens_of_a_candidate_that_was_not_fed(
    answer: list[Sequence[int]],
) -> None:
    answer += [[7, 7]]
    model, gaining = AcceptanceModel(), AcceptanceModel()
    state = SequenceState(config_of(3, 3, 2, NAME), [7], 1, acceptance=model)
    state.gather()
    tree = state.plan(state.select(NOTHING, explore=True), **NO_LIMITS)
    state.commit(walk_to(tree, 7, 7, 3), row(5, 6, 8))
    gaining.learn_window(0, 2)
    assert model.window_value(0) == gaining.window_value(0)


def test_ngrams_of_the_window_that_come_true_count_as_its_return() -> None:
    model = AcceptanceModel()
    state = SequenceState(config_of(1, 3, 2, "window"), [7], 1, acceptance=model)
    for token, output in [(5, 1), (6, 2), (5, 3)]:
        state.commit(walk_to(state.plan([], **NO_LIMITS), token), row(output))
    # The n-gram 5: 1 2, see above.
    assert state.propose() == [1, 2]
    before = model.window_value(0)
    state.commit(walk_to(linear_tree([1, 2], root=5), 1, 2, 9), row())
    # A 200th of a token for each.
    assert model.window_value(0) - before == pytest.approx(0.01)


# Planning


def test_planning_does_not_change_the_state() -> None:
    text = [1, 2, 3, 1, 2, 4, 1]

    def plan(state: SequenceState, **limits: int) -> TokenTree:
        return state.plan([2, 4], **(NO_LIMITS | limits))

    config = config_of(3, 3, 2, "window", "prompt", "output")
    planned_once, planned_often = SequenceState(config, text, 5), SequenceState(config, text, 5)
    for state in (planned_once, planned_often):
        assert state.propose() == [2, 4]
    plan(planned_often, max_nodes=3)
    plan(planned_often, max_branches=1)
    expected, tree = plan(planned_once), plan(planned_often)
    assert expected.size > 3
    for field in ("token_ids", "parents", "window_leaves", "acceptable"):
        assert getattr(tree, field).tolist() == getattr(expected, field).tolist()
    assert planned_often.num_tokens == 7
    assert planned_often.pool_size == planned_once.pool_size
    assert planned_often.propose() == [2, 4]


# Custom sources


def test_custom_source_is_asked_with_the_text_and_the_limits(answer: list[Sequence[int]]) -> None:
    config = config_of(0, 4, 2, NAME)
    state = SequenceState(config, [8, 9], 1)
    state.propose()
    state.commit(walk_to(linear_tree([], root=9), 5), row())
    state.propose()
    [source] = instances
    assert source.config == config
    assert source.calls == [([8, 9], 3, 2), ([8, 9, 5], 3, 2)]


def test_custom_source_is_given_numbers_for_automatic_sizes(answer: list[Sequence[int]]) -> None:
    SequenceState(LookaheadConfig(sources=(NAME,)), [8, 9], 1)
    [source] = instances
    config = source.config
    assert (config.window_size, config.ngram_size, config.verification_set_size) == (7, 5, 8)


@pytest.mark.parametrize("token", [-1, 300])
def test_custom_token_outside_of_the_vocabulary_is_an_error_that_names_the_source(
    answer: list[Sequence[int]], token: int
) -> None:
    answer += [[1, token]]
    state = SequenceState(config_of(0, 4, 2, NAME), [9], 1, vocab_size=300)
    with pytest.raises(ValueError, match=f"{NAME} proposed token {token}, .* vocabulary of 300"):
        state.propose()


def test_every_sequence_has_its_own_custom_source(answer: list[Sequence[int]]) -> None:
    for _ in range(2):
        SequenceState(config_of(0, 4, 2, NAME), [8, 9], 1)
    assert len(instances) == 2


def test_custom_candidates_are_cut_to_the_draft_length(answer: list[Sequence[int]]) -> None:
    answer += [[1, 2, 3, 4, 5]]
    assert SequenceState(config_of(0, 3, 2, NAME), [9], 1).propose() == [1, 2]


def test_empty_custom_candidates_are_ignored(answer: list[Sequence[int]]) -> None:
    answer += [[], [1]]
    assert SequenceState(config_of(0, 3, 1, NAME), [9], 1).propose() == [1]


@pytest.mark.parametrize(
    ("sources", "tokens"),
    [((NAME, "prompt"), [9, 5, 1]), (("prompt", NAME), [9, 1, 5])],
    ids=["custom first", "pool first"],
)
def test_candidates_come_in_the_order_of_their_sources(
    answer: list[Sequence[int]], sources: tuple[str, ...], tokens: list[int]
) -> None:
    answer += [[5]]
    state = SequenceState(config_of(0, 2, 2, *sources), [9, 1, 9], 3)
    assert state.plan(state.propose(), **NO_LIMITS).token_ids.tolist() == tokens


def test_class_with_propose_is_a_candidate_source() -> None:
    assert load_source(NAME) is Fixed
    assert isinstance(Fixed(LookaheadConfig()), CandidateSource)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:Source", "can't be loaded: No module named 'no_such_module'"),
        ("json:Source", "can't be loaded: .* has no attribute 'Source'"),
        ("json:JSONEncoder", r"has no method propose\(context, length, limit\)"),
    ],
)
def test_source_that_is_none_is_refused_with_its_name(name: str, reason: str) -> None:
    with pytest.raises(LookaheadConfigError, match=f"sources names '{name}', which {reason}"):
        SequenceState(config_of(0, 3, 1, name), [9], 1)


# Memory


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), max_size=12),
)
def test_pool_keeps_within_its_capacity_and_g_ngrams_per_key(
    capacity: int, G: int, steps: list[list[int]]
) -> None:
    config = LookaheadConfig(
        window_size=3, ngram_size=3, verification_set_size=G, pool_capacity=capacity
    )
    state = SequenceState(config, [0, 1, 2, 3] * 3, 8)
    for token, *outputs in steps:
        tree = state.plan([], **NO_LIMITS)
        state.commit(walk_to(tree, token), row(*outputs))
        assert state.pool_size <= min(capacity, 4 * G)


def test_without_candidates_nothing_is_pooled() -> None:
    config = LookaheadConfig(window_size=3, ngram_size=2, verification_set_size=0)
    state = SequenceState(config, [0, 1, 2, 3] * 3, 8)
    tree = state.plan([], **NO_LIMITS)
    state.commit(walk_to(tree, 1), row(1, 2, 3))
    assert state.pool_size == 0


# Time


def lines_of_a_step(context: int) -> int:
    """Lines of Python that a step runs after a text of ``context`` tokens."""
    # Everything repeats after 97 tokens, so short and long texts find as much.
    text = [7 * position % 97 for position in range(context)]
    config = LookaheadConfig(window_size=2, ngram_size=3, verification_set_size=8)
    state = SequenceState(config, text, context)
    count = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        tree = state.plan(state.propose(), **NO_LIMITS)
        state.commit(walk_to(tree, 98, 98), row(*[5] * len(tree.window_leaves)))
    finally:
        sys.settrace(before)
    return count


def test_a_step_is_no_more_work_after_a_long_text() -> None:
    assert lines_of_a_step(970) == lines_of_a_step(9700) > 100


# Rest


def test_sequence_that_rests_feeds_its_root_alone_and_its_text_goes_on() -> None:
    state = SequenceState(suffix_config(4, "window"), [1, 2, 3, 1], 4)
    twin = SequenceState(suffix_config(4, "window"), [1, 2, 3, 1], 4)
    assert state.propose() == twin.propose() != []
    state.rest()
    assert state.is_linear
    assert state.candidates == []
    tree = state.plan([], max_nodes=99, max_depth=99, max_branches=99)
    assert tree.token_ids.tolist() == [1]
    state.commit(walk_to(tree, 7), row())
    assert list(state.tokens) == [1, 2, 3, 1, 7]


def test_sequence_knows_after_a_rest_what_was_said_in_it() -> None:
    state = SequenceState(suffix_config(4), [1, 2, 3], 3)
    for token in (9, 8, 1, 2, 3):
        state.rest()
        tree = state.plan([], max_nodes=99, max_depth=99, max_branches=99)
        state.commit(walk_to(tree, token), row())
    assert state.propose() == [9, 8, 1, 2]
