"""Decode throughput over plain vLLM's as the number of concurrent requests grows.

So many unseen prompts are answered at once, and when one is, the next is sent. What counts are the
decode steps with so many requests: no engine is charged for a batch that runs empty, nor for
prompts that don't come all at once, as those of equally fast requests do. Every engine answers the
same prompts once, greedily, and plain vLLM twice: the second pass over the first is the noise of
a ratio. A ratio is the tokens per second of a method over plain vLLM's first pass, from sums over
the repeats; behind it stand the lowest and the highest ratio of a single repeat.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.engine_process import Reply, Request
from benchmarks.interleaved import HeldEngine, held_engines, rotated
from benchmarks.methods import (
    PLAIN,
    PromptEncoder,
    add_method_arguments,
    engine_options,
    model_path,
    speculative_configs,
    speed_parser,
)
from benchmarks.prompts import load
from benchmarks.ratios import Timing, rate
from benchmarks.report import Table, add_output_argument, machine, present, wide_console
from vllm_lookahead.cli.demo import positive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AGAIN = "plain again"
"""Plain vLLM's second pass."""
SETS = (("mt_bench", 0), ("spec_bench", 0), ("gsm8k", 0), ("humaneval", 0), ("mt_bench", 1))
"""(prompt set, turn)"""
SEED = 0
ROUNDS = 2
"""Prompts per concurrent request ..."""
FEWEST = 8
"""... and at least so many."""


@dataclass(frozen=True, slots=True)
class Batch:
    """How one engine answered the prompts of a concurrency."""

    engine: str
    concurrency: int
    repeat: int
    reply: Reply


def main() -> None:
    parser = speed_parser(__doc__)
    add_method_arguments(parser)
    parser.add_argument(
        "--concurrency", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="C"
    )
    parser.add_argument(
        "--repeats", type=positive, default=1, help="of each concurrency (default: %(default)s)"
    )
    add_output_argument(parser)
    args = parser.parse_args()
    console = wide_console()
    encoder = PromptEncoder(model_path(args))
    prompts = shuffled_prompts(args.data, encoder)
    needed = args.repeats * sum(map(num_prompts, args.concurrency))
    if needed > len(prompts):
        parser.error(
            f"{needed} prompts are needed and the sets have {len(prompts)}: "
            "lower --repeats or --concurrency"
        )
    configs = speculative_configs(args, console)
    most = max(args.concurrency)
    options = {
        name: engine_options(args, config, max_num_seqs=most) for name, config in configs.items()
    }
    before = machine()
    with held_engines(options, encoder.warm_up(most), console) as engines:
        batches = measure(engines, prompts, args, console)
    table = make_table(args, batches)
    data = {
        "machine": before,
        "max_tokens": args.max_tokens,
        "engines": options,
        "batches": [asdict(one) for one in batches],
    }
    present(args, console, "load", data, table, lambda axes: draw(axes, batches))


def num_prompts(concurrency: int) -> int:
    return max(ROUNDS * concurrency, FEWEST)


def shuffled_prompts(data: Path, encoder: PromptEncoder) -> list[list[int]]:
    """All prompts as token ids, the sets mixed alike in small and large batches."""
    conversations = [one for name, turn in SETS for one in load(data, name, turn=turn)]
    random.Random(SEED).shuffle(conversations)
    return [encoder.chat(one) for one in conversations]


def measure(
    engines: Mapping[str, HeldEngine],
    prompts: Sequence[list[int]],
    args: argparse.Namespace,
    console: Console,
) -> list[Batch]:
    unseen = iter(prompts)
    batches: list[Batch] = []
    passes = [*engines, AGAIN]
    for repeat in range(args.repeats):
        for turn, concurrency in enumerate(args.concurrency):
            chosen = [next(unseen) for _ in range(num_prompts(concurrency))]
            request = Request(chosen, args.max_tokens, at_once=concurrency)
            for name in rotated(passes, repeat * len(args.concurrency) + turn):
                reply = engines[PLAIN if name == AGAIN else name].ask(request)
                batches.append(Batch(name, concurrency, repeat, reply))
            parts = batches[-len(passes) :]
            rates = ", ".join(
                f"{one.engine} {rate([one.reply.full_decode_timing]):.1f}" for one in parts
            )
            console.print(
                f"repeat {repeat + 1}, {concurrency} at once, tokens/s: {rates}",
                markup=False,
                highlight=False,
            )
    return batches


def timings(batches: Sequence[Batch], engine: str, concurrency: int) -> list[Timing]:
    return [
        one.reply.full_decode_timing
        for one in batches
        if (one.engine, one.concurrency) == (engine, concurrency)
    ]


def ratios(batches: Sequence[Batch], engine: str, concurrency: int) -> list[float]:
    """The engine's rate over plain vLLM's: from sums over the repeats, lowest and highest."""
    own, plain = (timings(batches, name, concurrency) for name in (engine, PLAIN))
    # Engines take the batches of a size in the same order.
    single = [rate([a]) / rate([b]) for a, b in zip(own, plain, strict=True)]
    return [rate(own) / rate(plain), min(single), max(single)]


def make_table(args: argparse.Namespace, batches: Sequence[Batch]) -> Table:
    names = list(dict.fromkeys(one.engine for one in batches if one.engine != PLAIN))
    names.sort(key=lambda name: name == AGAIN)
    table = Table(
        f"Decode throughput over plain vLLM's, {args.dtype}, at most {args.max_tokens} tokens",
        ["concurrent", "plain tokens/s", *names],
    )
    for concurrency in args.concurrency:
        plain = timings(batches, PLAIN, concurrency)
        cells = [
            "{:.2f} ({:.2f} to {:.2f})".format(*ratios(batches, name, concurrency))
            for name in names
        ]
        table.rows.append([str(concurrency), f"{rate(plain):.1f}", *cells])
    table.notes.append(
        f"Ratio from sums over {args.repeats} repeats (lowest to highest of a repeat); "
        f"{AGAIN!r} is the noise: plain vLLM's second pass over its first."
    )
    return table


def draw(axes: Axes, batches: Sequence[Batch]) -> None:
    """Lines of the ratios over the concurrency, with the range of single batches."""
    sizes = sorted({one.concurrency for one in batches})
    for name in dict.fromkeys(one.engine for one in batches if one.engine != PLAIN):
        middle, low, high = zip(*(ratios(batches, name, size) for size in sizes), strict=True)
        style = "--" if name == AGAIN else "-"
        [line] = axes.plot(sizes, middle, style, marker="o", markersize=4, label=name)
        axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.12)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("tokens per second over plain vLLM's")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
