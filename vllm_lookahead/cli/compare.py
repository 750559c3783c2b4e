"""What a run of plain decoding and one of lookahead say about each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

END = "<end of answer>"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of one engine.

    ``pieces`` is the text of each token; ``seconds`` runs from the request to the last token,
    prefill included. ``steps`` counts decode steps and ``step_tokens`` what they emitted, which
    leaves out the token that prefill yields; both are 0 when the engine does not count them.
    """

    token_ids: Sequence[int]
    pieces: Sequence[str]
    seconds: float
    steps: int = 0
    step_tokens: int = 0

    def piece(self, position: int) -> str:
        return self.pieces[position] if position < len(self.pieces) else END


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers to the same prompts, in the same order: to one prompt, or to all for a total."""

    name: str
    plain: Sequence[Answer]
    lookahead: Sequence[Answer]

    @property
    def plain_rate(self) -> float:
        """Tokens per second."""
        return _rate(self.plain)

    @property
    def lookahead_rate(self) -> float:
        """Tokens per second."""
        return _rate(self.lookahead)

    @property
    def speedup(self) -> float:
        return self.lookahead_rate / self.plain_rate

    @property
    def tokens_per_step(self) -> float | None:
        """The paper's step compression ratio; None when no decode step was needed."""
        steps = sum(answer.steps for answer in self.lookahead)
        return sum(answer.step_tokens for answer in self.lookahead) / steps if steps else None

    @property
    def identical(self) -> bool:
        pairs = zip(self.plain, self.lookahead, strict=True)
        return all(first_difference(a.token_ids, b.token_ids) is None for a, b in pairs)

    def differences(self) -> list[str]:
        """For each pair of answers that differ: where they part, and with which tokens."""
        reports = []
        for plain, lookahead in zip(self.plain, self.lookahead, strict=True):
            position = first_difference(plain.token_ids, lookahead.token_ids)
            if position is not None:
                reports.append(
                    f"{self.name}: first difference at token {position}: "
                    f"plain {plain.piece(position)!r}, lookahead {lookahead.piece(position)!r}"
                )
        return reports


def total(comparisons: Sequence[Comparison]) -> Comparison:
    return Comparison(
        "total",
        [answer for each in comparisons for answer in each.plain],
        [answer for each in comparisons for answer in each.lookahead],
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """First index at which the sequences part, also by ending; None when they are equal."""
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def _rate(answers: Sequence[Answer]) -> float:
    tokens = sum(len(answer.token_ids) for answer in answers)
    return tokens / sum(answer.seconds for answer in answers)
