"""Host time of lookahead per step: propose, plan, verify, without any model.

The "model" says what a real text (the prompt sets, joined) says next, so hits and misses are those
of text. Milliseconds, median over steps, per batch size and length of context.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.engines import base_parser
from benchmarks.methods import PromptEncoder, model_path
from benchmarks.prompts import load
from vllm_lookahead.config import LookaheadConfig
from vllm_lookahead.core.acceptance import AcceptanceModel
from vllm_lookahead.core.controller import Controller
from vllm_lookahead.core.cost import StepCost
from vllm_lookahead.core.followers import FollowerTable
from vllm_lookahead.core.sequence import SequenceState
from vllm_lookahead.core.tree import TokenTree, linear_tree
from vllm_lookahead.core.verify import Walk, walk_tree

CURVE = ((1, 1.0), (4, 1.0), (8, 1.1), (16, 1.5), (24, 1.9), (32, 2.2), (64, 3.6))
"""Step cost measured on two AVX-512 cores with SmolLM2-135M in bfloat16."""
STEPS = 60
WARM_UP = 10
LEAST_PLACES = 16
LIMITS = {"max_nodes": 1024, "max_depth": 1024, "max_branches": 64}

CORPUS = (("spec_bench", range(80), 0), ("gsm8k", range(80), 0))
"""(set, rows, turn) of the prompts that the sequences are made of."""
OTHERS = (
    ("mt_bench", range(80), 0),
    ("mt_bench", range(80), 1),
    ("humaneval", range(80), 0),
    ("gsm8k", range(80, 100), 0),
)
"""All other prompts: about 19000 tokens."""

Prompts = Sequence[tuple[str, range, int]]


def contents(args: argparse.Namespace, prompts: Prompts) -> list[str]:
    return [
        message["content"]
        for name, rows, turn in prompts
        for [message] in load(args.data, name, rows, turn)
    ]


def corpus(args: argparse.Namespace, encoder: PromptEncoder) -> list[int]:
    """The sequences' prompts as one text, in tokens."""
    return encoder.text("\n".join(contents(args, CORPUS)))


def other_texts(args: argparse.Namespace, encoder: PromptEncoder) -> FollowerTable:
    """Texts of other prompts, where an engine has those that its model wrote."""
    return FollowerTable([encoder.text(content) for content in contents(args, OTHERS)])


class Batch:
    """Sequences that go on as their texts do."""

    def __init__(
        self, texts: Sequence[Sequence[int]], context: int, model_text: FollowerTable
    ) -> None:
        acceptance = AcceptanceModel()
        config = LookaheadConfig().sized(1)
        self.controller = Controller(StepCost(CURVE, 4096))
        self.texts = texts
        self.states = [
            SequenceState(
                config, text[:context], context, acceptance=acceptance, model_text=model_text
            )
            for text in texts
        ]

    def propose(self) -> list[list[int]]:
        price, floor = self.controller.branch_price, self.controller.floor
        values = [value for state in self.states for value in state.gather(price, floor)]
        cutoff = self.controller.cutoff(np.array(values), len(self.states))
        return [state.select(cutoff) for state in self.states]

    def plan(self, drafts: Sequence[Sequence[int]]) -> list[TokenTree]:
        return [
            linear_tree(draft, state.root) if state.is_linear else state.plan(draft, **LIMITS)
            for state, draft in zip(self.states, drafts, strict=True)
        ]

    def verify(self, trees: Sequence[TokenTree]) -> list[Walk]:
        walks = []
        for state, text, tree in zip(self.states, self.texts, trees, strict=True):
            following = text[state.num_tokens : state.num_tokens + tree.size]
            walk = walk_tree(tree, lambda node, t=tree, f=following: f[int(t.depths[node])])  # type: ignore[misc]
            state.commit(walk, np.zeros(len(tree.window_leaves), dtype=np.int32))
            walks.append(walk)
        return walks


def places(num_tokens: int, longest: int, batch_size: int) -> list[list[int]]:
    """Where the sequences of each batch stand in the corpus.

    The same for every length of context, so that all have the same text before them. Small
    batches are several, for one place is no mean.
    """
    num_batches = max(1, LEAST_PLACES // batch_size)
    last = num_tokens - (STEPS + WARM_UP + 1) * 16
    spread = np.linspace(longest, last, num_batches * batch_size).astype(int).tolist()
    return [spread[i::num_batches] for i in range(num_batches)]


def measure(
    tokens: Sequence[int], model_text: FollowerTable, batches: Sequence[Sequence[int]], context: int
) -> tuple[float, float, float]:
    """Milliseconds of propose, plan and verify."""
    samples: list[tuple[float, float, float]] = []
    for batch_places in batches:
        batch = Batch([tokens[place - context :] for place in batch_places], context, model_text)
        for step in range(STEPS + WARM_UP):
            begin = time.perf_counter()
            drafts = batch.propose()
            proposed = time.perf_counter()
            trees = batch.plan(drafts)
            planned = time.perf_counter()
            batch.verify(trees)
            end = time.perf_counter()
            if step >= WARM_UP:
                samples.append((proposed - begin, planned - proposed, end - planned))
    propose, plan, verify = (1e3 * median(part) for part in zip(*samples, strict=True))
    return propose, plan, verify


def main() -> None:
    parser = base_parser(__doc__)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--repeats", type=int, default=5, help="the least of so many counts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    encoder = PromptEncoder(model_path(args))
    tokens = corpus(args, encoder)
    model_text = other_texts(args, encoder)
    rows = []
    for context in args.context:
        for size in args.batch_size:
            batches = places(len(tokens), max(args.context), size)
            best = min(
                (measure(tokens, model_text, batches, context) for _ in range(args.repeats)),
                key=sum,
            )
            rows.append((context, size, *best, sum(best)))
    if args.json:
        keys = ("context", "batch_size", "propose_ms", "plan_ms", "verify_ms", "total_ms")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=1))
        return
    table = Table(title="Host milliseconds per step")
    for column in ("context", "batch size", "propose", "plan", "verify", "total"):
        table.add_column(column, justify="right")
    for context, size, *parts in rows:
        table.add_row(str(context), str(size), *(f"{part:.3f}" for part in parts))
    Console().print(table)


if __name__ == "__main__":
    main()
