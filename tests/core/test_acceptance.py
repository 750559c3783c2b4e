"""What is learned of candidates and windows, against shares counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lookahead.core.acceptance import (
    MATCHES,
    NUM_CLASSES,
    NUM_DEPTHS,
    SUFFIX,
    AcceptanceModel,
    Classified,
    classify,
    classify_model,
    classify_shared,
    confirm,
    custom_class,
    is_guessed,
    kind_of_match,
    pool_class,
)
from vllm_lookahead.core.followers import NUM_EVIDENCES, NUM_SHARES, NUM_TOTALS
from vllm_lookahead.core.suffix import MATCH_LENGTHS, Followers

RANKS = 4
LENGTHS = range(len(MATCH_LENGTHS))

Classify = Callable[[int, Followers], Classified]
"""Classes of what followed a match."""


def own(match: int, followers: Followers) -> Classified:
    return classify(SUFFIX, match, followers)


def confirmed(match: int, followers: Followers) -> Classified:
    """In the own text, and in others too."""
    return confirm(own(match, followers), followers)


def denied(match: int, followers: Followers) -> Classified:
    """In the own text, where others say something else."""
    return confirm(own(match, followers), [(99, 1)])


def beside(longer: int) -> Classify:
    """In texts of other requests, where the own text's match is so much longer."""
    return lambda match, followers: classify_shared(match, match + longer, followers)


TEXTS: list[Classify] = [own, confirmed, denied, beside(-1), beside(0), beside(1)]
MODELS = [
    token_class
    for match in LENGTHS
    for own_match in (match - 1, match, match + 1)
    for _, token_class in classify_model(
        match, own_match, [(7, evidence) for evidence in range(NUM_EVIDENCES)]
    )
]
GUESSED = [
    pool_class(rank, pair, True) + depth
    for pair in (False, True)
    for rank in range(RANKS)
    for depth in range(NUM_DEPTHS)
]
NGRAMS = [
    *(pool_class(rank, pair, False) for pair in (False, True) for rank in range(RANKS)),
    *(custom_class(rank) for rank in range(RANKS)),
]
RIVALRIES = [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (1, 2), (2, 3), (3, 4)]
"""(count, that of all others): no others, no more than the count, and more."""


def class_of(count: int, others: int, newest: bool, match: int = 1, text: Classify = own) -> int:
    """Class of a token that followed ``count`` times, and another one ``others`` times."""
    followers = [(7, count), (8, others)] if others else [(7, count)]
    return dict(text(match, followers if not newest else followers[::-1]))[7]


def text_classes(text: Classify) -> list[int]:
    """Classes of all that may follow matches."""
    return [
        class_of(count, others, newest, match, text)
        for match in LENGTHS
        for count, others in RIVALRIES
        for newest in (False, True)
        # What alone followed is the newest.
        if others or newest
    ]


OTHERS = [
    *(each for text in TEXTS for each in text_classes(text)),
    *MODELS,
    *(first + depth for first in NGRAMS for depth in range(NUM_DEPTHS)),
]


# Classes


def test_every_source_quality_and_depth_is_a_class_of_its_own() -> None:
    classes = GUESSED + OTHERS
    assert len(set(classes)) == len(classes)
    assert min(classes) >= 0
    assert max(classes) == NUM_CLASSES - 1


def test_followers_are_classified_in_their_order() -> None:
    followers = [(5, 1), (7, 2), (3, 3)]
    assert [token for token, _ in classify(SUFFIX, 2, followers)] == [5, 7, 3]


@pytest.mark.parametrize("count", [4, 255, 1000])
def test_counts_of_three_and_more_share_a_class(count: int) -> None:
    assert class_of(count, 0, True) == class_of(3, 0, True)
    assert class_of(count, 1, False) == class_of(3, 1, False)


@pytest.mark.parametrize(("others", "like"), [(1, 1), (3, 1), (4, 9), (100, 9)])
def test_rivals_that_followed_more_often_make_another_class(others: int, like: int) -> None:
    assert class_of(3, others, False) == class_of(3, like, False)
    assert class_of(3, 1, False) != class_of(3, 9, False)


def test_all_rivals_count_together() -> None:
    classified = dict(classify(SUFFIX, 1, [(5, 1), (6, 1), (7, 2), (8, 2)]))
    # Four others against two, and against one five.
    assert classified[7] == class_of(2, 4, False)
    assert classified[5] == classified[6] == class_of(1, 5, False)
    assert classified[8] == class_of(2, 4, True)


