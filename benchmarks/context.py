"""Seconds per decode step and per token over the length of the prompt, plain against lookahead.

The prompts are cut from the joined texts of a prompt set; each engine answers each of them once
per repeat, one request at a time, greedily, without stopping at the end of an answer. Only decode
steps are counted. S = tokens per decode step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.engine_process import Reply, Request
from benchmarks.interleaved import HeldEngine, held_engines, rotated
from benchmarks.methods import (
    PLAIN,
    PromptEncoder,
    engine_options,
    lookahead_config,
    model_path,
    speed_parser,
)
from benchmarks.prompts import load
from benchmarks.report import Table, add_output_argument, machine, present, wide_console
from vllm_lookahead.cli.demo import positive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKAHEAD = "lookahead"
PROMPT_SET = "spec_bench"


@dataclass(frozen=True, slots=True)
class Answer:
    """How one engine answered one prompt of ``length`` tokens."""

    engine: str
    length: int
    repeat: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class Cost:
    """Sums over decode steps."""

    seconds: float
    steps: int
    tokens: int

    @property
    def per_step(self) -> float:
        """Milliseconds."""
        return 1000 * self.seconds / self.steps

    @property
    def per_token(self) -> float:
        """Milliseconds."""
        return 1000 * self.seconds / self.tokens

    @property
    def compression(self) -> float:
        """Tokens per step, S."""
        return self.tokens / self.steps


def main() -> None:
    parser = speed_parser(__doc__)
    parser.set_defaults(max_tokens=64)
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        default=[1024, 2048, 4096, 8064],
        metavar="TOKENS",
        help="of the prompts; the default ends short of 8192 to leave room for the answer",
    )
    parser.add_argument(
        "--lookahead",
        type=lookahead_config,
        default="{}",
        metavar="JSON",
        help="lookahead's parameters (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=positive, default=3, help="prompts of each length")
    add_output_argument(parser)
    args = parser.parse_args()
    console = wide_console()
    encoder = PromptEncoder(model_path(args))
    room: dict[str, Any] = {
        "max_num_seqs": 1,
        "max_model_len": max(args.lengths) + args.max_tokens,
    }
    options = {
        PLAIN: engine_options(args, None, **room),
        LOOKAHEAD: engine_options(args, args.lookahead, **room),
    }
    before = machine()
    ids = encoder.text("\n\n".join(one["content"] for [one] in load(args.data, PROMPT_SET)))
    with held_engines(options, encoder.warm_up(), console) as engines:
        answers = measure(engines, ids, args, console)
    table = make_table(args, answers)
    data = {
        "machine": before,
        "max_tokens": args.max_tokens,
        "engines": options,
        "answers": [asdict(one) for one in answers],
    }
    present(args, console, "context", data, table, lambda axes: draw(axes, answers))


def measure(
    engines: Mapping[str, HeldEngine], ids: list[int], args: argparse.Namespace, console: Console
) -> list[Answer]:
    answers = []
    for repeat in range(args.repeats):
        for turn, length in enumerate(args.lengths):
            prompt = cut(ids, repeat, args.repeats, length)
            for name in rotated(list(engines), repeat + turn):
                reply = engines[name].ask(Request([prompt], args.max_tokens, ignore_eos=True))
                answers.append(Answer(name, length, repeat, reply))
            console.print(f"repeat {repeat + 1}, {length} tokens: done")
    return answers


def cut(ids: list[int], index: int, count: int, length: int) -> list[int]:
    """``length`` tokens from the ``index``-th of ``count`` parts of ``ids`` on, which repeat."""
    start = index * len(ids) // count
    return [ids[(start + offset) % len(ids)] for offset in range(length)]


def cost(answers: Sequence[Answer], engine: str, length: int) -> Cost:
    replies = [one.reply for one in answers if (one.engine, one.length) == (engine, length)]
    return Cost(
        sum(sum(one.step_seconds[one.first_decode_step :]) for one in replies),
        sum(one.decode_steps for one in replies),
        sum(one.decode_tokens for one in replies),
    )


def make_table(args: argparse.Namespace, answers: Sequence[Answer]) -> Table:
    table = Table(
        f"Decoding behind long prompts, {args.dtype}, {args.max_tokens} tokens",
        [
            "prompt tokens", "plain ms/step", "lookahead ms/step", "step ratio", "S", "fed/step",
            "tokens/s over plain's", "identical",
        ],
    )  # fmt: skip
    for length in args.lengths:
        plain, lookahead = (cost(answers, name, length) for name in (PLAIN, LOOKAHEAD))
        own = {(one.engine, one.repeat): one.reply for one in answers if one.length == length}
        counts = [own[LOOKAHEAD, repeat].counters for repeat in range(args.repeats)]
        steps = sum(one["steps"] for one in counts)
        same = sum(
            own[PLAIN, repeat].token_ids == own[LOOKAHEAD, repeat].token_ids
            for repeat in range(args.repeats)
        )
        table.rows.append([
            str(length),
            f"{plain.per_step:.2f}",
            f"{lookahead.per_step:.2f}",
            f"{lookahead.per_step / plain.per_step:.2f}",
            f"{lookahead.compression:.2f}",
            f"{sum(one['fed'] for one in counts) / steps:.1f}" if steps else "-",
            f"{plain.per_token / lookahead.per_token:.2f}",
            f"{same}/{args.repeats}",
        ])  # fmt: skip
    return table


def draw(axes: Axes, answers: Sequence[Answer]) -> None:
    """Lines of milliseconds per step and per token over the length of the prompt."""
    lengths = sorted({one.length for one in answers})
    for name in (PLAIN, LOOKAHEAD):
        costs = [cost(answers, name, length) for length in lengths]
        [line] = axes.plot(
            lengths, [one.per_step for one in costs], marker="o", label=f"{name}, step"
        )
        if name == LOOKAHEAD:
            axes.plot(
                lengths,
                [one.per_token for one in costs],
                "--",
                marker="o",
                color=line.get_color(),
                label=f"{name}, token",
            )
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.legend()


if __name__ == "__main__":
    main()
