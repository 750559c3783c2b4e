"""One vLLM engine in a process of its own: ``python -m vllm_lookahead.cli.engine_child JOB``.

JOB is a JSON object: ``engine`` (arguments of ``vllm.LLM``), ``prompts`` (user messages) and
``max_tokens``. The prompts are answered greedily, one at a time, after a warm-up; each answer
is a line of JSON on stdout with the fields of ``compare.Answer``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_lookahead.cli.compare import Answer

if TYPE_CHECKING:
    from vllm import LLM

WARM_UP_PROMPT = "Count from one to ten."
WARM_UP_TOKENS = 16


def main() -> None:
    # Leave the normal way, so that vLLM ends its own processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Only answers reach the parent's pipe: what vLLM and its libraries print goes to the log.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for answer in answer_all(json.loads(sys.argv[1])):
            print(json.dumps(asdict(answer)), file=answers)


def answer_all(job: dict[str, Any]) -> Iterator[Answer]:
    from vllm import LLM

    llm = LLM(**job["engine"])
    lookahead = "speculative_config" in job["engine"]
    answer(llm, WARM_UP_PROMPT, WARM_UP_TOKENS, lookahead)
    for prompt in job["prompts"]:
        yield answer(llm, prompt, job["max_tokens"], lookahead)


def answer(llm: LLM, prompt: str, max_tokens: int, lookahead: bool) -> Answer:
    from vllm import SamplingParams

    before = step_counters(llm) if lookahead else (0, 0)
    start = time.perf_counter()
    [output] = llm.chat(
        [{"role": "user", "content": prompt}],
        SamplingParams(temperature=0, max_tokens=max_tokens),
        use_tqdm=False,
    )
    seconds = time.perf_counter() - start
    after = step_counters(llm) if lookahead else (0, 0)
    tokenizer = llm.get_tokenizer()
    token_ids = list(output.outputs[0].token_ids)
    return Answer(
        token_ids=token_ids,
        pieces=[tokenizer.decode([token]) for token in token_ids],
        seconds=seconds,
        steps=after[0] - before[0],
        step_tokens=after[1] - before[1],
    )


def step_counters(llm: LLM) -> tuple[int, int]:
    """Decode steps so far and the tokens that they emitted, from the first worker."""
    stats = llm.collective_rpc("lookahead_stats")[0]
    return stats["steps"], stats["tokens"]


if __name__ == "__main__":
    main()
