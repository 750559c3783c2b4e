"""Starting vLLM engines in child processes, with the environment that makes them fast on CPUs."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

from vllm_lookahead.cli.errors import CommandError

TCMALLOC_PATTERNS = (
    f"{sys.prefix}/lib/libtcmalloc*.so*",
    "/usr/lib/*-linux-gnu/libtcmalloc*.so*",
    "/usr/lib64/libtcmalloc*.so*",
    "/usr/lib/libtcmalloc*.so*",
    "/usr/local/lib/libtcmalloc*.so*",
)
LOG_TAIL_LINES = 30


def performance_env(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables to add to ``environ`` for a vLLM process that shall be fast on this machine's CPU.

    * ``LD_PRELOAD``: what is there already, then tcmalloc and Intel's OpenMP where they are
      installed. vLLM's guide for CPUs asks for both: without the latter, steps of changing width
      (speculative ones) are slow.
    * ``VLLM_CPU_OMP_THREADS_BIND``: every core that this process may use, unless the user has set
      it. vLLM's own choice leaves a core idle, which on two cores is half of the machine. It is
      one rank's list: with tensor parallelism the user must set it, one list per rank.

    The dynamic linker reads ``LD_PRELOAD`` when a program starts, so this is for child processes.
    Empty on other systems than Linux. Harmless where vLLM runs on a GPU.
    """
    if sys.platform != "linux":
        return {}
    additions = {}
    preload = environ.get("LD_PRELOAD", "")
    libraries = [preload] if preload else []
    if "libtcmalloc" not in preload:
        libraries += _tcmalloc()
    # vLLM refuses a process with two OpenMP runtimes.
    if not any(runtime in preload for runtime in ("libiomp", "libomp", "libgomp")):
        libraries += glob.glob(f"{sys.prefix}/lib/libiomp5.so")
    if libraries:
        additions["LD_PRELOAD"] = ":".join(libraries)
    if "VLLM_CPU_OMP_THREADS_BIND" not in environ:
        cores = sorted(os.sched_getaffinity(0))
        additions["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    return additions


def _tcmalloc() -> list[str]:
    """At most one of the installed builds, the minimal one (no profiler) before others."""
    found = [path for pattern in TCMALLOC_PATTERNS for path in sorted(glob.glob(pattern))]
    return sorted(found, key=lambda path: "minimal" not in path)[:1]


def run_engine(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run ``vllm_lookahead.cli.engine_child`` on ``job`` and yield its answers as they come.

    Raises CommandError with the end of the child's log, which is kept out of sight until then,
    when the child fails. The child is gone when the iterator is exhausted or closed.
    """
    command = [sys.executable, "-m", "vllm_lookahead.cli.engine_child", json.dumps(job)]
    environ = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **performance_env()}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as child,
    ):
        assert child.stdout is not None
        try:
            yield from map(json.loads, child.stdout)
        except BaseException:
            child.terminate()
            raise
        if child.wait() != 0:
            raise CommandError(
                f"the engine's process failed (exit code {child.returncode}):\n{tail(log)}"
            )


def tail(log: IO[str]) -> str:
    """The last lines of a log."""
    log.seek(0)
    return "".join(log.readlines()[-LOG_TAIL_LINES:])
