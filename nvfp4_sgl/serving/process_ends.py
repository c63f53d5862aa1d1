"""Finds a server's failed processes, including those that are still ending."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

ENDING_SECONDS = 10.0
"""Most seconds to wait for processes that are ending. The connection to a killed rank closes, and the other rank fails
of it, before the killed one has an exit code."""
POLL_SECONDS = 0.05
EXITING = 0x4
"""``PF_EXITING``, in the flags of ``/proc/PID/stat``."""


class Process(Protocol):
    """The part of ``multiprocessing.Process`` that is used here."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...


def failed(processes: Sequence[tuple[str, Process]], seconds: float = ENDING_SECONDS) -> list[tuple[str, int]]:
    """Name and exit code of those that have failed, once none is ending any more or ``seconds`` have passed."""
    deadline = time.monotonic() + seconds
    while any(is_ending(process) for _, process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return [(name, process.exitcode) for name, process in processes if process.exitcode]


def is_ending(process: Process) -> bool:
    """Whether it runs nothing of its program any more, but has no exit code yet."""
    if process.exitcode is not None:
        return False
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] == "Z" or bool(int(fields[6]) & EXITING)
