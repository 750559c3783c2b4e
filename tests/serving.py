"""`vllm serve` as a child process on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.engine_options import serve_flags

START_SECONDS = 240
STOP_SECONDS = 30
MODEL_NAME = "tiny"


@dataclass(frozen=True)
class Server:
    """A running server; ``log`` holds what it wrote to stdout and stderr."""

    url: str
    log: Path
    group: int
    """Process group of the server and its engines."""

    @property
    def client(self) -> OpenAI:
        """A client that doesn't retry: a failing request fails the test."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def counters(self) -> dict[str, float]:
        """Samples of ``/metrics`` summed over their labels, by name."""
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0) + sample.value
        return totals

    def wait_until_idle(self) -> None:
        """Return once no request runs or waits.

        Raises:
            TimeoutError: there still is one after 20 seconds.
        """
        for _ in range(100):
            counters = self.counters()
            if not counters["vllm:num_requests_running"] + counters["vllm:num_requests_waiting"]:
                return
            time.sleep(0.2)
        raise TimeoutError("requests still run")


def environment() -> dict[str, str]:
    """The environment in which the command `vllm` runs."""
    # One unbound thread each: two servers that spin on the same cores would take minutes.
    env = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        env.pop(name, None)  # set by conftest.py for engines in the tests' process
    return env


def command(model: Path, *flags: str) -> list[str]:
    """`vllm serve` with this interpreter's vLLM."""
    vllm = Path(sys.executable).with_name("vllm")
    return [str(vllm), "serve", str(model), *serve_flags(), *flags]


def refused(model: Path, *flags: str) -> tuple[int, str]:
    """Exit status and output of a server that doesn't come up."""
    done = subprocess.run(
        command(model, *flags),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_SECONDS,
    )
    return done.returncode, done.stdout


@contextlib.contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[Server]:
    """The tests' server; see `running`."""
    with running(command(model, *flags), environment(), folder / "server.log") as server:
        yield server


@contextlib.contextmanager
def running(
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    *,
    start_seconds: float = START_SECONDS,
) -> Iterator[Server]:
    """The server ``argv`` under the name `MODEL_NAME`, gone with all of its processes at the end.

    Raises:
        RuntimeError: it exits, or isn't healthy in ``start_seconds``; the message has its log.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = ("--host=127.0.0.1", f"--port={port}", f"--served-model-name={MODEL_NAME}")
    with log.open("w") as file:
        # A session of its own makes one process group of the server and its engines.
        process = subprocess.Popen(
            [*argv, *address],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log, process.pid)
    try:
        _wait_until_healthy(server, process, start_seconds)
        yield server
    finally:
        _stop_group(process)


def _wait_until_healthy(
    server: Server, process: subprocess.Popen[bytes], start_seconds: float
) -> None:
    deadline = time.monotonic() + start_seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health").is_success:
                return
        time.sleep(0.5)
    raise RuntimeError(f"status {process.poll()} without health:\n{server.log.read_text()}")


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        for _ in range(10 * STOP_SECONDS):
            process.poll()  # reaps the server, which else would stay in its group
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_SECONDS)
