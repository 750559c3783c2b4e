"""Servers for the commands that talk to `vllm serve` over HTTP, on the loopback interface."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.serving import Server, running

START_SECONDS = 900
"""Compiling a real model takes minutes on a busy machine."""
LOOKAHEAD_STATS_SECONDS = 60


def flag(name: str, value: Any) -> str:
    """``--name={...}`` with a JSON value."""
    return f"--{name}={json.dumps(value)}"


COMPACT_JSON = flag(
    "structured-outputs-config", {"backend": "xgrammar", "disable_any_whitespace": True}
)
"""Without it, grammars let a small model write white space up to max_tokens."""


@contextmanager
def server(model: str, log: Path, env: dict[str, str], *flags: str) -> Iterator[Server]:
    """`vllm serve` in float32, with ``env`` beside this process's environment."""
    vllm = Path(sys.executable).with_name("vllm")
    argv = [str(vllm), "serve", model, "--dtype=float32", "--disable-uvicorn-access-log", *flags]
    with running(argv, os.environ | env, log, start_seconds=START_SECONDS) as one:
        yield one


def lookahead_stats(one: Server) -> dict[str, Any]:
    """Counters of the only worker of a server that was started with VLLM_SERVER_DEV_MODE=1."""
    body = {"method": "lookahead_stats"}
    response = httpx.post(
        f"{one.url}/collective_rpc", json=body, timeout=LOOKAHEAD_STATS_SECONDS
    ).raise_for_status()
    [stats] = response.json()["results"]
    return stats
