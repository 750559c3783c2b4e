"""``vllm-lookahead demo``: the same prompts decoded plainly and with lookahead, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_lookahead.cli.compare import Answer, Comparison, total
from vllm_lookahead.cli.demo_model import default_directory, ensure_model
from vllm_lookahead.cli.launch import run_engine
from vllm_lookahead.config import AUTO, TREE_SIZES

PROMPTS = {
    "question": "What causes the seasons on Earth? Explain it in a few sentences.",
    "code": (
        "Write a Python class Stack with the methods push, pop, peek and is_empty, "
        "each with a docstring."
    ),
    "maths": (
        "A shop sells pens at 3 dollars and notebooks at 5 dollars. Anna buys 4 pens and "
        "6 notebooks. How much does she pay? Think step by step."
    ),
    "rewrite": (
        "Correct the spelling of this text: The trian leaves the station at noon. It croses the "
        "river, climbs the hils and stops at evry village. The childern wave at the trian, and "
        "the driver waves at the childern."
    ),
}
EXACT_DTYPE = "float32"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="compare plain decoding and lookahead on four prompts",
        description=(
            "Decode four prompts plainly and with lookahead, and compare speed and tokens. The "
            f"exit code is 1 if tokens differ in {EXACT_DTYPE}. In other dtypes rounding depends "
            "on the width of a step, so there a difference is only reported."
        ),
    )
    parser.add_argument("--model", help="model name or path (default: the demo model, made first)")
    parser.add_argument(
        "--dtype",
        choices=(EXACT_DTYPE, "bfloat16", "float16"),
        default=EXACT_DTYPE,
        help="default: %(default)s",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=128, metavar="N", help="per answer (default: 128)"
    )
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=AUTO,
        metavar="W,N,G",
        help="largest window, n-gram and verification set size of lookahead (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def sizes(text: str) -> dict[str, int]:
    """argparse type: ``W,N,G`` or ``auto`` as parameters, whose ranges are the engine's matter."""
    if text == AUTO:
        return {}
    return dict(zip(TREE_SIZES, map(int, text.split(",")), strict=True))


def positive(text: str) -> int:
    """argparse type; its name is part of the error message ("invalid positive value")."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def run(args: argparse.Namespace) -> int:
    console = Console()
    engine = {
        "model": args.model or demo_model(),
        "dtype": args.dtype,
        "max_num_seqs": 1,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 1 << 30,
    }
    ahead = {**engine, "speculative_config": {"method": "lookahead", **args.sizes}}
    # One after the other: vLLM's CPU workers spin while idle and would slow each other.
    plain = answers(console, "plain", engine, args.max_tokens)
    lookahead = answers(console, "lookahead", ahead, args.max_tokens)
    comparisons = [
        Comparison(name, [a], [b]) for name, a, b in zip(PROMPTS, plain, lookahead, strict=True)
    ]
    console.print(table(comparisons, args.dtype))
    for comparison in comparisons:
        for difference in comparison.differences():
            console.print(difference, markup=False, highlight=False)
    return exit_code(comparisons, args.dtype)


def demo_model() -> str:
    directory = default_directory()
    ensure_model(directory)
    return str(directory)


def answers(
    console: Console, mode: str, engine: dict[str, Any], max_tokens: int
) -> Sequence[Answer]:
    """Answer every prompt with one engine, telling the console about each."""
    job = {"engine": engine, "prompts": list(PROMPTS.values()), "max_tokens": max_tokens}
    done: list[Answer] = []
    with console.status(f"{mode}: starting the engine"):
        for name, message in zip(PROMPTS, run_engine(job), strict=True):
            answer = Answer(**message)
            tokens = len(answer.token_ids)
            console.print(f"{mode}: {name}, {tokens} tokens in {answer.seconds:.2f} s")
            done.append(answer)
    return done


def table(comparisons: Sequence[Comparison], dtype: str) -> Table:
    result = Table(title=f"Greedy decoding, {dtype}", caption="Rates include prefill.")
    result.add_column("prompt")
    for column in ("plain tok/s", "lookahead tok/s", "ratio", "tokens/step", "identical"):
        result.add_column(column, justify="right")
    for comparison in comparisons:
        result.add_row(*cells(comparison))
    result.add_section()
    result.add_row(*cells(total(comparisons)), style="bold")
    return result


def cells(comparison: Comparison) -> list[str]:
    per_step = comparison.tokens_per_step
    return [
        comparison.name,
        f"{comparison.plain_rate:.1f}",
        f"{comparison.lookahead_rate:.1f}",
        f"{comparison.speedup:.2f}x",
        "-" if per_step is None else f"{per_step:.2f}",
        "yes" if comparison.identical else "no",
    ]


def exit_code(comparisons: Sequence[Comparison], dtype: str) -> int:
    return int(dtype == EXACT_DTYPE and not total(comparisons).identical)
