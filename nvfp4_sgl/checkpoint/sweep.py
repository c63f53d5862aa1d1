"""Read whole checkpoints: in threads, in bounded memory, with progress and an estimate of what is left."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO, TypeVar

import torch

from nvfp4_sgl.checkpoint.progress import ByteProgress
from nvfp4_sgl.checkpoint.reader import CheckpointReader

RELEASE_BYTES = 64 * 2**20
"""Files are unmapped after this many bytes, so that the pages read do not count as this process's memory."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class Sweep:
    """Counts bytes as they are read, prints progress and closes files.

    Args:
        readers: whose files are let go of.
        total: bytes that will be read.
        what: of the progress lines.
        stream: where these go; stderr unless given.
    """

    def __init__(self, readers: Sequence[CheckpointReader], total: int, what: str, stream: TextIO | None = None):
        self._readers, self._lock, self._held = readers, threading.Lock(), 0
        self._progress = ByteProgress(
            total, lambda line: print(f"{what}: {line}", file=stream or sys.stderr, flush=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes read so far."""
        return self._progress.done

    def add(self, nbytes: int) -> None:
        """Another ``nbytes`` were read and are no longer needed."""
        with self._lock:
            self._held += nbytes
            if self._held >= RELEASE_BYTES:
                self._held = 0
                for reader in self._readers:
                    reader.release()
        self._progress.add(nbytes)

    def run(self, work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
        """``work`` of each item, in order; ``threads`` at once, each with torch on one core."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(threads) as pool:
                yield from pool.map(work, items)
        finally:
            torch.set_num_threads(before)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def row_ranges(rows: int, row_bytes: int, chunk_bytes: int, multiple: int = 1) -> Iterator[slice]:
    """Ranges of ``rows`` rows of about ``chunk_bytes`` each, that begin at multiples of ``multiple``."""
    step = max(chunk_bytes // max(row_bytes, 1) // multiple, 1) * multiple
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
