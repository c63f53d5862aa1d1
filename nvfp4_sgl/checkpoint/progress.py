"""Lines of progress of a job over a checkpoint's bytes: part done, rate, time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

QUIET_SECONDS, PERIOD_SECONDS = 5.0, 5.0
"""The first line is said when the work has taken this long, further ones this often."""


class ByteProgress:
    """Counts bytes, from any thread.

    Args:
        total: bytes in all.
        say: takes a line.
    """

    def __init__(self, total: int, say: Callable[[str], None]):
        self._total, self._say = total, say
        self._lock = threading.Lock()
        self.done = 0
        self._started = time.monotonic()
        self._next_line = self._started + QUIET_SECONDS

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` more as done."""
        with self._lock:
            self.done += nbytes
            now = time.monotonic()
            if now >= self._next_line:
                self._next_line = now + PERIOD_SECONDS
                self._say(self._line(now - self._started))

    def _line(self, seconds: float) -> str:
        rate = self.done / seconds
        left = max(self._total - self.done, 0) / rate
        return (
            f"{self.done / 1e9:.1f} of {self._total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, about {duration(left)} left"
        )


def duration(seconds: float) -> str:
    """``seconds`` in words."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
