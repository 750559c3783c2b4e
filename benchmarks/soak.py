"""Thousands of short requests, half of them left mid-stream, beside one long output.

A third is greedy, a third sampled, a third under a grammar. Exit code 1 if anything hung or
failed, a sequence or an n-gram is left when the server is idle, its memory grew by 5 % or more
after the first tenth of the requests, or the next request isn't answered as the first one was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import httpx
import openai
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.servers import COMPACT_JSON, flag, lookahead_stats, server
from tests.serving import MODEL_NAME, Server, environment
from tests.tiny import save_llama
from vllm_lookahead.cli.demo import positive, sizes

MAX_GROWTH = 0.05
MAX_FAILURES = 20
"""After so many, no more requests are sent."""
IDLE_SECONDS = 20
LEAVE_AFTER_PARTS = 2
SHORT_TOKENS = 48
PROMPT_ROOM = 256
"""Tokens of the model's length that are left for prompts."""

WORDS = ("red", "green", "blue", "house", "river", "train", "walks", "sees", "one", "two", "and")
REGEX = r"[a-f]{3}-[0-9]{4}(-x){0,4}"
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
        "is_new": {"type": "boolean"},
    },
    "required": ["colour", "sizes", "is_new"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Job:
    """A request, and whether its client leaves in the middle."""

    parameters: dict[str, Any]
    leaves: bool = False
    is_valid: Callable[[str], object] | None = None
    """Of a whole answer that ended by itself."""
    is_long: bool = False


def job(index: int) -> Job:
    """The ``index``-th short request."""
    rng = random.Random(index)
    parameters: dict[str, Any] = {
        "prompt": " ".join(rng.choices(WORDS, k=rng.randint(2, 10))),
        "max_tokens": SHORT_TOKENS,
        "temperature": 0,
    }
    leaves = index // 6 % 2 == 0
    match index % 6:
        case 0 | 3:
            # Who shall be left in the middle mustn't end before.
            return Job({**parameters, "extra_body": {"ignore_eos": leaves}}, leaves)
        case 1 | 4:
            sampled = {"temperature": 0.8, "seed": index, "extra_body": {"ignore_eos": leaves}}
            return Job({**parameters, **sampled}, leaves)
        case 2:
            extra: dict[str, Any] = {"structured_outputs": {"json": SCHEMA}}
            return Job({**parameters, "extra_body": extra}, leaves, json.loads)
        case _:
            extra = {"structured_outputs": {"regex": REGEX}}
            return Job({**parameters, "extra_body": extra}, leaves, re.compile(REGEX).fullmatch)


@dataclass
class Traffic:
    """What became of the requests."""

    url: str
    group: int
    requests: int
    patience: float
    """Seconds without a part of a stream after which a request counts as hung."""
    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    long_tokens: int = 0
    rss: list[int] = field(default_factory=list)
    """At the start and after each tenth of the requests, in bytes."""

    def __post_init__(self) -> None:
        # A client that doesn't retry: what fails once has failed.
        self._client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=self.patience
        )
        self.rss.append(group_rss(self.group))

    @property
    def finished(self) -> int:
        return self.ends.total()

    @property
    def bad(self) -> int:
        return self.ends["failed"] + self.ends["hung"]

    async def run(self, concurrency: int, long_tokens: int, report: Callable[[], None]) -> None:
        """Send all requests, ``concurrency`` at a time, and the long one beside them."""
        jobs = map(job, range(self.requests))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask_long(long_tokens))
            for _ in range(concurrency):
                tasks.create_task(self._ask_all(jobs, report))

    async def _ask_all(self, jobs: Iterator[Job], report: Callable[[], None]) -> None:
        for one in jobs:
            self.ends[await self._end_of(one)] += 1
            if self.finished * 10 // self.requests >= len(self.rss):
                self.rss.append(group_rss(self.group))
            report()
            if self.bad >= MAX_FAILURES:
                return

    async def _ask_long(self, max_tokens: int) -> None:
        parameters = {"prompt": "once upon a time", "max_tokens": max_tokens, "temperature": 0}
        await self._end_of(Job({**parameters, "extra_body": {"ignore_eos": True}}, is_long=True))

    async def _end_of(self, one: Job) -> str:
        try:
            return await self._ask(one)
        except (TimeoutError, openai.APITimeoutError):
            self.errors.append(f"hung: {one.parameters}")
            return "hung"
        # Whatever a request raises is its outcome; the others go on.
        except Exception as error:
            self.errors.append(f"failed: {error!r}: {one.parameters}")
            return "failed"

    async def _ask(self, one: Job) -> str:
        loop = asyncio.get_running_loop()
        text, reason, parts = "", None, 0
        async with (
            asyncio.timeout(self.patience) as limit,
            await self._client.completions.create(
                model=MODEL_NAME,
                stream=True,
                stream_options={"include_usage": True},
                **one.parameters,
            ) as stream,
        ):
            async for part in stream:
                limit.reschedule(loop.time() + self.patience)
                if one.is_long and part.usage is not None:
                    self.long_tokens = part.usage.completion_tokens
                for choice in part.choices:
                    text += choice.text
                    reason = choice.finish_reason or reason
                    parts += 1
                if one.leaves and reason is None and parts == LEAVE_AFTER_PARTS:
                    return "aborted"
        if reason is None:
            raise RuntimeError("the stream broke off")
        if one.is_valid is not None and reason == "stop" and not one.is_valid(text):
            raise RuntimeError(f"against its grammar: {text!r}")
        return "done"


