"""A candidate source that injects chosen candidates, so that hits aren't left to luck."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from vllm_lookahead.config import LookaheadConfig

NAME = f"{__name__}:ScriptedSource"

Chains = list[list[int]]
Shape = Callable[[list[int], int], Chains]
"""From the right continuation and the step's number to the candidates to inject."""


def wrong(token: int) -> int:
    """A token that isn't ``token``."""
    return (token + 1) % 256


def right_first(right: list[int], step: int) -> Chains:
    """One candidate, fully right."""
    return [right]


def right_third(right: list[int], step: int) -> Chains:
    """First candidate wrong at its first token, second at its last, third right."""
    first = [wrong(right[0]), *right[1:]]
    second = [*right[:-1], wrong(right[-1])]
    return [first, second, right]


def partial_last(right: list[int], step: int) -> Chains:
    """Two candidates wrong at once; the last one is right but for its last token."""
    chains = [[(right[0] + offset) % 256, *right[1:]] for offset in (1, 2)]
    return [*chains, [*right[:-1], wrong(right[-1])]]


def all_wrong(right: list[int], step: int) -> Chains:
    """Nothing to accept."""
    return [[wrong(right[0]), *right[1:]], [(right[0] + 2) % 256, *right[1:]]]


def nothing(right: list[int], step: int) -> Chains:
    """No candidate at all."""
    return []


def changing(right: list[int], step: int) -> Chains:
    """Another shape every step, none of them included."""
    shapes: tuple[Shape, ...] = (right_third, all_wrong, partial_last, nothing, right_first)
    return shapes[step % len(shapes)](right, step)


def duplicated(right: list[int], step: int) -> Chains:
    """Shared prefixes and repeated candidates."""
    return [right[:2], right, right, [*right[:1], wrong(right[-1])], right[:1]]


class ScriptedSource:
    """Knows the texts that plain decoding gave and proposes them in the chosen shape."""

    texts: ClassVar[list[list[int]]] = []
    shape: ClassVar[Shape] = staticmethod(right_first)

    def __init__(self, config: LookaheadConfig) -> None:
        self._step = -1

    @classmethod
    def script(cls, texts: Sequence[Sequence[int]], shape: Shape) -> None:
        """Set the texts (prompt and output) and the shape for all sequences from now on."""
        cls.texts = [list(text) for text in texts]
        cls.shape = staticmethod(shape)

    def propose(self, context: Sequence[int], length: int, limit: int) -> Chains:
        self._step += 1
        size = len(context)
        for text in self.texts:
            if len(text) > size and text[:size] == list(context):
                right = text[size : size + length]
                # A text's end is no reason to propose less: pad with anything.
                right += [0] * (length - len(right))
                return type(self).shape(right, self._step)
        return []