@pytest.mark.parametrize(
    ("match", "own_match", "longer"),
    [(0, -1, -1), (3, -1, -1), (3, 2, -1), (0, 0, 0), (3, 3, 0), (0, 3, 1), (2, 3, 1)],
)
def test_other_texts_are_told_apart_by_whether_ones_own_match_is_shorter_equal_or_longer(
    match: int, own_match: int, longer: int
) -> None:
    followers = [(5, 1), (6, 2)]
    for classified in (classify_shared, classify_model):
        expected = classified(match, match + longer, followers)
        assert classified(match, own_match, followers) == expected
        assert [token for token, _ in expected] == [5, 6]


def test_own_followers_are_told_apart_by_whether_other_texts_have_them_too() -> None:
    followers = [(5, 1), (6, 2), (7, 1)]
    # How often it followed there, and what else did, doesn't matter.
    mixed = confirm(own(1, followers), [(8, 3), (6, 1)])
    assert mixed == [denied(1, followers)[0], confirmed(1, followers)[1], denied(1, followers)[2]]


@pytest.mark.parametrize(("length", "kind"), [(0, 0), (1, 1), (2, 1), (4, 2), (8, 2)])
def test_kinds_of_matches_are_none_short_and_long(length: int, kind: int) -> None:
    assert kind_of_match(MATCH_LENGTHS.index(length) if length else -1) == kind < MATCHES


@pytest.mark.parametrize("rank", [RANKS, 100])
def test_late_ranks_share_the_class_of_the_last_one(rank: int) -> None:
    assert custom_class(rank) == custom_class(RANKS - 1)
    for pair in (False, True):
        for guessed in (False, True):
            assert pool_class(rank, pair, guessed) == pool_class(RANKS - 1, pair, guessed)


def test_only_pooled_ngrams_of_the_window_are_guessed_at_any_depth() -> None:
    assert all(is_guessed(each) for each in GUESSED)
    assert not any(is_guessed(each) for each in OTHERS)


def test_token_without_a_class_is_not_guessed() -> None:
    assert not is_guessed(-1)


# Acceptance


def test_first_estimates_are_probabilities_for_every_class() -> None:
    probability = AcceptanceModel().probability
    assert len(probability) == NUM_CLASSES
    assert all(0 < each < 1 for each in probability)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("newest", [False, True])
def test_longer_matches_are_thought_likelier_at_first(text: Classify, newest: bool) -> None:
    probability = AcceptanceModel().probability
    for count, others in RIVALRIES[3:]:
        by_length = [probability[class_of(count, others, newest, match, text)] for match in LENGTHS]
        assert by_length == sorted(set(by_length))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("match", LENGTHS)
def test_what_followed_more_often_is_thought_likelier_at_first(text: Classify, match: int) -> None:
    probability = AcceptanceModel().probability
    for counts in (RIVALRIES[:3], RIVALRIES[3:6], RIVALRIES[6:]):
        classes = [class_of(count, others, True, match, text) for count, others in counts]
        assert [probability[each] for each in classes] == sorted(
            {probability[each] for each in classes}
        )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rivals_make_a_token_less_likely_at_first(text: Classify, count: int) -> None:
    probability = AcceptanceModel().probability
    for match in LENGTHS:
        alone, beside_few, beside_many = (
            probability[class_of(count, others, True, match, text)] for others in (0, 1, 9)
        )
        assert alone > beside_few > beside_many


@pytest.mark.parametrize("text", TEXTS)
def test_newest_follower_is_thought_likelier_at_first_than_an_older_one(text: Classify) -> None:
    probability = AcceptanceModel().probability
    for match in LENGTHS:
        for count, others in RIVALRIES[3:]:
            older, newer = (
                probability[class_of(count, others, newest, match, text)]
                for newest in (False, True)
            )
            assert newer > older


def test_other_texts_are_trusted_less_at_first_than_ones_own_and_beside_a_longer_match_least() -> (
    None
):
    probability = AcceptanceModel().probability
    columns = [text_classes(text) for text in (own, beside(-1), beside(0), beside(1))]
    for same in zip(*columns, strict=True):
        alone, *others = (probability[each] for each in same)
        assert alone > others[0] > others[1] > others[2]


@pytest.mark.parametrize("evidence", range(NUM_EVIDENCES))
def test_models_text_is_trusted_less_at_first_beside_a_longer_match_in_ones_own(
    evidence: int,
) -> None:
    probability = AcceptanceModel().probability
    for match in LENGTHS:
        shorter, equal, longer = (
            probability[dict(classify_model(match, own_match, [(7, evidence)]))[7]]
            for own_match in (match - 1, match, match + 1)
        )
        assert shorter > equal > longer


def test_larger_share_of_the_models_text_is_thought_likelier_at_first() -> None:
    probability = AcceptanceModel().probability
    for match in LENGTHS:
        for total in range(NUM_TOTALS):
            evidences = [total * NUM_SHARES + share for share in range(NUM_SHARES)]
            classified = classify_model(match, -1, [(7, evidence) for evidence in evidences])
            chances = [probability[token_class] for _, token_class in classified]
            assert chances == sorted(set(chances))


