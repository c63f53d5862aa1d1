"""Checkpoints of Flash's shapes with ``--load-format dummy``'s random tensors, written by a process a core."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.flash import write_flash
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.safetensors_header import ITEM_BYTES, LENGTH_BYTES, Entry
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny_config import TinyFormat

SHARD_BYTES = 5 * 10**9
PIECE_BYTES = 64 * 10**6
"""Bytes of tensors that a process makes before it asks for more."""
ALIGNMENT = 8
"""Bytes of the data behind a header."""

Placed = tuple[str, Path, int]
"""A tensor's name, and where its bytes go: file and offset."""


def write_random(directory: Path, format: TinyFormat, layers: int) -> Path:
    """Write Flash's first ``layers`` with random tensors; config.json, at last, says that all is there."""
    made = write_flash(directory / "unfinished", format, layers)
    entries = list(verify_dummy(made).inventory.entries.values())
    work: list[list[Placed]] = []
    for number, shard in enumerate(_filled(entries, SHARD_BYTES)):
        work += _begin_file(directory / f"part-{number:03d}.safetensors", shard)
    processes = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _open, (made,)) as pool:
        list(pool.map(_write, work))
    for file in sorted(made.iterdir(), key=lambda file: file.name == "config.json"):
        file.rename(directory / file.name)
    made.rmdir()
    return directory


def _filled(entries: Iterable[Entry], limit: int) -> Iterator[list[Entry]]:
    """Entries in their order, in lists that end with the one that makes them larger than ``limit``."""
    part: list[Entry] = []
    size = 0
    for entry in entries:
        part.append(entry)
        size += entry.nbytes
        if size > limit:
            yield part
            part, size = [], 0
    if part:
        yield part


def _begin_file(file: Path, entries: Sequence[Entry]) -> list[list[Placed]]:
    """Write the header of a safetensors file; what is left to do, in pieces. Wide numbers come first: none is askew."""
    entries = sorted(entries, key=lambda entry: -ITEM_BYTES[entry.dtype])
    header: dict[str, object] = {}
    end = 0
    for entry in entries:
        offsets = [end, end := end + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with file.open("wb") as output:
        output.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        at = output.tell()
        output.truncate(at + end)
    pieces: list[list[Placed]] = []
    for piece in _filled(entries, PIECE_BYTES):
        pieces.append([])
        for entry in piece:
            pieces[-1].append((entry.name, file, at))
            at += entry.nbytes
    return pieces


_readers: list[CheckpointReader] = []
"""What draws a process's tensors."""


def _open(directory: Path) -> None:
    torch.set_num_threads(1)
    _readers.append(verify_dummy(directory).reader())


def _write(piece: Sequence[Placed]) -> None:
    for name, file, offset in piece:
        data = _readers[0].read(name).contiguous().reshape(-1).view(torch.uint8).numpy()
        with file.open("r+b", buffering=0) as output:
            output.seek(offset)
            left = memoryview(data.data)
            while left:  # a write may take less than all
                left = left[output.write(left) :]
