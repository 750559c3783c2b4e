"""Seconds of a decode step: q requests of plain vLLM beside one lookahead request that feeds q.

Both feed q tokens, so their difference is what a tree costs beyond its tokens. The trees come from
a source of wrong chains; "nothing planned" is lookahead whose source has nothing to propose. The
engines take turns in blocks of steps; a cell is the median over all steps of all blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.engine_process import Reply, Request
from benchmarks.interleaved import HeldEngine, held_engines, rotated
from benchmarks.methods import PLAIN, PromptEncoder, engine_options, model_path, speed_parser
from benchmarks.prompts import load
from benchmarks.report import Table, add_output_argument, machine, present, wide_console
from vllm_lookahead.cli.demo import positive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKAHEAD = "lookahead"
NOTHING = "nothing planned"
LENGTH = 4
"""Tokens of a chain; of the last one, a token less."""
SKIPPED_STEPS = 4
"""At the start of a block, while caches get warm."""
PROMPT_SET = "gsm8k"
PROMPT_TOKENS = 64


@dataclass
class Steps:
    """Steps of one engine that all feed the same number of tokens."""

    seconds: list[list[float]] = field(default_factory=list)
    """Of each block."""
    fed: float = 0
    """Tokens per step that lookahead counted; 0 for plain vLLM."""

    def add(self, reply: Reply) -> None:
        """Take a block of decode steps."""
        self.seconds.append(reply.step_seconds[reply.first_decode_step + SKIPPED_STEPS :])
        if reply.counters.get("steps"):
            self.fed = reply.counters["fed"] / reply.counters["steps"]

    @property
    def median(self) -> float:
        """Seconds."""
        return median(second for block in self.seconds for second in block)

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest median of a block, in seconds."""
        medians = [median(block) for block in self.seconds]
        return min(medians), max(medians)


def main() -> None:
    parser = speed_parser(__doc__)
    parser.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=[4, 8, 16, 32],
        metavar="Q",
        help=f"fed tokens, multiples of {LENGTH} (default: 4 8 16 32); 1 is always measured",
    )
    parser.add_argument("--steps", type=positive, default=40, help="of a block (default: 40)")
    parser.add_argument("--blocks", type=positive, default=5, help="of each size (default: 5)")
    add_output_argument(parser)
    args = parser.parse_args()
    if any(tokens % LENGTH for tokens in args.tokens):
        parser.error(f"--tokens must be multiples of {LENGTH}")
    console = wide_console()
    encoder = PromptEncoder(model_path(args))
    most = max(args.tokens)
    options = {
        PLAIN: engine_options(args, None, max_num_seqs=most),
        LOOKAHEAD: engine_options(args, forced(most), max_num_seqs=most),
    }
    before = machine()
    with held_engines(options, encoder.warm_up(), console) as engines:
        results = measure(engines, equal_prompts(args, encoder, most), args, console)
    table = make_table(args, results)
    data = {
        "machine": before,
        "engines": options,
        "steps": [
            {"engine": name, "tokens": tokens, "fed": one.fed, "seconds": one.seconds}
            for (name, tokens), one in results.items()
        ],
    }
    present(args, console, "step_cost", data, table, lambda axes: draw(axes, results))


def forced(most: int) -> dict[str, Any]:
    """``speculative_config`` whose trees have as many tokens as the request's sizes say."""
    return {
        "method": "lookahead",
        "window_size": 0,
        "ngram_size": LENGTH + 1,
        "verification_set_size": most // LENGTH,
        "sources": ["benchmarks.forced_source:WrongChains"],
        "controller": False,
    }


def sizes(tokens: int) -> dict[str, int]:
    """A request's parameters with which ``tokens`` are fed per step: 1, or a multiple of LENGTH."""
    length = LENGTH if tokens > 1 else 1
    return {"ngram_size": length + 1, "verification_set_size": tokens // length}


def equal_prompts(args: argparse.Namespace, encoder: PromptEncoder, count: int) -> list[list[int]]:
    """Prompts of equal length, so that all requests of a batch are prefilled together."""
    texts = [one["content"] for [one] in load(args.data, PROMPT_SET)]
    ids = encoder.text("\n".join(texts))
    return [ids[i * PROMPT_TOKENS : (i + 1) * PROMPT_TOKENS] for i in range(count)]


def measure(
    engines: Mapping[str, HeldEngine],
    batch: Sequence[list[int]],
    args: argparse.Namespace,
    console: Console,
) -> dict[tuple[str, int], Steps]:
    """Steps by (engine, tokens per step); `NOTHING` for lookahead without a tree."""
    results: dict[tuple[str, int], Steps] = {}
    for block in range(args.blocks):
        for tokens in [1, *args.tokens]:
            jobs = [
                (PLAIN, PLAIN, list(batch[:tokens]), None),
                (LOOKAHEAD if tokens > 1 else NOTHING, LOOKAHEAD, [batch[0]], sizes(tokens)),
            ]
            for name, engine, prompts, lookahead in rotated(jobs, block):
                # Prefill yields the first token, and every step of wrong chains another one.
                max_tokens = 1 + SKIPPED_STEPS + args.steps
                request = Request(prompts, max_tokens, ignore_eos=True, lookahead=lookahead)
                results.setdefault((name, tokens), Steps()).add(engines[engine].ask(request))
        console.print(f"block {block + 1} of {args.blocks} is done")
    return results


def make_table(args: argparse.Namespace, results: Mapping[tuple[str, int], Steps]) -> Table:
    table = Table(
        f"Milliseconds per decode step, {args.dtype} (lowest to highest median of a block)",
        ["tokens q", "plain, q requests", "lookahead, q fed", "ratio", "over a plain step of 1"],
    )
    single = results[PLAIN, 1].median
    for (name, tokens), steps in results.items():
        if name == PLAIN:
            continue
        plain = results[PLAIN, tokens]
        table.rows.append([
            f"{tokens} ({NOTHING})" if name == NOTHING else str(tokens),
            milliseconds(plain),
            milliseconds(steps),
            f"{steps.median / plain.median:.2f}",
            f"{steps.median / single:.2f}",
        ])  # fmt: skip
        if steps.fed and abs(steps.fed / tokens - 1) > 0.02:
            table.notes.append(f"q = {tokens}: lookahead fed {steps.fed:.1f} tokens per step.")
    return table


def milliseconds(steps: Steps) -> str:
    low, high = (1000 * value for value in steps.spread)
    return f"{1000 * steps.median:.2f} ({low:.2f} to {high:.2f})"


def draw(axes: Axes, results: Mapping[tuple[str, int], Steps]) -> None:
    """Lines of the medians over the tokens of a step."""
    for title, names in {"plain, q requests": (PLAIN,), "lookahead": (LOOKAHEAD, NOTHING)}.items():
        points = sorted(
            (tokens, 1000 * steps.median)
            for (name, tokens), steps in results.items()
            if name in names
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=title)
    axes.set_xlabel("tokens fed per step, q")
    axes.set_ylabel("milliseconds per decode step")
    axes.set_ylim(bottom=0)
    axes.legend()


if __name__ == "__main__":
    main()
