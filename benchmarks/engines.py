"""What the commands share: arguments, fast child processes, engines one after the other."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.prompts import DEFAULT_DATA
from vllm_lookahead.cli.demo import demo_model
from vllm_lookahead.cli.launch import performance_env
from vllm_lookahead.config import AUTO

if TYPE_CHECKING:
    from vllm import LLM


def base_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of every command."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="model name or path (default: the demo model)")
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder of prompt sets")
    parser.add_argument("--max-tokens", type=int, default=128, help="default: %(default)s")
    return parser


PAPER: dict[str, Any] = {
    "method": "lookahead",
    "controller": False,
    "sources": ["window", "output", "prompt"],
    # Every sequence shall have room for its largest tree.
    "scratch_fraction": 0.5,
}
"""Lookahead as the paper has it, beside which sizes are to be given."""


def label(config: dict[str, Any]) -> str:
    """``(W,N,G)`` of a configuration, ``auto`` without sizes."""
    if "window_size" not in config:
        return AUTO
    return f"({config['window_size']},{config['ngram_size']},{config['verification_set_size']})"


def restart_fast() -> None:
    """Run this command again with the environment that makes CPU engines fast.

    The dynamic linker reads LD_PRELOAD at the start only.
    """
    if os.environ.get("VLLM_LOOKAHEAD_BENCHMARK"):
        return
    environ = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **performance_env()}
    environ |= {"VLLM_LOOKAHEAD_BENCHMARK": "1", "PYTHONUNBUFFERED": "1"}
    os.execve(sys.executable, [sys.executable, "-m", *module_and_arguments()], environ)


def module_and_arguments() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "start the benchmarks by python -m"
    return [spec.name, *sys.argv[1:]]


@contextmanager
def engine(args: argparse.Namespace, **options: Any) -> Iterator[LLM]:
    """A vLLM engine for the command's model, gone at the end."""
    from vllm import LLM

    model = args.model or demo_model()
    defaults = {
        "dtype": args.dtype,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 2 << 30,
        "enable_prefix_caching": False,
    }
    llm = LLM(model, **{**defaults, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
