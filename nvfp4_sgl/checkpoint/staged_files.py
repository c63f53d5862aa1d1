"""Stored tensors on a GPU: read by threads into pinned buffers, and copied from there while the next are read.

A tensor is handed out when its copy is enqueued, not when it has arrived: the caller enqueues its own work on it, and
requests the next. Experts, all but a few percent of Flash's bytes, are announced two batches ahead
(:meth:`StagedFiles.expect`) and are in memory when they are requested; the rest is read on request. So nothing waits
for anything but bytes: a buffer is filled again when its copies are done, and announced tensors in it that nobody
requested are dropped. Copies go to the current stream, and their users follow there. A stream of their own would gain
nothing: copies and their users together take less time than reading.

Files are read, not mapped: threads do it while Python goes on, and no page ever counts as this process's. On an EPYC
with nested paging both copy 4 to 5 GB a CPU second out of the page cache. In a matrix that ranks split by columns, each
page holds columns of every rank: whole rows are read, and cut on the GPU.

Beside that, the system is told which bytes come behind, so that a disk reads ahead. Nothing is dropped from the page
cache: another rank may be about to read it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.safetensors_header import Entry
from nvfp4_sgl.checkpoint.stored_files import DTYPES
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.files import became_shorter

EXPECTED_BYTES = 128 << 20
"""Size of each of the two buffers for expected tensors. Eight experts of Flash fit in one."""
BUFFER_BYTES = 32 << 20
"""Size of each of the two buffers for all other tensors."""
STAGING_BYTES = 2 * (EXPECTED_BYTES + BUFFER_BYTES)
"""Pinned memory of a rank, 320 MiB, whatever is read."""
ALIGNMENT = 64
"""Tensors in a buffer begin at multiples of this, a cache line, in bytes."""
THREADS = 4
"""Threads that read files."""
PART_BYTES = 1 << 20
"""A tensor that nobody expected is read by several threads if it is larger than this. To hand less over to a thread
would take longer than to read it."""
AHEAD_BYTES = 256 << 20
"""So far behind the bytes that are read, the system is told to read ahead from the disk."""
ADVISED_BYTES = 32 << 20
"""The system is told in pieces of this size, once for each piece."""


_Place: TypeAlias = "tuple[str, tuple[int, int] | None]"
"""Name of a tensor, and a range of its rows."""


class Mark(Protocol):
    """A point in a device's queue of work."""

    def synchronize(self) -> None:
        """Wait until the device has reached the point."""
        ...


