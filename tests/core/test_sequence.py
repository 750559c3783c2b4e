"""One sequence's state: where drafts come from, what planning leaves alone, memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import NO_LIMITS
from vllm_lookahead.config import LookaheadConfig, LookaheadConfigError
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
    assert source.config is config
    assert source.calls == [([8, 9], 3, 2), ([8, 9, 5], 3, 2)]


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
