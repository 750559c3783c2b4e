"""Speed of plain vLLM, lookahead and vLLM's own methods without a draft model, end to end.

Every engine answers every prompt once, greedily, one request at a time; the order of the engines
rotates from prompt to prompt. A ratio is the tokens per second of a method, from adding a request
to its last token, over those of plain vLLM, from sums over a prompt set. In bfloat16 answers may
part at near-ties, because rounding depends on how many tokens a step feeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.engine_process import Reply, Request
from benchmarks.interleaved import HeldEngine, held_engines, rotated
from benchmarks.methods import (
    PLAIN,
    SUFFIX,
    PromptEncoder,
    add_method_arguments,
    engine_options,
    model_path,
    speculative_configs,
    speed_parser,
)
from benchmarks.prompts import SPEED_ROWS, load
from benchmarks.ratios import LEVEL, Sets, Timing, bootstrap_interval, rate, speedup
from benchmarks.report import Table, add_output_argument, machine, present, wide_console

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt set, as token ids."""

    set_name: str
    row: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Measurement:
    """How one engine, the ``place``-th to be asked, answered one prompt."""

    engine: str
    set_name: str
    row: int
    place: int
    reply: Reply


def main() -> None:
    parser = speed_parser(__doc__)
    parser.set_defaults(max_tokens=200)
    add_method_arguments(parser)
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        help="rows of each prompt set (default: SPEED_ROWS of prompts.py)",
    )
    add_output_argument(parser)
    args = parser.parse_args()
    console = wide_console()
    prompts = interleave(args, PromptEncoder(model_path(args)))
    configs = speculative_configs(args, console)
    options = {
        name: engine_options(args, config, max_num_seqs=64) for name, config in configs.items()
    }
    before = machine()
    warm_up = PromptEncoder(model_path(args)).warm_up()
    with held_engines(options, warm_up, console) as engines:
        measurements = measure(engines, prompts, args.max_tokens, console)
    timings = by_engine(measurements)
    table = make_table(args, timings, measurements)
    data = {
        "machine": before,
        "max_tokens": args.max_tokens,
        "engines": options,
        "speedups": {name: speedup(sets, timings[PLAIN]) for name, sets in timings.items()},
        "measurements": [asdict(one) for one in measurements],
    }
    present(args, console, "speed", data, table, lambda axes: draw(axes, timings))


def interleave(args: argparse.Namespace, encoder: PromptEncoder) -> list[Prompt]:
    """The prompts, one of each set in turn, so that a slow minute meets all sets."""
    sets = [
        [
            Prompt(name, row, encoder.chat(conversation))
            for row, conversation in zip(chosen, load(args.data, name, chosen), strict=True)
        ]
        for name, rows in SPEED_ROWS.items()
        for chosen in [args.rows or list(rows)]
    ]
    return [one for one in chain.from_iterable(zip_longest(*sets)) if one is not None]


def measure(
    engines: Mapping[str, HeldEngine], prompts: Sequence[Prompt], max_tokens: int, console: Console
) -> list[Measurement]:
    measurements = []
    for turn, prompt in enumerate(prompts):
        for place, name in enumerate(rotated(list(engines), turn)):
            reply = engines[name].ask(Request([prompt.token_ids], max_tokens))
            measurements.append(Measurement(name, prompt.set_name, prompt.row, place, reply))
        parts = measurements[-len(engines) :]
        rates = ", ".join(f"{one.engine} {rate([one.reply.timing]):.1f}" for one in parts)
        console.print(
            f"{turn + 1}/{len(prompts)} {prompt.set_name} {prompt.row}, tokens/s: {rates}",
            markup=False,
            highlight=False,
        )
    return measurements


def by_engine(measurements: Sequence[Measurement]) -> dict[str, dict[str, list[Timing]]]:
    """Timings by engine and prompt set, in the order of the prompts; plain vLLM first."""
    timings: dict[str, dict[str, list[Timing]]] = {PLAIN: {}}
    for one in measurements:
        timings.setdefault(one.engine, {}).setdefault(one.set_name, []).append(one.reply.timing)
    return timings


def make_table(
    args: argparse.Namespace,
    timings: Mapping[str, Sets],
    measurements: Sequence[Measurement],
) -> Table:
    plain = timings[PLAIN]
    answers = {
        (one.set_name, one.row): one.reply.token_ids for one in measurements if one.engine == PLAIN
    }
    table = Table(
        f"Tokens per second over plain vLLM's, {args.dtype}, at most {args.max_tokens} tokens",
        ["method", *plain, "mean", f"{LEVEL:.0%} interval", "tokens/step", "fed/step", "identical"],
    )
    for name, sets in timings.items():
        own = [one for one in measurements if one.engine == name]
        low, high = bootstrap_interval(sets, plain)
        same = sum(one.reply.token_ids == answers[one.set_name, one.row] for one in own)
        table.rows.append([
            name,
            *(f"{rate(sets[one]) / rate(plain[one]):.2f}" for one in plain),
            f"{speedup(sets, plain):.2f}",
            "-" if name == PLAIN else f"{low:.2f} to {high:.2f}",
            f"{tokens_per_step(own):.2f}",
            fed_per_step(own),
            f"{same}/{len(own)}",
        ])  # fmt: skip
    rates = ", ".join(f"{name} {rate(plain[name]):.1f}" for name in plain)
    table.notes.append(f"Plain vLLM's tokens per second: {rates}.")
    table.notes += rivals(timings)
    return table


def tokens_per_step(measurements: Sequence[Measurement]) -> float:
    """Tokens of decode steps per decode step; 0 where prefill yielded all tokens."""
    steps = sum(one.reply.decode_steps for one in measurements)
    return sum(one.reply.decode_tokens for one in measurements) / steps if steps else 0


def fed_per_step(measurements: Sequence[Measurement]) -> str:
    steps = sum(one.reply.counters.get("steps", 0) for one in measurements)
    fed = sum(one.reply.counters.get("fed", 0) for one in measurements)
    return f"{fed / steps:.1f}" if steps else "-"


def rivals(timings: Mapping[str, Sets]) -> list[str]:
    """How each lookahead configuration compares with the best ngram and with suffix."""
    ngrams = [name for name in timings if name.startswith("ngram")]
    others = [SUFFIX] if SUFFIX in timings else []
    if ngrams:
        others.insert(0, max(ngrams, key=lambda name: speedup(timings[name], timings[PLAIN])))
    lines = []
    for name in (name for name in timings if name.startswith("lookahead")):
        for other in others:
            low, high = bootstrap_interval(timings[name], timings[other])
            title = f"best ngram ({other})" if other in ngrams else other
            ratio = speedup(timings[name], timings[other])
            lines.append(f"{name} / {title}: {ratio:.2f} ({low:.2f} to {high:.2f})")
    return lines


def draw(axes: Axes, timings: Mapping[str, Sets]) -> None:
    """Bars of the ratios: one group per prompt set and one for their mean."""
    plain = timings[PLAIN]
    methods = [name for name in timings if name != PLAIN]
    width = 0.8 / max(1, len(methods))
    for index, name in enumerate(methods):
        sets = timings[name]
        heights = [rate(sets[one]) / rate(plain[one]) for one in plain]
        heights.append(speedup(sets, plain))
        offset = (index - (len(methods) - 1) / 2) * width
        bars = axes.bar(
            [place + offset for place in range(len(heights))], heights, width, label=name
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(plain) + 1), [*plain, "geometric mean"])
    axes.set_ylabel("tokens per second over plain vLLM's")
    axes.margins(y=0.2)
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
