"""vLLM engines beside each other, of which one runs at a time; the others are stopped.

An idle vLLM engine spins on a core, so engines that merely wait would slow down the one that is
measured. Here each is a process group of its own that gets SIGSTOP unless it is asked, so that
methods can be compared prompt by prompt, under the same conditions of the machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import Any, TypeVar

from rich.console import Console

from benchmarks.engine_process import READY, Reply, Request
from vllm_lookahead.cli.errors import CommandError
from vllm_lookahead.cli.launch import performance_env, tail

T = TypeVar("T")

STOP_SECONDS = 30
# The shell waits for the end of its stdin, which comes with the end of this process, however
# it ends; stopped engines couldn't notice by themselves.
GUARD = 'read line; kill -s KILL -- "-$1" 2>/dev/null'


def openmp_env(environ: Mapping[str, str]) -> dict[str, str]:
    """What vLLM sets for the workers that it starts, here for an engine that is its own worker.

    See vLLM's `OMPProcessManager.configure_omp_envs`. Empty without Intel's OpenMP, or where
    VLLM_CPU_OMP_THREADS_BIND isn't a list of cores.
    """
    cores = environ.get("VLLM_CPU_OMP_THREADS_BIND", "")
    if "libiomp" not in environ.get("LD_PRELOAD", "") or not re.fullmatch(r"\d+(,\d+)*", cores):
        return {}
    return {
        "OMP_NUM_THREADS": str(cores.count(",") + 1),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


class HeldEngine:
    """One vLLM engine in a process group of its own, stopped whenever it isn't asked."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Start the process; ``options`` are the arguments of ``vllm.LLM``."""
        self.name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by close()
        environ = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **performance_env()}
        environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **openmp_env(environ)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine_process", json.dumps(options)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "sh", str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def hold_when_ready(self) -> None:
        """Wait until the engine is up, then stop it.

        Raises:
            CommandError: it failed; the message has the end of its log.
        """
        ready = self._read()
        assert ready == READY, ready
        self._signal(signal.SIGSTOP)

    def ask(self, request: Request) -> Reply:
        """Let the engine run for one request.

        Raises:
            CommandError: it failed; the message has the end of its log.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(asdict(request)) + "\n")
        reply = Reply(**self._read())
        self._signal(signal.SIGSTOP)
        return reply

    def close(self) -> None:
        """End all processes of the engine."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._guard.communicate()
        self._log.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        raise CommandError(f"the engine {self.name!r} failed:\n{tail(self._log)}")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextmanager
def held_engines(
    options: Mapping[str, Mapping[str, Any]], warm_up: Request, console: Console
) -> Iterator[dict[str, HeldEngine]]:
    """Engines by name, started one after the other, warmed up and stopped; gone at the end.

    Args:
        options: arguments of ``vllm.LLM`` of each engine, by its name.
        warm_up: what each engine answers first.
        console: is told about each engine.
    """
    # Leave the normal way, so that the engines go, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as stack:
        engines = {}
        for name, one in options.items():
            with console.status(f"{name}: starting the engine"):
                engine = HeldEngine(name, one)
                stack.callback(engine.close)
                engine.hold_when_ready()
                engine.ask(warm_up)
            console.print(f"{name}: the engine is up", markup=False, highlight=False)
            engines[name] = engine
        yield engines


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The order in which engines take the ``turn``-th prompt: each comes first equally often."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]
