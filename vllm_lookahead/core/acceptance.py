"""How likely a candidate's tokens are right, learned from what the model said.

Tokens of candidates fall into classes: those that continue a match in a text by its length and
by how often they and others followed it, those of n-grams by source, rank and depth. A class
keeps the share of its tokens that came true where the token before them had. That can be told
without feeding them, so nothing has to be tried out to be learned. The lookahead window is
different: what it brings is only known when it is fed.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_lookahead.core.followers import NUM_EVIDENCES, NUM_TOTALS, Evidences
from vllm_lookahead.core.suffix import MATCH_LENGTHS, Followers

NUM_DEPTHS = 16
"""Depths that are told apart: classes of an n-gram's tokens follow each other up to there."""
_RANKS = 4
_COUNTS = 3
_RIVALRIES = 3
_INITIAL_WEIGHT = 6.0
"""How many observations the initial values stand for."""
_MEMORY = 400.0
"""Observations that count; older ones fade."""

Classified = list[tuple[int, int]]
"""(token, class)."""

# (match, count, rivalry, newest) of a follower.
_FOLLOWERS_OF_MATCH = _COUNTS * _RIVALRIES * 2
_FOLLOWERS = len(MATCH_LENGTHS) * _FOLLOWERS_OF_MATCH

SUFFIX = 0
MODEL = SUFFIX + 3 * _FOLLOWERS
SHARED = MODEL + 3 * len(MATCH_LENGTHS) * NUM_EVIDENCES
POOL = SHARED + 3 * _FOLLOWERS
CUSTOM = POOL + 4 * _RANKS * NUM_DEPTHS
NUM_CLASSES = CUSTOM + _RANKS * NUM_DEPTHS

LONG_MATCH = 2
"""Matches that are long, from ``MATCH_LENGTHS[LONG_MATCH]`` tokens on."""
MATCHES = 3
"""Kinds of matches in the sequence's own text: none, a short one, a long one."""


def kind_of_match(match: int) -> int:
    """Which of the `MATCHES` kinds it is, as returned by `SuffixIndex.followers`."""
    return 0 if match < 0 else 1 if match < LONG_MATCH else 2


def classify(first: int, match: int, followers: Followers) -> Classified:
    """What followed a match.

    Args:
        first: `SUFFIX` for the sequence's own text.
        match: there are ``MATCH_LENGTHS[match]`` tokens that agree.
        followers: the newest last.
    """
    first += match * _FOLLOWERS_OF_MATCH
    if len(followers) == 1:
        token, count = followers[0]
        return [(token, first + (min(count, _COUNTS) - 1) * _RIVALRIES * 2 + 1)]
    total = sum([count for _, count in followers])
    classified = []
    for token, count in followers:
        rivalry = 1 if total - count <= count else 2
        classified.append((token, first + ((min(count, _COUNTS) - 1) * _RIVALRIES + rivalry) * 2))
    token, token_class = classified[-1]
    classified[-1] = token, token_class + 1
    return classified


def classify_shared(match: int, own_match: int, followers: Followers) -> Classified:
    """What followed a match in texts of other requests.

    Args:
        match: as in `classify`, in those texts.
        own_match: and in the sequence's own, -1 without one.
        followers: as in `classify`.
    """
    return classify(SHARED + _relation(match, own_match) * _FOLLOWERS, match, followers)


def classify_model(match: int, own_match: int, followers: Evidences) -> Classified:
    """What followed a match in the model's own text.

    Args:
        match: as in `classify`, in that text.
        own_match: and in the sequence's own, -1 without one.
        followers: as from `FollowerTable.followers`.
    """
    first = _relation(match, own_match) * len(MATCH_LENGTHS) + match
    return [(token, MODEL + first * NUM_EVIDENCES + evidence) for token, evidence in followers]


def _relation(match: int, own_match: int) -> int:
    """0 for a longer match than in the own text, 1 for an equal one, 2 for a shorter one."""
    return 0 if match > own_match else 1 if match == own_match else 2


def confirm(classified: Classified, others: Sequence[tuple[int, int]]) -> Classified:
    """What followed a match in the own text, knowing what did in other texts.

    Args:
        classified: by `classify` with `SUFFIX`.
        others: the same of a match in other texts that is no shorter.
    """
    known = {token for token, _ in others}
    return [
        (token, token_class + (_FOLLOWERS if token in known else 2 * _FOLLOWERS))
        for token, token_class in classified
    ]


