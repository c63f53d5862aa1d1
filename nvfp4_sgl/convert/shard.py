"""Write one safetensors file of a conversion, tensor by tensor."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.checksums import checksum, stored_bytes
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.safetensors_header import ITEM_BYTES, LENGTH_BYTES, Entry
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.convert.folder import Folder
from nvfp4_sgl.convert.matrix import MatrixConverter
from nvfp4_sgl.convert.options import Options
from nvfp4_sgl.convert.plan import Copy, Invert, Quantise, Shard, Step, WrittenTensor
from nvfp4_sgl.convert.progress import Progress
from nvfp4_sgl.convert.tally import Tally

READ_WHOLE = 64 << 20
"""Larger tensors are looked at in ranges of rows."""


class Stopped(Exception):
    """Raised in a thread when another file failed, or on Ctrl-C."""


class ShardWriter:
    """Writes files of a conversion; used by several threads at once.

    Args:
        stop: set to end all threads at their next tensor.
    """

    def __init__(
        self,
        source: Verified,
        folder: Folder,
        options: Options,
        *,
        device: torch.device,
        progress: Progress,
        stop: threading.Event,
    ):
        self._source, self._folder, self._options = source, folder, options
        self._device, self._progress, self._stop = device, progress, stop

    def write(self, shard: Shard) -> None:
        """Write, and record checksums and losses.

        Raises:
            CheckpointError: a damaged value in the source, or a file that cannot be written.
            Stopped: as asked.
        """
        tally, checksums = Tally(), {}
        header, offsets = _layout(shard.outputs)
        with self._folder.file(self._folder.directory / shard.file) as stream:
            stream.write(header)
            for step in shard.steps:
                if self._stop.is_set():
                    raise Stopped
                written = 0
                # A reader for each step: with it go the pages of the source that it mapped.
                reader = CheckpointReader(self._source.inventory)
                for output, pieces in self._tensors(step, reader, tally):
                    checksums[output.name] = _write(stream, len(header) + offsets[output.name], output, pieces)
                    written += output.nbytes
                self._progress.advance(step.cost, written)
        sums = {name: checksums[name] for name in offsets}
        self._folder.record(shard.file, {"tensors": sums, "tally": tally.as_json()})

    def _tensors(
        self, step: Step, reader: CheckpointReader, tally: Tally
    ) -> Iterator[tuple[WrittenTensor, Iterable[bytes | memoryview]]]:
        match step:
            case Copy():
                if step.is_checked:
                    _look_at(step.entry, step.original, reader)
                yield step.output, stored_bytes(step.entry)
            case Invert():
                scalar = reader.read(step.original).reshape(()).reciprocal()
                yield step.output, [_bytes_of(scalar)]
            case Quantise():
                matrix, lost = MatrixConverter(reader, self._device, self._options).convert(step)
                tally.classes[step.kind].add(lost)
                parts = (matrix.packed, matrix.block_scale, matrix.global_scale)
                for output, part in zip(step.outputs, parts, strict=True):
                    yield output, [_bytes_of(part)]


def is_whole(directory: Path, shard: Shard, sums: Mapping[str, object]) -> bool:
    """Whether a file is what was written: its header, its size, and the checksum of every tensor. Reads all of it.

    Args:
        sums: the checksums that were recorded, by tensor.
    """
    file = directory / shard.file
    header, offsets = _layout(shard.outputs)
    nbytes = sum(output.nbytes for output in shard.outputs)
    try:
        with file.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size != len(header) + nbytes or stream.read(len(header)) != header:
                return False
    except OSError:
        return False
    entries = (
        Entry(output.name, file, output.dtype, output.shape, len(header) + offsets[output.name], output.nbytes)
        for output in shard.outputs
    )
    return all(sums.get(entry.name) == checksum(entry) for entry in entries)


def _layout(outputs: list[WrittenTensor]) -> tuple[bytes, dict[str, int]]:
    """Length and header of the file, and where each tensor begins after them.

    Tensors of larger elements come first, so that each is aligned to its own.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, position = {}, 0
    for output in sorted(outputs, key=lambda output: -ITEM_BYTES[output.dtype]):
        offsets[output.name], end = position, position + output.nbytes
        fields[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, offsets


def _write(stream: BinaryIO, position: int, output: WrittenTensor, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a tensor where it belongs; returns its checksum."""
    digest, written = hashlib.sha256(), 0
    stream.seek(position)
    for piece in pieces:
        digest.update(piece)
        stream.write(piece)
        written += len(piece)
    assert written == output.nbytes, (output, written)
    return digest.hexdigest()


def _look_at(entry: Entry, name: str, reader: CheckpointReader) -> None:
    """Refuse invalid values before they are written."""
    if entry.nbytes <= READ_WHOLE or len(entry.shape) != 2:
        reader.read(name)
        return
    height = max(READ_WHOLE * entry.shape[0] // entry.nbytes, 1)
    for start in range(0, entry.shape[0], height):
        reader.read(name, rows=slice(start, min(start + height, entry.shape[0])))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
