"""Concurrent JSON-schema requests beside free ones: valid, and equal to what plain vLLM answers.

A plain server and one with lookahead get the same load, one after the other. Exit code 1 if an
answer under the schema isn't valid, or any answer differs. float32, temperature 0.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import jsonschema
from rich.console import Console
from rich.table import Table

from benchmarks.prompts import DEFAULT_DATA, Conversation, load
from benchmarks.servers import COMPACT_JSON, flag, server
from tests.serving import MODEL_NAME, Server
from vllm_lookahead.cli.demo import positive, sizes
from vllm_lookahead.cli.demo_model import default_directory, ensure_model
from vllm_lookahead.cli.launch import performance_env

STRUCTURED_SET = "mt_bench"
FREE_SET = "gsm8k"
SCHEMA = {
    "type": "object",
    "properties": {
        "level": {"enum": ["easy", "medium", "hard"]},
        "minutes": {"type": "integer", "minimum": 1, "maximum": 600},
        "title": {"type": "string", "maxLength": 40},
        "topics": {"type": "array", "items": {"enum": ["art", "code", "life", "maths", "science"]},
                   "maxItems": 3},
    },
    "required": ["level", "minutes", "title", "topics"],
    "additionalProperties": False,
}  # fmt: skip
"""Every value is bounded, so that answers end before max_tokens."""

ORDER = (
    "Describe the task below by a JSON object with its level (easy, medium or hard), the minutes "
    "it takes, a short title and its topics. Don't solve it.\n\n{}"
)


@dataclass(frozen=True)
class Answer:
    """What a client gets."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True)
class Load:
    """Requests that are sent at once, those under the schema first."""

    structured: list[Conversation]
    free: list[Conversation]
    max_tokens: int

    def send(self, one: Server) -> tuple[list[Answer], float]:
        """Answers in the order of the requests, and the seconds that they took."""
        form = {"type": "json_schema", "json_schema": {"name": "task", "schema": SCHEMA}}
        requests = [{"messages": messages, "response_format": form} for messages in self.structured]
        requests += [{"messages": messages} for messages in self.free]
        client = one.client.with_options(timeout=1200)

        def ask(request: dict[str, Any]) -> Answer:
            response = client.chat.completions.create(
                model=MODEL_NAME,
                temperature=0,
                max_tokens=self.max_tokens,
                extra_body={"return_token_ids": True},
                **request,
            )
            [choice] = response.choices
            return Answer(choice.message.content, tuple(choice.token_ids), choice.finish_reason)

        start = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as threads:
            answers = list(threads.map(ask, requests))
        return answers, time.perf_counter() - start


def is_valid(answer: Answer) -> bool:
    """Whether a structured answer ended by itself and keeps to the schema."""
    try:
        jsonschema.validate(json.loads(answer.text), SCHEMA)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return answer.finish_reason == "stop"


def make_load(args: argparse.Namespace) -> Load:
    tasks = load(args.data, STRUCTURED_SET, range(args.structured))
    structured = [
        [{"role": "user", "content": ORDER.format(message["content"])} for message in conversation]
        for conversation in tasks
    ]
    return Load(structured, load(args.data, FREE_SET, range(args.free)), args.max_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="model name or path (default: the demo model)")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder of prompt sets")
    parser.add_argument("--structured", type=positive, default=30, help="default: %(default)s")
    parser.add_argument("--free", type=positive, default=10, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=positive, default=160, help="default: %(default)s")
    parser.add_argument(
        "--sizes", type=sizes, default="auto", metavar="W,N,G", help="default: %(default)s"
    )
    args = parser.parse_args()
    if args.model is None:
        ensure_model(default_directory())
        args.model = str(default_directory())
    # Leave the normal way, so that the servers go, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    requests = make_load(args)
    count = args.structured + args.free
    flags = [
        "--max-model-len=2048",
        f"--max-num-seqs={count}",
        f"--kv-cache-memory-bytes={2 << 30}",
        COMPACT_JSON,
    ]
    modes = {
        "plain": [],
        "lookahead": [flag("speculative-config", {"method": "lookahead", **args.sizes})],
    }
    console = Console()
    table = Table(title=f"{args.structured} requests under a JSON schema beside {args.free} free")
    for column in ("server", "valid", "structured equal", "free equal", "tokens", "seconds"):
        table.add_column(column, justify="right")
    failed = False
    plain: list[Answer] = []
    for mode, extra in modes.items():
        log = Path(gettempdir(), f"vllm-lookahead-structured-{mode}.log")
        console.print(f"{mode}: starting the server; its output goes to {log}")
        with server(args.model, log, performance_env(), *flags, *extra) as one:
            answers, seconds = requests.send(one)
        plain = plain or answers
        valid = [is_valid(answer) for answer in answers[: args.structured]]
        equal = [a == b for a, b in zip(plain, answers, strict=True)]
        failed |= not all(valid + equal)
        table.add_row(
            mode,
            f"{sum(valid)}/{args.structured}",
            f"{sum(equal[: args.structured])}/{args.structured}",
            f"{sum(equal[args.structured :])}/{args.free}",
            str(sum(len(answer.token_ids) for answer in answers)),
            f"{seconds:.1f}",
        )
        for index, right in enumerate(valid):
            if not right:
                console.print(f"{mode}: not valid: {answers[index]}", markup=False)
        for index, right in enumerate(equal):
            if not right:
                console.print(
                    f"plain {plain[index]}\n{mode} {answers[index]}", markup=False, highlight=False
                )
    console.print(table)
    sys.exit(failed)


if __name__ == "__main__":
    main()
