"""Step compression ratio S = decode tokens / decode steps, per prompt set and tree size.

The token that prefill yields is not counted, nor are tokens behind a stop. Greedy, one pass.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engines import PAPER, base_parser, engine, label, restart_fast
from benchmarks.prompts import SIMULATOR_ROWS, load
from vllm_lookahead.cli.demo import sizes

SIMULATOR = {
    "(15,5,15)": (1.89, 2.18, 2.10),
    "(7,5,7)": (1.82, 2.04, 1.99),
    "(4,3,4)": (1.50, 1.69, 1.70),
    "(0,4,2)": (1.38, 1.59, 1.57),
}
"""S of the independent simulator, which accepted no window paths, on `SIMULATOR_ROWS`."""


def free_tokens(count: int) -> dict[str, Any]:
    """Automatic sizes on a machine where so many tokens cost what one does, and no more."""
    curve = [[1, 1.0], [count, 1.0], [count + 1, 1000.0]]
    return {"method": "lookahead", "scratch_fraction": 0.5, "step_cost": curve}


def measure(
    args: argparse.Namespace, lookahead: dict[str, Any], max_num_seqs: int
) -> list[tuple[float, float]]:
    """(S, fed tokens per step) of each prompt set."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    results = []
    with engine(args, max_num_seqs=max_num_seqs, speculative_config=lookahead) as llm:
        before = llm.collective_rpc("lookahead_stats")[0]
        for name, rows in SIMULATOR_ROWS.items():
            outputs = llm.chat(load(args.data, name, rows), params, use_tqdm=False)
            after = llm.collective_rpc("lookahead_stats")[0]
            steps = after["steps"] - before["steps"]
            tokens = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
            results.append((tokens / steps, (after["fed"] - before["fed"]) / steps))
            before = after
    return results


def main() -> None:
    parser = base_parser(__doc__)
    parser.add_argument(
        "--sizes", type=sizes, nargs="*", metavar="W,N,G", default=list(map(sizes, (
            "15,5,15", "7,5,7", "4,3,4", "0,4,2",
        ))),
    )  # fmt: skip
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument(
        "--free", type=int, nargs="*", default=[14, 40], metavar="TOKENS",
        help="also automatic trees of so many tokens, one sequence at a time (default: 14 40)",
    )  # fmt: skip
    args = parser.parse_args()
    restart_fast()
    console = Console()
    table = Table(title=f"Step compression ratio S, greedy, {args.dtype}, {args.max_tokens} tokens")
    for column in ("(W,N,G)", *SIMULATOR_ROWS, "mean", "simulator's mean", "fed/step"):
        table.add_column(column, justify="right")
    runs = [(label(sizes), {**PAPER, **sizes}, args.max_num_seqs) for sizes in args.sizes]
    # The curve is the batch's, so there is one sequence in it.
    runs += [(f"auto, {count} free", free_tokens(count), 1) for count in args.free]
    for name, lookahead, max_num_seqs in runs:
        results = measure(args, lookahead, max_num_seqs)
        ratios = [ratio for ratio, _ in results]
        mean = sum(ratios) / len(ratios)
        reference = SIMULATOR.get(name)
        table.add_row(
            name,
            *(f"{ratio:.2f}" for ratio in ratios),
            f"{mean:.2f}",
            f"{sum(reference) / 3:.2f} ({3 * mean / sum(reference) - 1:+.0%})"
            if reference
            else "-",
            f"{sum(fed for _, fed in results) / len(results):.1f}",
        )
        console.print(f"{name}: mean S {mean:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