def pool_class(rank: int, pair: bool, guessed: bool) -> int:
    """Class of the first token of a pooled n-gram.

    Args:
        rank: n-grams of the pool before this one.
        pair: whether the token before the key agrees, too.
        guessed: whether the n-gram comes from the window.
    """
    return POOL + ((2 * guessed + pair) * _RANKS + min(rank, _RANKS - 1)) * NUM_DEPTHS


def custom_class(rank: int) -> int:
    """Class of the first token of a custom source's candidate."""
    return CUSTOM + min(rank, _RANKS - 1) * NUM_DEPTHS


def is_guessed(token_class: int) -> bool:
    """Whether the class is of n-grams from the window."""
    return POOL + 2 * _RANKS * NUM_DEPTHS <= token_class < CUSTOM


def _initial() -> list[float]:
    """First estimates, rounded from mt_bench, humaneval and gsm8k on SmolLM2-135M."""
    own = _initial_followers((0.35, 0.6, 0.7, 0.88), (1.0, 0.5, 0.3))
    # Other texts may be silent, agree or disagree.
    owns = [share * chance for share in (1.0, 1.0, 0.65) for chance in own]
    # What other texts say is worth less beside an equal or a longer match in one's own.
    relations = (1.0, 0.4, 0.2)
    model = [share * chance for share in relations for chance in _initial_evidences()]
    other = _initial_followers((0.1, 0.2, 0.4, 0.65), (1.0, 0.4, 0.15))
    shared = [share * chance for share in relations for chance in other]
    firsts = [
        *(0.28, 0.12, 0.08, 0.03),  # text after the key
        *(0.42, 0.18, 0.09, 0.05),  # text after the key and the token before it
        *(0.15, 0.08, 0.05, 0.02),  # window, likewise
        *(0.25, 0.12, 0.08, 0.04),
        *(0.5, 0.2, 0.1, 0.05),  # custom sources
    ]
    ngrams = [
        first + (0.92 - first) * (1 - 0.75**depth)
        for first in firsts
        for depth in range(NUM_DEPTHS)
    ]
    return [*owns, *model, *shared, *ngrams]


def _initial_followers(firsts: Sequence[float], shares: Sequence[float]) -> list[float]:
    """By match, for a token that followed it once, and nothing else did; less with rivals."""
    return [
        (first + (0.98 - first) * certainty) * share * (0.8 + 0.2 * newest)
        for first in firsts
        for certainty in (0.0, 0.3, 0.5)
        for share in shares
        for newest in (0, 1)
    ]


def _initial_evidences() -> list[float]:
    """By match and `followers.evidence_of`: nearly the share, for a match that is no accident."""
    certainties = (0.0, 0.4, 0.6, 0.8, 0.88)
    shares = (0.03, 0.09, 0.18, 0.35, 0.57, 0.85, 1.0)
    assert len(certainties) == NUM_TOTALS
    return [
        (once + (0.97 - once) * certainty) * share
        for once in (0.18, 0.3, 0.3, 0.45)
        for certainty in certainties
        for share in shares
    ]


class AcceptanceModel:
    """Acceptance probabilities of one engine, shared by all of its sequences.

    A pure function of the tokens seen, so that all ranks of an engine agree.
    """

    def __init__(self) -> None:
        self.probability = _initial()
        """[NUM_CLASSES] chance of a token to be right when the one before it is."""
        self._weight = [_INITIAL_WEIGHT] * NUM_CLASSES
        # Tokens gained by a fed window at once (by kind of step) and later through the pool.
        self._window_gain = [0.05, 0.03, 0.01]
        self._window_return = 0.03

    def learn(self, token_class: int, hit: bool) -> None:
        """Take note of a candidate token that the model did or did not say."""
        weight = self._weight[token_class] = min(self._weight[token_class] + 1.0, _MEMORY)
        old = self.probability[token_class]
        self.probability[token_class] = old + (hit - old) / weight

    def window_value(self, match: int) -> float:
        """Tokens that feeding a window is expected to bring, now and later.

        Args:
            match: kind of step, 0 to ``MATCHES - 1``.
        """
        return self._window_gain[match] + self._window_return

    def learn_window(self, match: int, gained: int) -> None:
        """Take note of a fed window and the draft tokens that only it had right."""
        self._window_gain[match] += (gained - self._window_gain[match]) / 100
        self._window_return -= self._window_return / 200

    def learn_return(self, gained: int) -> None:
        """Take note of accepted tokens that only earlier windows had proposed."""
        self._window_return += gained / 200
