"""Checks the log of a server's start, from its first line to the one that says that it is ready."""

from __future__ import annotations

import re
import time

from tests.support.server import Server

MOST_LINES, MOST_CHARACTERS = 40, 500
STAGES = ("config", "memory", "weights", "warm-up", "boundaries", "scheduler", "ready")
ACCESS = re.compile(r'INFO: +[\d.:]+ - "')
"""Lines of requests, such as those that ask whether it is ready."""
WARNING = re.compile(r"warn|fail|error|fallback|fall back|roll back|disable|fewer than|not supported", re.IGNORECASE)

KNOWN_WARNINGS = (
    "UserWarning: 'python -m sglang.launch_server' is still supported",
    "warnings.warn(",  # the source line that Python shows below
    "Fail to set RLIMIT_NOFILE",  # where the system allows fewer files
    "KV pool holds",
)


def wait_for_last_stage(server: Server, seconds: float = 30) -> None:
    """Wait until the log of a server that answers says ``ready``, which it does a moment later."""
    deadline = time.monotonic() + seconds
    while "nvfp4_sgl: ready:" not in server.text() and time.monotonic() < deadline:
        time.sleep(0.1)


def check_start(server: Server) -> None:
    """Number and length of lines, warnings, and the order of the stages, of which ``ready`` comes when it is so."""
    wait_for_last_stage(server)
    before, ready, _ = server.text().partition("nvfp4_sgl: ready:")
    assert ready, server.text()
    lines = [line for line in before.splitlines() if not ACCESS.search(line)]
    assert len(lines) <= MOST_LINES, f"{len(lines)} lines:\n" + "\n".join(lines)
    assert not [line for line in lines if len(line) > MOST_CHARACTERS]
    warnings = [line for line in lines if WARNING.search(line)]
    assert not [line for line in warnings if not any(known in line for known in KNOWN_WARNINGS)]
    stages = re.findall(r"\] nvfp4_sgl: ([a-z-]+):", before)
    assert tuple(dict.fromkeys(stages)) == STAGES[:-1], stages
    assert '"GET /health HTTP/1.1" 200' not in before.rpartition("fired up")[0]
