"""One vLLM engine that answers requests: ``python -m benchmarks.engine_process OPTIONS``.

OPTIONS is a JSON object, the arguments of ``vllm.LLM``. The first line on stdout is READY; then
each line of stdin is a `Request` as JSON and is answered by a line with a `Reply`. The end of
stdin ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from benchmarks.ratios import Timing

if TYPE_CHECKING:
    from vllm import LLM

READY = "ready"


@dataclass(frozen=True, slots=True)
class Request:
    """Prompts that are answered greedily."""

    prompts: list[list[int]]
    """Token ids of each prompt."""
    max_tokens: int
    ignore_eos: bool = False
    lookahead: dict[str, Any] | None = None
    """Lookahead's parameters of these requests."""
    at_once: int | None = None
    """Most prompts that are answered at once; when one is, the next is sent. None: all."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What one `Request` took. Times in seconds."""

    token_ids: list[list[int]]
    """The answers, in the order of the prompts."""
    seconds: float
    """From adding the requests to the last token, prefill included."""
    step_seconds: list[float]
    """Of each step of the engine."""
    step_tokens: list[int]
    """Tokens that each step yielded, all requests together."""
    first_decode_step: int
    """Index of the first step before which every request had its first token."""
    counters: dict[str, int]
    """How much ``steps``, ``tokens`` and ``fed`` of lookahead's counters grew; else empty."""
    full_decode_steps: list[int] = field(default_factory=list)
    """Indices of the steps with as many prompts as are answered at once, all after their first
    token."""

    @property
    def timing(self) -> Timing:
        """All tokens of the reply, prefill included."""
        return Timing(self.num_tokens, self.seconds)

    @property
    def full_decode_timing(self) -> Timing:
        """The full decode steps."""
        steps = self.full_decode_steps
        return Timing(
            sum(self.step_tokens[step] for step in steps),
            sum(self.step_seconds[step] for step in steps),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.token_ids))

    @property
    def decode_steps(self) -> int:
        """Steps of the engine after prefill."""
        return len(self.step_seconds) - self.first_decode_step

    @property
    def decode_tokens(self) -> int:
        """Tokens that the steps after prefill yielded."""
        return sum(self.step_tokens[self.first_decode_step :])


def main() -> None:
    # Leave the normal way, so that vLLM ends its own processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Only replies reach the parent's pipe: what vLLM and its libraries print goes to the log.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        from vllm import LLM

        options = json.loads(sys.argv[1])
        llm = LLM(**options)
        method = (options.get("speculative_config") or {}).get("method")
        print(json.dumps(READY), file=replies)
        for line in iter(sys.stdin.readline, ""):
            reply = answer(llm, Request(**json.loads(line)), counts=method == "lookahead")
            print(json.dumps(asdict(reply)), file=replies)
        llm.llm_engine.engine_core.shutdown()


def answer(llm: LLM, request: Request, *, counts: bool) -> Reply:
    """Answer all prompts; ``counts`` says whether the engine has lookahead's counters."""
    before = counters(llm) if counts else {}
    answers: list[list[int]] = [[] for _ in request.prompts]
    step_seconds: list[float] = []
    step_tokens: list[int] = []
    first_decode_step = 0
    full_decode_steps: list[int] = []
    start = last = time.perf_counter()
    for is_full, outputs in steps(llm, request):
        now = time.perf_counter()
        if not all(answers):
            first_decode_step = len(step_seconds) + 1
        if is_full and all(answers[index] for index, _ in outputs):
            full_decode_steps.append(len(step_seconds))
        for index, token_ids in outputs:
            answers[index] += token_ids
        step_seconds.append(now - last)
        step_tokens.append(sum(len(token_ids) for _, token_ids in outputs))
        last = now
    after = counters(llm) if counts else {}
    return Reply(
        token_ids=answers,
        seconds=last - start,
        step_seconds=step_seconds,
        step_tokens=step_tokens,
        first_decode_step=first_decode_step,
        counters={name: after[name] - before[name] for name in after},
        full_decode_steps=full_decode_steps,
    )


_numbers = count()


def steps(llm: LLM, request: Request) -> Iterator[tuple[bool, list[tuple[int, list[int]]]]]:
    """Add the prompts and run the engine.

    Yields each step's (whether it was full, [(index of prompt, new token ids)]).
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    waiting = iter(enumerate(request.prompts))
    most = request.at_once or len(request.prompts)
    indices: dict[str, int] = {}
    while True:
        for index, token_ids in islice(waiting, most - len(indices)):
            params = SamplingParams(
                temperature=0,
                max_tokens=request.max_tokens,
                ignore_eos=request.ignore_eos,
                output_kind=RequestOutputKind.DELTA,
                extra_args=None if request.lookahead is None else {"lookahead": request.lookahead},
            )
            name = str(next(_numbers))
            indices[name] = index
            engine.add_request(name, {"prompt_token_ids": token_ids}, params)
        if not indices:
            return
        is_full = len(indices) == most
        outputs = engine.step()
        yield (
            is_full,
            [(indices[one.request_id], list(one.outputs[0].token_ids)) for one in outputs],
        )
        for output in outputs:
            if output.finished:
                del indices[output.request_id]


def counters(llm: LLM) -> dict[str, int]:
    """Lookahead's cumulative counters, from the first worker."""
    stats = llm.collective_rpc("lookahead_stats")[0]
    return {name: stats[name] for name in ("steps", "tokens", "fed")}


if __name__ == "__main__":
    main()
