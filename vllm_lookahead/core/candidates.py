"""The candidates of one step, merged and valued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_lookahead.core.acceptance import NUM_DEPTHS, AcceptanceModel, is_guessed

Chain = tuple[int, ...]


class Candidate(NamedTuple):
    """A chain of tokens from the root, with the class of its first token."""

    tokens: Chain
    first_class: int


@dataclass(slots=True)
class ValuedCandidates:
    """Candidates whose common prefixes are shared, each token with its value.

    The arrays have one entry per distinct token of the tree, parents first, the root is 0. A
    token's value is the number of output tokens that feeding it is expected to add: the chance
    that it is accepted, less the price of a branch where it starts one.
    """

    tokens: list[int]
    classes: list[int]
    values: list[float]
    children: list[list[int]]
    paths: list[list[int]]
    """Nodes of each candidate."""
    accepted: list[int] = field(default_factory=list)
    """Filled by `learn`: nodes that came true, in order."""

    @classmethod
    def of(
        cls,
        candidates: Sequence[Candidate],
        model: AcceptanceModel,
        branch_price: float = 0.0,
        floor: float = 0.0,
    ) -> ValuedCandidates:
        """Value ``candidates`` by what ``model`` has learned.

        Args:
            candidates: best first.
            model: the engine's.
            branch_price: tokens that a branch must add to be worth its overhead.
            floor: a candidate ends before the first token that is less likely than this, but
                for its first one, so that the model goes on learning about its source.
        """
        probability = model.probability
        tokens, classes, values, chances = [-1], [-1], [1.0], [1.0]
        children: list[list[int]] = [[]]
        known: dict[int, int] = {}
        paths = []
        for candidate in candidates:
            node, chance = 0, 1.0
            path = []
            token_class = candidate.first_class
            for depth, token in enumerate(candidate.tokens):
                if 0 < depth < NUM_DEPTHS:
                    token_class += 1
                chance *= probability[token_class]
                if chance < floor and depth:
                    break
                key = node << 32 | token
                child = known.get(key)
                if child is None:
                    child = known[key] = len(tokens)
                    value = chance - branch_price if children[node] else chance
                    children[node].append(child)
                    children.append([])
                    tokens.append(token)
                    classes.append(token_class)
                    chances.append(chance)
                    values.append(min(values[node], value))
                elif chance > chances[child]:
                    # Found by a better source, too.
                    values[child] = min(values[node], values[child] + chance - chances[child])
                    chances[child] = chance
                    classes[child] = token_class
                else:
                    chance = chances[child]
                node = child
                path.append(node)
            paths.append(path)
        return cls(tokens, classes, values, children, paths)

    def chosen(self, index: int, cutoff: float) -> int:
        """How many leading tokens of candidate ``index`` are worth ``cutoff``."""
        values = self.values
        for count, node in enumerate(self.paths[index]):
            if values[node] < cutoff:
                return count
        return len(self.paths[index])

    def learn(self, emitted: Sequence[int], model: AcceptanceModel) -> None:
        """Tell ``model`` which tokens came true, fed or not, by the tokens that were emitted."""
        node = 0
        for token in emitted:
            following = -1
            for child in self.children[node]:
                hit = self.tokens[child] == token
                model.learn(self.classes[child], hit)
                if hit:
                    following = child
            if following < 0:
                return
            self.accepted.append(following)
            node = following

    def num_guessed(self, cutoff: float) -> int:
        """Accepted tokens worth ``cutoff`` that only the window's n-grams had proposed."""
        return sum(
            self.values[node] >= cutoff and is_guessed(self.classes[node]) for node in self.accepted
        )