@dataclass(eq=False)
class _Buffer:
    """Pinned memory that is filled from its beginning, and again once all copies out of it are done.

    Attributes:
        copied: the place behind the last copy out of it.
        expected: pieces in it that were not asked for yet.
    """

    data: Tensor
    used: int = 0
    copied: Mark | None = None
    expected: int = 0

    def take(self, nbytes: int) -> Tensor | None:
        """The next ``nbytes``; ``None`` if there is no room."""
        start, end = self.used, self.used + nbytes
        if end > len(self.data):
            return None
        self.used = -(-end // ALIGNMENT) * ALIGNMENT
        return self.data[start:end]

    def empty(self) -> None:
        """Wait for the copies, and begin again."""
        # Here, and not in a thread that fills it: CUDA would make a context on that thread's device, the first GPU.
        if self.copied is not None:
            self.copied.synchronize()
        self.used, self.copied, self.expected = 0, None, 0


@dataclass
class _Expected:
    buffer: _Buffer
    staged: Tensor
    filled: Future[None]


class _File:
    """An open file, and the pieces that were announced to the system."""

    def __init__(self, file: Path):
        try:
            self.descriptor = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
        self.file, self._advised = file, set[int]()

    def fill(self, staged: Tensor, offset: int) -> None:
        """Read as many bytes as ``staged`` has."""
        left: memoryview = staged.numpy().data
        while left:
            try:
                count = os.preadv(self.descriptor, [left], offset)
            except OSError as error:
                raise CheckpointError(f"{self.file}: cannot be read ({error.strerror})") from error
            if not count:
                raise became_shorter(self.file)
            left, offset = left[count:], offset + count

    def unadvised(self, begin: int, end: int) -> Sequence[int]:
        """Pieces from byte ``begin`` to ``end`` that were not announced to the system yet; they count as announced."""
        pieces = [n for n in range(begin // ADVISED_BYTES, -(-end // ADVISED_BYTES)) if n not in self._advised]
        self._advised.update(pieces)
        return pieces

    def advise(self, piece: int) -> None:
        """Announce a piece to the system. This is a hint: without it reading is only slower."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.descriptor, piece * ADVISED_BYTES, ADVISED_BYTES, os.POSIX_FADV_WILLNEED)

    def __del__(self) -> None:
        # Not earlier: a thread that advises may still hold it.
        with contextlib.suppress(AttributeError):
            os.close(self.descriptor)


class StagedFiles:
    """Reads to ``device``; docstrings of :class:`.stored_files.StoredFiles` apply.

    Args:
        device: a CUDA device; or the CPU, where copies are made at once.
    """

    is_asynchronous = True

    def __init__(self, device: torch.device):
        self._device, self.waited = device, 0.0
        self._open: dict[Path, _File] = {}
        self._expected: dict[_Place, _Expected] = {}
        self._for_expected: list[_Buffer] = []
        self._for_others: list[_Buffer] = []
        self._pool: ThreadPoolExecutor | None = None

    def read(self, entry: Entry, rows: slice | None) -> Tensor:
        offset, nbytes = _span(entry, rows)
        out = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        expected = self._expected.pop(_place(entry, rows), None)
        begun = time.perf_counter()
        if expected is not None:
            expected.filled.result()  # raises what the thread has raised
            self._copy(out, expected.staged)
            expected.buffer.expected -= 1
            if not expected.buffer.expected:
                expected.buffer.copied = self._mark()
        else:
            file = self._opened(entry.file)
            for start in range(0, nbytes, BUFFER_BYTES):
                target = out[start : start + BUFFER_BYTES]
                staged = self._room(target.numel())
                self._fill(file, staged, offset + start)
                self._copy(target, staged)
        self.waited += time.perf_counter() - begun
        shape = entry.shape if rows is None else (rows.stop - rows.start, *entry.shape[1:])
        return out.view(DTYPES[entry.dtype]).view(shape)

    def expect(self, places: Sequence[tuple[Entry, slice | None]]) -> None:
        """Read these tensors ahead, as many as one buffer holds."""
        buffers = self._for_expected = self._for_expected or self._allocate(EXPECTED_BYTES)
        buffers.append(buffer := buffers.pop(0))
        for place, piece in list(self._expected.items()):
            if piece.buffer is buffer:  # nobody has asked for it
                del self._expected[place]
                if not piece.filled.cancel():
                    piece.filled.exception()  # waits
        if buffer.expected:
            buffer.copied = self._mark()
        buffer.empty()
        for entry, rows in places:
            offset, nbytes = _span(entry, rows)
            staged = buffer.take(nbytes)
            if staged is None:
                return
            file = self._opened(entry.file)
            self._advise(file, offset, nbytes)
            filled = self._threads().submit(file.fill, staged, offset)
            self._expected[_place(entry, rows)] = _Expected(buffer, staged, filled)
            buffer.expected += 1

    def let_go(self, file: Path) -> None:
        self._open.pop(file, None)

    def release(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        if (mark := self._mark()) is not None:
            mark.synchronize()  # what was read is on the device, for users on other streams, too
        self._expected.clear()
        self._open.clear()
        self._for_expected, self._for_others = [], []

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "read")
        return self._pool

    def _opened(self, path: Path) -> _File:
        file = self._open.get(path)
        if file is None:
            file = self._open[path] = _File(path)
        return file

    def _allocate(self, nbytes: int) -> list[_Buffer]:
        is_pinned = self._device.type == "cuda"
        memory = (torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned) for _ in range(2))
        return [_Buffer(data) for data in memory]

    def _room(self, nbytes: int) -> Tensor:
        """``nbytes`` of a buffer, that nothing is copied from any more. The buffer in use is the first."""
        buffers = self._for_others = self._for_others or self._allocate(BUFFER_BYTES)
        staged = buffers[0].take(nbytes)
        if staged is None:
            buffers[0].copied = self._mark()
            buffers.append(buffers.pop(0))
            buffers[0].empty()
            staged = buffers[0].take(nbytes)
            assert staged is not None, nbytes
        return staged

    def _fill(self, file: _File, staged: Tensor, offset: int) -> None:
        """Read bytes of ``file`` from ``offset`` on."""
        nbytes = staged.numel()
        self._advise(file, offset, nbytes)
        if nbytes <= PART_BYTES:
            file.fill(staged, offset)
            return
        step = -(-nbytes // THREADS)
        parts = [
            self._threads().submit(file.fill, staged[start : start + step], offset + start)
            for start in range(0, nbytes, step)
        ]
        wait(parts)
        for part in parts:
            part.result()

    def _advise(self, file: _File, offset: int, nbytes: int) -> None:
        for piece in file.unadvised(offset, offset + nbytes + AHEAD_BYTES):
            self._threads().submit(file.advise, piece)

    def _copy(self, target: Tensor, staged: Tensor) -> None:
        target.copy_(staged, non_blocking=True)

    def _mark(self) -> Mark | None:
        """The point after all copies so far; ``None`` where copies are made at once."""
        if self._device.type == "cuda":
            return torch.cuda.current_stream(self._device).record_event()
        return None


def _place(entry: Entry, rows: slice | None) -> _Place:
    return entry.name, None if rows is None else (rows.start, rows.stop)


def _span(entry: Entry, rows: slice | None) -> tuple[int, int]:
    """Offset and number of the bytes of a tensor or of a range of its rows."""
    if rows is None:
        return entry.offset, entry.nbytes
    row_bytes = entry.nbytes // entry.shape[0]
    return entry.offset + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes
