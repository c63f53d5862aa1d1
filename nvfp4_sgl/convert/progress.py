"""Progress of a conversion: part done and time left."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

ON_TERMINAL, ELSEWHERE = 0.5, 30.0
"""Seconds between two reports."""


class Progress:
    """Prints a line that is written over on a terminal, and one now and then where output goes to a file.

    Args:
        total: work to be done, in any unit.
        stream: where to print.
    """

    def __init__(self, total: int, stream: TextIO | None = None):
        self._total, self._stream = max(total, 1), stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._started = self._reported = time.monotonic()
        self._done = self._bytes = 0
        self._lock = threading.Lock()

    def advance(self, work: int, written: int) -> None:
        """Count ``work`` that is done and bytes that are written; called from any thread."""
        with self._lock:
            self._done += work
            self._bytes += written
            now = time.monotonic()
            if now - self._reported >= (ON_TERMINAL if self._is_terminal else ELSEWHERE):
                self._reported = now
                self._print(now)

    def end(self) -> None:
        """Leave the line on a terminal as it is."""
        if self._is_terminal and self._reported > self._started:
            print(file=self._stream, flush=True)

    def _print(self, now: float) -> None:
        share, elapsed = min(self._done / self._total, 1.0), now - self._started
        left = clock(elapsed / share - elapsed) if share > 0 else "?"
        line = f"{share:6.1%}  {self._bytes / 1e9:.2f} GB written in {clock(elapsed)}, about {left} left"
        print(f"\r{line:<78}" if self._is_terminal else line, end="" if self._is_terminal else "\n", file=self._stream)
        self._stream.flush()


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
