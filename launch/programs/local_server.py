"""One SGLang server on this machine, as launch/demo and launch/bench_serving use it: start, progress, stop."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 600
"""Ample: a busy machine, and the first start also compiles bytecode."""
PROGRESS_SECONDS = 5
LOG_TAIL_LINES = 40
STAGE = "] nvfp4_sgl: "
"""What stands before a stage's name in the log, behind the time."""
PORTS = (10_000, 20_000)
"""Ports of servers whose caller names none: below 22,000, where SGLang's for ranks begin, and 32,768, where Linux's for
outgoing connections do."""


class ServerError(Exception):
    """The server did not start, or ended early; the message holds the log's last lines."""


@contextmanager
def server(
    checkpoint: Path,
    log: Path,
    port: int = 0,
    arguments: Sequence[str] = (),
    *,
    seconds: float = START_SECONDS,
    began: Callable[[int], None] = lambda process: None,
    program: Sequence[str] = ("-m", "sglang.launch_server"),
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """A ready SGLang server on ``checkpoint``; yields its address, stops it by its own process group.

    Args:
        seconds: limit of its start. began: told the id of its first process, which leads the session of all.
        program: what Python runs: SGLang's own, or one that calls it with the arguments behind.
        environment: added to this process's.
    """
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, *program, "--model-path", str(checkpoint)]
    command += ["--port", str(port), *arguments]
    print(f"== server: python {' '.join(command[1:])}", flush=True)
    started = time.monotonic()
    # The terminal's Ctrl-C reaches this process alone; it then stops the server's own group.
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    try:
        began(process.pid)
        wait_until_ready(process, url, log, started, seconds)
        yield url
    except ServerError as error:
        raise ServerError(f"{error}\n--- last lines of {log.name}\n{tail(log)}") from error
    finally:
        stopping = time.monotonic()
        stop(process)
        print(f"== server stopped in {time.monotonic() - stopping:.1f} s")


def free_port() -> int:
    """A TCP port that nobody listens on, and that the system gives no outgoing connection.

    One from the system's own range, which ``bind`` to 0 takes, may be another connection's by the time that the server
    listens there, half a minute later.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path, started: float, seconds: float) -> None:
    """Return when ``/health`` answers 200; :class:`ServerError` if the server ends or takes too long.

    Meanwhile each stage of the start is shown when the log says it.
    """
    shown, seen = started, 0
    while True:
        status = process.poll()
        now = time.monotonic()
        if status is not None:
            raise ServerError(f"the server ended with status {status} before it was ready")
        if now - started > seconds:
            raise ServerError(f"the server was not ready after {seconds:.0f} s")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        found = stages(log)
        for words in found[seen:] or ["(no further stage yet)"] * (now - shown >= PROGRESS_SECONDS):
            shown = now
            print(f"   {now - started:3.0f} s  {words[:100]}", flush=True)
        seen = len(found)
        time.sleep(0.5)


def stages(log: Path) -> list[str]:
    """The start's stages as the log says them, a line each."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.partition(STAGE)[2] for line in lines if STAGE in line]


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([line for line in text if line.strip()][-lines:])


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server: politely, then its whole process group, so that no worker stays behind."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            print("   the server did not end on SIGTERM; killing its process group", file=sys.stderr)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nobody left
    process.wait()
