"""The controller on two tensor-parallel ranks: ``python -m tests.engine.tensor_parallel MODEL``.

A process of its own, since vLLM fixes for the process where the ranks' threads may run. Prints
the outputs' token ids and each rank's counters as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.engine.harness import engine, greedy, outcomes, random_prompts, seeded

PROMPTS = random_prompts(5, 31, 32, 64, seed=11)
# More steps than a correction of the cost curve waits for.
PARAMS = [greedy(100), seeded(4, 100)] * 2
SIZES = {"window_size": 4, "ngram_size": 4, "verification_set_size": 4, "controller": True}


def main() -> None:
    with engine(Path(sys.argv[1]), SIZES, tensor_parallel_size=2) as llm:
        token_ids = [one[0].token_ids for one in outcomes(llm, PROMPTS, PARAMS)]
        ranks = llm.collective_rpc("lookahead_stats")
    print(json.dumps({"token_ids": token_ids, "ranks": ranks}))


if __name__ == "__main__":
    main()
