"""Token identity with plain vLLM on real text, greedy and seeded, over sizes and engine settings.

Exit code 1 if any output differs. float32 by default, where rounding can't tip a choice.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engines import base_parser, engine, label, restart_fast
from benchmarks.prompts import EXACTNESS_SETS, load
from vllm_lookahead.cli.demo import sizes

MODES = ("greedy", "seeded")


def outputs(args: argparse.Namespace, **options: Any) -> list[tuple[Any, ...]]:
    """(token ids, finish reason, stop reason) of every prompt, mode by mode."""
    from vllm import SamplingParams

    conversations = [
        one for name in EXACTNESS_SETS for one in load(args.data, name, range(args.per_set))
    ]
    params = {
        "greedy": [SamplingParams(temperature=0, max_tokens=args.max_tokens)] * len(conversations),
        "seeded": [
            SamplingParams(temperature=0.8, top_p=0.95, seed=1000 + i, max_tokens=args.max_tokens)
            for i in range(len(conversations))
        ],
    }
    answers = []
    with engine(args, **options) as llm:
        for mode in args.modes:
            answers += llm.chat(conversations, params[mode], use_tqdm=False)
    return [
        (tuple(one.token_ids), one.finish_reason, one.stop_reason)
        for one in (answer.outputs[0] for answer in answers)
    ]


def main() -> None:
    parser = base_parser(__doc__)
    parser.add_argument("--sizes", type=sizes, nargs="+", metavar="W,N,G", default=list(map(sizes, (
        "auto", "4,4,4", "7,5,7", "15,5,15", "0,4,4", "5,3,0", "1,2,1",
    ))))  # fmt: skip
    parser.add_argument("--max-num-seqs", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--block-size", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--per-set", type=int, default=4, help="prompts per set")
    args = parser.parse_args()
    restart_fast()
    console = Console()
    table = Table(title=f"Outputs identical to plain vLLM, {args.dtype}, {args.max_tokens} tokens")
    for column in ("(W,N,G)", "max_num_seqs", "block size", *args.modes):
        table.add_column(column, justify="right")
    plain = outputs(args, max_num_seqs=args.max_num_seqs[0], block_size=args.block_size[0])
    size = len(plain) // len(args.modes)
    failed = False
    for config, seqs, block in itertools.product(args.sizes, args.max_num_seqs, args.block_size):
        lookahead = outputs(
            args,
            max_num_seqs=seqs,
            block_size=block,
            # Given sizes are fed whole, automatic ones as the controller likes.
            speculative_config={"method": "lookahead", "controller": not config, **config},
        )
        equal = [a == b for a, b in zip(plain, lookahead, strict=True)]
        parts = [equal[start : start + size] for start in range(0, len(equal), size)]
        counts = [f"{sum(part)}/{size}" for part in parts]
        table.add_row(label(config), str(seqs), str(block), *counts)
        console.print(f"{label(config)} max_num_seqs={seqs} block={block}: {counts}")
        failed |= not all(equal)
    console.print(table)
    sys.exit(failed)


if __name__ == "__main__":
    main()
