"""How likely a candidate's tokens are right, learned from what the model said.

Tokens of candidates fall into classes by source, quality of the match and depth. A class keeps
the share of its tokens that came true where the token before them had. That can be told without
feeding them, so nothing has to be tried out to be learned. The lookahead window is different:
what it brings is only known when it is fed.
"""

from __future__ import annotations

from vllm_lookahead.core.suffix import MATCH_LENGTHS

NUM_DEPTHS = 16
"""Depths that are told apart: classes of a candidate's tokens follow each other up to there."""
_RANKS = 4
_INITIAL_WEIGHT = 6.0
"""How many observations the initial values stand for."""
_MEMORY = 400.0
"""Observations that count; older ones fade."""

SUFFIX = 0
POOL = SUFFIX + len(MATCH_LENGTHS) * NUM_DEPTHS
CUSTOM = POOL + 4 * _RANKS * NUM_DEPTHS
SHARED = CUSTOM + _RANKS * NUM_DEPTHS
NUM_CLASSES = SHARED + len(MATCH_LENGTHS) * NUM_DEPTHS

MATCHES = 3
"""Kinds of steps by what else is proposed: nothing, a short match, a long one."""


def suffix_class(match: int) -> int:
    """Class of the first token of a suffix match of ``MATCH_LENGTHS[match]`` tokens."""
    return SUFFIX + match * NUM_DEPTHS


def shared_class(match: int) -> int:
    """Class of the first token of a match in other requests' texts."""
    return SHARED + match * NUM_DEPTHS


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
    firsts = [
        *(0.25, 0.42, 0.57, 0.7, 0.85),  # suffix matches by length
        *(0.28, 0.12, 0.08, 0.03),  # text after the key
        *(0.42, 0.18, 0.09, 0.05),  # text after the key and the token before it
        *(0.15, 0.08, 0.05, 0.02),  # window, likewise
        *(0.25, 0.12, 0.08, 0.04),
        *(0.5, 0.2, 0.1, 0.05),  # custom sources
        *(0.1, 0.25, 0.4, 0.5, 0.7),  # other requests' texts
    ]
    return [
        first + (0.92 - first) * (1 - 0.75**depth)
        for first in firsts
        for depth in range(NUM_DEPTHS)
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
        self._window_gain = [0.1, 0.05, 0.01]
        self._window_return = 0.06

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
