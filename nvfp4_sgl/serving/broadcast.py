"""Messages from one process to several of the same host, through shared memory.

Without a system call where nobody waits. Who waits spins for :data:`SPIN_SECONDS`, then sleeps, and looks whether the
processes on the other side still run.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SLOTS, SLOT_BYTES = 16, 2**16
"""The writer may be so many slots ahead. A longer message takes several, one after the other."""
LINE_BYTES = 64
"""Counts that different processes write lie so far apart."""
KEY_BYTES = 16
SPIN_SECONDS = 1e-3
"""In a decode step, ranks ask for their requests within less of one another."""
SLEEP_SHARE, LONGEST_SLEEP = 1 / 16, 4e-3
"""A sleep is as long as this share of the time that was waited before, at most so many seconds: a message may come
late by as much."""
LOOK_SECONDS = 0.1
"""How often those who wait look for the other side."""


class ProcessEnded(RuntimeError):
    """A process on the other side has ended."""


class Broadcast:
    """One process's end of a ring of slots, from one writer to all readers, in order.

    The memory holds a key of the writer's, a count of slots that it has filled, a count a reader of slots that it has
    read, and the slots: a word, twice the bytes of this part of a message plus 1 if more parts follow, then the part.

    Args:
        descriptor: of the memory, :func:`memory_bytes` long and zero at first.
        readers: how many there are. reader: which one this is; ``None`` for the writer.

    Attributes:
        others: the processes on the other side.
    """

    def __init__(self, descriptor: int, readers: int, reader: int | None):
        self._bytes = memoryview(mmap.mmap(descriptor, memory_bytes(readers)))
        self._words = self._bytes.cast("q")
        self.key = self._bytes[:KEY_BYTES]
        self.others: Sequence[int] = ()
        counts = [LINE_BYTES * (1 + n) // 8 for n in range(1 + readers)]
        self._filled, self._read = counts[0], counts[1:]
        self._own = counts[0 if reader is None else 1 + reader]
        self._slots = LINE_BYTES * (2 + readers)
        self._passed = 0
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Give ``message`` to all readers; waits while one of them has :data:`SLOTS` before it.

        Raises:
            ProcessEnded: a reader has ended.
        """
        for start in range(0, len(message) or 1, SLOT_BYTES):
            part = message[start : start + SLOT_BYTES]
            self._wait(self._has_room)
            slot = self._slot()
            self._bytes[slot + 8 : slot + 8 + len(part)] = part
            self._words[slot // 8] = 2 * len(part) + (start + SLOT_BYTES < len(message))
            self._pass_slot()

    def receive(self) -> bytes:
        """The next message; waits for it.

        Raises:
            ProcessEnded: the writer has ended.
        """
        parts, more = [], 1
        while more:
            self._wait(self._has_message)
            self._keep_order()
            slot = self._slot()
            size, more = divmod(self._words[slot // 8], 2)
            parts.append(bytes(self._bytes[slot + 8 : slot + 8 + size]))
            self._pass_slot()
        return b"".join(parts)

    def _slot(self) -> int:
        return self._slots + self._passed % SLOTS * (8 + SLOT_BYTES)

    def _has_room(self) -> bool:
        return self._passed - min(self._words[count] for count in self._read) < SLOTS

    def _has_message(self) -> bool:
        return self._words[self._filled] != self._passed

    def _pass_slot(self) -> None:
        """Tell the other side that this one is done with a slot."""
        self._keep_order()
        self._passed += 1
        self._words[self._own] = self._passed

    def _keep_order(self) -> None:
        """Keep loads and stores on their side of this point, on CPUs that reorder them; Python has locks for it."""
        with self._lock:
            pass

    def _wait(self, is_over: Callable[[], bool]) -> None:
        if is_over():
            return
        began = time.monotonic()
        while time.monotonic() - began < SPIN_SECONDS:
            os.sched_yield()
            if is_over():
                return
        look = began + LOOK_SECONDS
        while not is_over():
            now = time.monotonic()
            time.sleep(min((now - began) * SLEEP_SHARE, LONGEST_SLEEP))
            if now > look:
                look += LOOK_SECONDS
                ended = [process for process in self.others if has_ended(process)]
                if ended and not is_over():
                    raise ProcessEnded(f"process {ended[0]}, another rank of this server, has ended")


def memory_bytes(readers: int) -> int:
    """Size of the memory."""
    return LINE_BYTES * (2 + readers) + SLOTS * (8 + SLOT_BYTES)


def has_ended(process: int) -> bool:
    """Whether a process is gone, or has ended and its parent has not noticed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