def group_rss(group: int) -> int:
    """Resident memory of all processes of a process group, in bytes."""
    total = 0
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group:
                total += process.memory_info().rss
    return total


def first_answers(one: Server) -> list[list[int]]:
    """Token ids of a greedy and a seeded answer."""
    asked = [{"temperature": 0}, {"temperature": 0.8, "seed": 7}]
    answers = []
    for sampling in asked:
        response = one.client.completions.create(
            model=MODEL_NAME,
            prompt="one two three, one two three, one two",
            max_tokens=64,
            extra_body={"return_token_ids": True, "ignore_eos": True},
            **sampling,  # type: ignore[arg-type]
        )
        answers.append(response.choices[0].token_ids)  # type: ignore[attr-defined]
    return answers


def held_when_idle(one: Server) -> tuple[int, int]:
    """(sequences, n-grams) that the worker holds when it has had time to let go of them."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        stats = lookahead_stats(one)
        held = stats["sequences"], stats["pool_ngrams"]
        if not any(held) or time.monotonic() > deadline:
            return held
        time.sleep(0.5)


def send(args: argparse.Namespace, one: Server, console: Console) -> Traffic:
    """The traffic, with a progress bar."""
    traffic = Traffic(one.url, one.group, args.requests, args.patience)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=args.requests)

        def report() -> None:
            counts = ", ".join(f"{count} {end}" for end, count in sorted(traffic.ends.items()))
            memory = f"{traffic.rss[-1] / 2**20:.0f} MiB"
            progress.update(bar, completed=traffic.finished, description=f"{counts}; {memory}")

        async def limited() -> None:
            async with asyncio.timeout(args.time_limit):
                await traffic.run(args.concurrency, args.long_tokens, report)

        try:
            asyncio.run(limited())
        except TimeoutError:
            traffic.errors.append(f"not done in {args.time_limit} s")
    return traffic


def soak(args: argparse.Namespace, one: Server, console: Console) -> list[str]:
    """Run everything, print the tables and return what was wrong."""
    before = first_answers(one)
    traffic = send(args, one, console)
    problems = traffic.errors[:MAX_FAILURES]
    sequences = ngrams = -1  # unknown
    same = False
    try:
        one.wait_until_idle()
        sequences, ngrams = (0, 0) if args.plain else held_when_idle(one)
        same = first_answers(one) == before
    except (TimeoutError, httpx.HTTPError, openai.OpenAIError) as error:
        problems.append(f"the server is out of order: {error!r}")
    # Shorter runs than ten requests have no tenth.
    at_tenth, at_end = traffic.rss[min(1, len(traffic.rss) - 1)], group_rss(one.group)
    growth = at_end / at_tenth - 1

    table = Table(title=f"Soak: {args.requests} requests, {args.concurrency} in flight")
    table.add_column("what")
    table.add_column("value", justify="right")
    for end in ("done", "aborted", "failed", "hung"):
        table.add_row(f"requests {end}", str(traffic.ends[end]))
    table.add_row("tokens of the long output", f"{traffic.long_tokens} of {args.long_tokens}")
    table.add_section()
    for tenth, rss in enumerate(traffic.rss):
        table.add_row(f"resident MiB after {10 * tenth} %", f"{rss / 2**20:.0f}")
    table.add_row("resident MiB, idle at the end", f"{at_end / 2**20:.0f}")
    table.add_row("growth after the first tenth", f"{growth:+.1%}")
    table.add_section()
    table.add_row("sequences at the end", str(sequences) if sequences >= 0 else "?")
    table.add_row("pool n-grams at the end", str(ngrams) if ngrams >= 0 else "?")
    table.add_row("next request equals the first", "yes" if same else "no")
    console.print(table)

    checks = [
        (traffic.finished < args.requests, f"only {traffic.finished} requests came to an end"),
        (traffic.bad, f"{traffic.bad} requests failed or hung"),
        (traffic.long_tokens != args.long_tokens, "the long output isn't whole"),
        (growth >= MAX_GROWTH, f"memory grew by {growth:.1%} after the first tenth"),
        (
            sequences > 0 or ngrams > 0,
            f"{sequences} sequences and {ngrams} n-grams are left when idle",
        ),
        (not same, "the next request isn't answered as the first one was"),
    ]
    return problems + [text for failed, text in checks if failed]


def flags(args: argparse.Namespace) -> list[str]:
    """Flags of the server."""
    lookahead = flag("speculative-config", {"method": "lookahead", **args.sizes})
    return [
        "--enforce-eager",
        f"--max-model-len={args.long_tokens + PROMPT_ROOM}",
        f"--max-num-seqs={args.concurrency + 1}",
        f"--kv-cache-memory-bytes={args.kv_cache_mib << 20}",
        COMPACT_JSON,
        *([] if args.plain else [lookahead]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="model name or path (default: a tiny random Llama)")
    parser.add_argument(
        "--requests",
        type=positive,
        default=5000,
        help="default: %(default)s; under 3000, warming up looks like growth",
    )
    parser.add_argument("--concurrency", type=positive, default=16, help="default: %(default)s")
    parser.add_argument("--long-tokens", type=positive, default=8192, help="default: %(default)s")
    parser.add_argument(
        "--sizes", type=sizes, default="auto", metavar="W,N,G", help="default: %(default)s"
    )
    parser.add_argument(
        "--plain", action="store_true", help="without lookahead, to compare the memory with"
    )
    parser.add_argument(
        "--kv-cache-mib", type=positive, default=64, help="8192 tokens of a real model need more"
    )
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds after which a silent stream has hung"
    )
    parser.add_argument(
        "--time-limit", type=float, default=7200, help="seconds for all (default: %(default)s)"
    )
    parser.add_argument(
        "--log",
        type=Path,
        default=Path(gettempdir(), "vllm-lookahead-soak.log"),
        help="the server's output (default: %(default)s)",
    )
    args = parser.parse_args()
    # Leave the normal way, so that the server goes, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    with TemporaryDirectory() as folder:
        length = args.long_tokens + PROMPT_ROOM
        model = args.model or str(save_llama(Path(folder), max_length=max(length, 16384)))
        env = environment() | {"VLLM_SERVER_DEV_MODE": "1"}
        console.print(f"Starting the server; its output goes to {args.log}")
        with server(model, args.log, env, *flags(args)) as one:
            problems = soak(args, one, console)
    for problem in problems:
        console.print(problem, markup=False, highlight=False)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
