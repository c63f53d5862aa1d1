"""Stored tensors on a GPU: read into a few pinned buffers, from which they are copied while the next are read.

A tensor is handed out when its copy is enqueued, not when it has arrived: whoever asks goes on to enqueue what becomes
of it, and asks for the next. So the host reads ahead of the GPU by as much as the buffers hold, without knowing what
will be asked for. A buffer is filled again once its copies have been made; until then the host waits. Copies go to the
stream that is current: what uses them comes after them on it, and at a few GB/s from files they take a tenth of the
time that reading takes, so that a stream of their own would gain nothing.

Files are read, not mapped. Reading copies out of the page cache as fast as a copy of a mapping does, several threads at
once make it faster, and no page ever counts as this process's. In a matrix that ranks split by columns, each page holds
columns of every rank: whole rows are read, and cut on the GPU.

Beside that, the system is told which bytes will come soon, so that a disk reads ahead. Nothing is dropped from the page
cache: another rank may be about to read it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.safetensors_header import Entry
from nvfp4_sgl.checkpoint.stored_files import DTYPES, became_shorter
from nvfp4_sgl.errors import CheckpointError

BUFFERS, BUFFER_BYTES = 4, 32 << 20
"""Staging memory of a rank: 128 MiB, about nine experts of Flash."""
ALIGNMENT = 64
"""Of what lies in a buffer, in bytes: a cache line."""
THREADS = 4
"""That read a piece together."""
PART_BYTES = 1 << 20
"""Pieces up to this are read by one thread: handing work to others takes as long as copying about 0.3 MB."""
AHEAD_BYTES = 256 << 20
"""What the system is told to get from the disk behind the bytes that are read."""
ADVISED_BYTES = 32 << 20
"""In pieces of this size; each is told once."""


class Mark(Protocol):
    """A place in the work that a device has been given."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""
        ...


@dataclass
class Took:
    """What reading took.

    Attributes:
        nbytes: read from files: of a range of columns, the whole rows.
        reading: seconds in which files were read. waiting: seconds in which the device was waited for.
    """

    nbytes: int = 0
    reading: float = 0.0
    waiting: float = 0.0


@dataclass
class _Buffer:
    data: Tensor
    used: int = 0
    copied: Mark | None = None


class _File:
    """An open file, and the pieces of it of which the system was told."""

    def __init__(self, file: Path):
        try:
            self.descriptor = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
        self.file, self._advised = file, set[int]()

    def fill(self, target: memoryview, offset: int) -> None:
        """Read as many bytes as ``target`` has."""
        while target:
            try:
                count = os.preadv(self.descriptor, [target], offset)
            except OSError as error:
                raise CheckpointError(f"{self.file}: cannot be read ({error.strerror})") from error
            if not count:
                raise became_shorter(self.file)
            target, offset = target[count:], offset + count

    def unadvised(self, begin: int, end: int) -> Sequence[int]:
        """Pieces from byte ``begin`` to ``end`` of which the system was not told; from now on it was."""
        pieces = [n for n in range(begin // ADVISED_BYTES, -(-end // ADVISED_BYTES)) if n not in self._advised]
        self._advised.update(pieces)
        return pieces

    def advise(self, piece: int) -> None:
        """Tell the system. It is a hint: where it is not taken, reading is slower and nothing else."""
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

    Attributes:
        took: so far.
    """

    is_asynchronous = True

    def __init__(self, device: torch.device):
        self._device, self.took = device, Took()
        self._open: dict[Path, _File] = {}
        self._buffers: list[_Buffer] = []
        self._pool: ThreadPoolExecutor | None = None

    def read(self, entry: Entry, rows: slice | None) -> Tensor:
        shape, offset, nbytes = entry.shape, entry.offset, entry.nbytes
        if rows is not None:
            row_bytes = nbytes // shape[0]
            offset += rows.start * row_bytes
            nbytes = (rows.stop - rows.start) * row_bytes
            shape = (rows.stop - rows.start, *shape[1:])
        out = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        file = self._opened(entry.file)
        for start in range(0, nbytes, BUFFER_BYTES):
            target = out[start : start + BUFFER_BYTES]
            staged = self._room(target.numel())
            self._fill(file, staged, offset + start)
            self._copy(target, staged)
        return out.view(DTYPES[entry.dtype]).view(shape)

    def let_go(self, file: Path) -> None:
        self._open.pop(file, None)

    def release(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None
        self._open.clear()
        self._buffers.clear()  # torch keeps pinned memory until copies out of it are done

    def _opened(self, path: Path) -> _File:
        file = self._open.get(path)
        if file is None:
            file = self._open[path] = _File(path)
        return file

    def _room(self, nbytes: int) -> Tensor:
        """``nbytes`` of a buffer, that nothing is copied from any more. The buffer in use is the first."""
        if not self._buffers:
            pinned = self._device.type == "cuda"
            memory = torch.empty(BUFFERS, BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self._buffers = [_Buffer(data) for data in memory]
        buffer = self._buffers[0]
        if buffer.used + nbytes > BUFFER_BYTES:
            buffer.copied = self._mark()
            self._buffers.append(self._buffers.pop(0))
            buffer = self._buffers[0]
            if buffer.copied is not None:
                begun = time.perf_counter()
                buffer.copied.synchronize()
                self.took.waiting += time.perf_counter() - begun
            buffer.used = 0
        start, end = buffer.used, buffer.used + nbytes
        buffer.used = -(-end // ALIGNMENT) * ALIGNMENT
        return buffer.data[start:end]

    def _fill(self, file: _File, staged: Tensor, offset: int) -> None:
        """Read bytes of ``file`` from ``offset`` on; have the system get those behind them."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "read")
        begun, nbytes = time.perf_counter(), staged.numel()
        for piece in file.unadvised(offset, offset + nbytes + AHEAD_BYTES):
            self._pool.submit(file.advise, piece)
        view: memoryview = staged.numpy().data
        if nbytes <= PART_BYTES:
            file.fill(view, offset)
        else:
            step = -(-nbytes // THREADS)
            starts = range(0, nbytes, step)
            # Taking the results raises what a thread has raised.
            list(self._pool.map(lambda start: file.fill(view[start : start + step], offset + start), starts))
        self.took.reading += time.perf_counter() - begun
        self.took.nbytes += nbytes

    def _copy(self, target: Tensor, staged: Tensor) -> None:
        target.copy_(staged, non_blocking=True)

    def _mark(self) -> Mark | None:
        """The place behind all copies so far; ``None`` where they are made at once."""
        if self._device.type == "cuda":
            return torch.cuda.current_stream(self._device).record_event()
        return None
