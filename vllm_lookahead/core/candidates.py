"""The candidates of one step as a tree, each token with its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from vllm_lookahead.core.acceptance import NUM_DEPTHS, AcceptanceModel, Classified, is_guessed
from vllm_lookahead.core.controller import EVERYTHING
from vllm_lookahead.core.suffix import LONGEST_MATCH

Chain = tuple[int, ...]
Predict = Callable[[Chain], Classified]
"""What may follow the end of a text; a token's likeliest class counts."""


class CandidateTree:
    """Candidates whose common prefixes are shared, each token with its value.

    The lists have one entry per node, parents first, the root is 0. A token's value is the number
    of output tokens that feeding it is expected to add: the chance that it is accepted, less the
    price of a branch where it starts one. It is never more than its parent's.
    """

    def __init__(
        self, model: AcceptanceModel, branch_price: float = 0.0, floor: float = 0.0
    ) -> None:
        """
        Args:
            model: what the engine has learned.
            branch_price: tokens that a branch must add to be worth its overhead.
            floor: candidates end before tokens that are less likely than this, but for first
                ones, so that the model goes on learning about their sources.
        """
        self._model = model
        self._branch_price = branch_price
        self._floor = floor
        self.tokens = [-1]
        self.classes = [-1]
        self.values = [1.0]
        self.parents = [-1]
        self.children: list[list[int]] = [[]]
        self._chances = [1.0]
        self._fed: set[int] = set()
        self.accepted: list[int] = []
        """Filled by `learn`: nodes that came true, in order."""

    def grow(self, predict: Predict, text: Sequence[int], max_depth: int, max_nodes: int) -> None:
        """Add what may follow the text, and what may follow that, the likeliest first.

        Args:
            predict: what may follow.
            text: prompt and output, the root last.
            max_depth: most tokens of a candidate.
            max_nodes: no node is expanded when so many have been added.
        """
        probability, floor, chances = self._model.probability, self._floor, self._chances
        limit = len(self.tokens) + max_nodes
        # (-chance, node, depth, end of the text there), the likeliest first.
        open_nodes = [(-1.0, 0, 0, tuple(text[-LONGEST_MATCH:]))]
        while open_nodes and len(self.tokens) < limit:
            _, node, depth, tail = heappop(open_nodes)
            found = predict(tail)
            if len(found) > 1:
                found = self._likeliest_first(found)
            parent_chance = chances[node]
            add = self._find_or_add if self.children[node] else self._add
            for token, token_class in found:
                chance = parent_chance * probability[token_class]
                if chance < floor and node:
                    break
                child = add(node, token, token_class, chance)
                chance = chances[child]
                if chance >= floor and depth + 1 < max_depth:
                    end = (*tail, token)[-LONGEST_MATCH:]
                    heappush(open_nodes, (-chance, child, depth + 1, end))

    def _likeliest_first(self, found: Classified) -> Classified:
        probability = self._model.probability
        found.sort(key=lambda item: -probability[item[1]])
        # The first class of each token; dictionaries keep their order.
        likeliest: dict[int, int] = {}
        for token, token_class in found:
            likeliest.setdefault(token, token_class)
        return list(likeliest.items())

    def add(self, tokens: Sequence[int], first_class: int, keep_first: bool = True) -> None:
        """Add a chain of tokens from the root.

        Args:
            tokens: the chain.
            first_class: of its first token; those of the others follow, up to `NUM_DEPTHS`.
            keep_first: whether its first token is added however unlikely it is.
        """
        probability, node, chance = self._model.probability, 0, 1.0
        token_class = first_class
        for depth, token in enumerate(tokens):
            if 0 < depth < NUM_DEPTHS:
                token_class += 1
            chance *= probability[token_class]
            if chance < self._floor and (depth or not keep_first):
                return
            node = self._find_or_add(node, token, token_class, chance)
            chance = self._chances[node]

    def _find_or_add(self, parent: int, token: int, token_class: int, chance: float) -> int:
        for child in self.children[parent]:
            if self.tokens[child] != token:
                continue
            gain = chance - self._chances[child]
            if gain > 0:
                # Found by a better source, too.
                value = self.values[child] + gain
                self.values[child] = min(self.values[parent], value)
                self._chances[child] = chance
                self.classes[child] = token_class
            return child
        return self._add(parent, token, token_class, chance)

    def _add(self, parent: int, token: int, token_class: int, chance: float) -> int:
        child = len(self.tokens)
        siblings = self.children[parent]
        value = chance - self._branch_price if siblings else chance
        siblings.append(child)
        self.tokens.append(token)
        self.classes.append(token_class)
        self.values.append(min(self.values[parent], value))
        self.parents.append(parent)
        self.children.append([])
        self._chances.append(chance)
        return child

    def select(self, cutoff: float, limit: int) -> list[Chain]:
        """The candidates to feed, those that are expected to add most tokens first.

        Args:
            cutoff: least value of a token to be fed. With `EVERYTHING` candidates come in the
                order in which they were added.
            limit: most candidates; of more, the most valuable tokens are kept.
        """
        values, parents = self.values, self.parents
        fed = self._fed = {0}
        worth = [node for node in range(1, len(values)) if values[node] >= cutoff]
        if not worth:
            return []
        # Stable, so parents stay before their children.
        worth.sort(key=lambda node: -values[node])
        leaves: set[int] = set()
        for node in worth:
            parent = parents[node]
            if parent not in fed:
                continue
            if parent in leaves:
                leaves.remove(parent)
            elif len(leaves) == limit:
                continue
            fed.add(node)
            leaves.add(node)
        paths = [self._path(leaf) for leaf in sorted(leaves)]
        if len(paths) > 1 and cutoff > EVERYTHING:
            paths.sort(key=lambda path: -sum([values[node] for node in path]))
        return [tuple([self.tokens[node] for node in path]) for path in paths]

    def _path(self, node: int) -> list[int]:
        path = []
        while node:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def learn(self, emitted: Sequence[int]) -> None:
        """Tell the model which tokens came true, fed or not, by the tokens that were emitted."""
        node, model = 0, self._model
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

    @property
    def num_accepted(self) -> int:
        """Accepted tokens that were fed as candidates."""
        return len(self._fed.intersection(self.accepted))

    @property
    def num_guessed(self) -> int:
        """Those of them that only the window's n-grams had proposed."""
        fed = self._fed.intersection(self.accepted)
        return sum([is_guessed(self.classes[node]) for node in fed])