def test_own_followers_are_trusted_less_at_first_where_other_texts_say_something_else() -> None:
    probability = AcceptanceModel().probability
    for same in zip(*map(text_classes, [own, confirmed, denied]), strict=True):
        alone, agreed, against = (probability[each] for each in same)
        assert agreed >= alone > against


def test_later_ngrams_of_a_key_are_thought_less_likely_at_first() -> None:
    probability = AcceptanceModel().probability
    for pair in (False, True):
        for guessed in (False, True):
            by_rank = [probability[pool_class(rank, pair, guessed)] for rank in range(RANKS)]
            assert by_rank == sorted(by_rank, reverse=True)


@given(st.integers(0, NUM_CLASSES - 1), st.lists(st.booleans(), max_size=100))
def test_estimate_is_the_share_of_hits_with_the_first_estimate_as_six_observations(
    token_class: int, hits: list[bool]
) -> None:
    model = AcceptanceModel()
    first = model.probability[token_class]
    for hit in hits:
        model.learn(token_class, hit)
    share = (6 * first + sum(hits)) / (6 + len(hits))
    assert model.probability[token_class] == pytest.approx(share)


def test_after_400_observations_each_new_one_counts_a_400th() -> None:
    model = AcceptanceModel()
    for _ in range(500):
        model.learn(3, True)
    before = model.probability[3]
    model.learn(3, False)
    assert model.probability[3] == pytest.approx(before * 399 / 400)


def test_what_has_changed_is_learned_however_much_was_seen_before() -> None:
    model = AcceptanceModel()
    for _ in range(10_000):
        model.learn(3, True)
    assert model.probability[3] == pytest.approx(1)
    for _ in range(4000):
        model.learn(3, False)
    # 0.9975 ** 4000 is 0.00004.
    assert model.probability[3] < 0.0001


def test_classes_learn_apart_from_each_other() -> None:
    model, untouched = AcceptanceModel(), AcceptanceModel()
    model.learn(3, True)
    assert model.probability[3] > untouched.probability[3]
    assert [*model.probability[:3], *model.probability[4:]] == [
        *untouched.probability[:3],
        *untouched.probability[4:],
    ]


def test_engines_learn_apart_from_each_other() -> None:
    AcceptanceModel().learn(3, True)
    assert AcceptanceModel().probability == AcceptanceModel().probability


@given(st.lists(st.booleans(), max_size=50))
def test_estimate_stays_a_probability(hits: list[bool]) -> None:
    model = AcceptanceModel()
    for hit in hits:
        model.learn(0, hit)
        assert 0 <= model.probability[0] <= 1


# The window


def test_window_is_worth_something_at_first_in_every_kind_of_step() -> None:
    model = AcceptanceModel()
    assert all(model.window_value(match) > 0 for match in range(MATCHES))


@pytest.mark.parametrize("match", range(MATCHES))
def test_window_is_worth_what_it_gains_at_once_and_what_comes_back(match: int) -> None:
    model = AcceptanceModel()
    for _ in range(4000):
        # Every window has two tokens right, and every other one's n-grams bring one later.
        model.learn_window(match, 2)
        model.learn_return(1)
        model.learn_window(match, 2)
    assert model.window_value(match) == pytest.approx(2.5, abs=0.01)


def test_window_that_brings_nothing_is_worth_nothing_in_the_end() -> None:
    model = AcceptanceModel()
    for _ in range(4000):
        model.learn_window(0, 0)
    assert 0 <= model.window_value(0) < 1e-6


def test_gain_at_once_is_learned_by_kind_of_step() -> None:
    model = AcceptanceModel()
    before = [model.window_value(match) for match in range(MATCHES)]
    model.learn_window(1, 50)
    after = [model.window_value(match) for match in range(MATCHES)]
    # A hundredth of what is new; what comes back was less by a 200th for all.
    fall = before[0] - after[0]
    assert 0 < fall < before[0] / 200
    assert after[2] == pytest.approx(before[2] - fall)
    assert 0.4 < after[1] - before[1] + fall < 0.5


def test_return_counts_in_every_kind_of_step() -> None:
    model = AcceptanceModel()
    before = [model.window_value(match) for match in range(MATCHES)]
    model.learn_return(2)
    for match in range(MATCHES):
        assert model.window_value(match) == pytest.approx(before[match] + 0.01)


@given(st.lists(st.tuples(st.integers(0, MATCHES - 1), st.integers(0, 9), st.integers(0, 9))))
def test_window_is_never_worth_less_than_nothing(steps: list[tuple[int, int, int]]) -> None:
    model = AcceptanceModel()
    for match, gained, returned in steps:
        model.learn_window(match, gained)
        model.learn_return(returned)
        assert all(model.window_value(each) >= 0 for each in range(MATCHES))
