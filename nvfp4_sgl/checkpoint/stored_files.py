"""Access to the bytes of stored tensors: the contract of :class:`.reader.CheckpointReader`'s files, and files mapped
into memory.

Mapped files are what the CPU reads: a whole tensor or a range of rows is a view of the mapping. The mapping is private:
writing to a tensor never reaches the file. What goes to a GPU is read into staging buffers instead
(:mod:`.staged_files`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.safetensors_header import Entry
from nvfp4_sgl.files import became_shorter

DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""The dtypes that verified tensors can have."""


class StoredFiles(Protocol):
    """The files that a reader takes tensors from.

    Attributes:
        is_asynchronous: tensors may arrive later than they are handed out, so that looking at their values waits.
        waited: seconds in which bytes were waited for, as far as is known: not where a mapping's pages are touched.
    """

    is_asynchronous: bool
    waited: float

    def read(self, entry: Entry, rows: slice | None) -> Tensor:
        """A tensor, or a range of its rows: shape and dtype of the file, bit-identical, contiguous.

        Args:
            rows: with both ends, within the tensor.

        Raises:
            CheckpointError: the file became shorter, or cannot be read.
        """
        ...

    def expect(self, places: Sequence[tuple[Entry, slice | None]]) -> None:
        """These tensors, or rows of them, are read soon: a hint, which replaces the one before the last."""
        ...

    def let_go(self, file: Path) -> None:
        """Close ``file``, of which all was read; a later read opens it again."""
        ...

    def release(self) -> None:
        """Close all files and free the buffers, once all copies have arrived."""
        ...


class MappedFiles:
    """Files mapped into memory. Their pages are the system's, and this process's as long as a tensor is used."""

    is_asynchronous, waited = False, 0.0

    def __init__(self) -> None:
        self._mapped: dict[Path, Tensor] = {}

    def read(self, entry: Entry, rows: slice | None) -> Tensor:
        mapped = self._mapped.get(entry.file)
        if mapped is None:
            size = entry.file.stat().st_size
            mapped = torch.from_file(str(entry.file), shared=False, size=size, dtype=torch.uint8)
            self._mapped[entry.file] = mapped
        if entry.offset + entry.nbytes > mapped.numel():
            raise became_shorter(entry.file)
        raw, dtype = mapped[entry.offset : entry.offset + entry.nbytes], DTYPES[entry.dtype]
        if entry.offset % dtype.itemsize:
            raw = raw.clone()  # the format does not promise alignment
        whole = raw.view(dtype).view(entry.shape)
        return whole if rows is None else whole[rows]

    def expect(self, places: Sequence[tuple[Entry, slice | None]]) -> None:
        """Nothing: the system reads ahead where pages of a mapping are used one after another."""

    def let_go(self, file: Path) -> None:
        self._mapped.pop(file, None)

    def release(self) -> None:
        self._mapped.clear()


class ReadFiles:
    """Files read into memory of their own, for a process that must outlive a file that is cut short meanwhile: reading
    such a mapping ends it (SIGBUS)."""

    is_asynchronous, waited = False, 0.0

    def read(self, entry: Entry, rows: slice | None) -> Tensor:
        shape, begin = list(entry.shape), entry.offset
        nbytes = entry.nbytes
        if rows is not None:
            row_bytes = nbytes // shape[0]
            shape[0], begin = rows.stop - rows.start, begin + rows.start * row_bytes
            nbytes = shape[0] * row_bytes
        raw = torch.empty(nbytes, dtype=torch.uint8)
        with entry.file.open("rb", buffering=0) as file:
            file.seek(begin)
            into = raw.numpy().data
            while into:
                count = file.readinto(into)
                if not count:
                    raise became_shorter(entry.file)
                into = into[count:]
        return raw.view(DTYPES[entry.dtype]).view(shape)

    def expect(self, places: Sequence[tuple[Entry, slice | None]]) -> None:
        """Nothing: the system reads ahead."""

    def let_go(self, file: Path) -> None:
        """Nothing is held."""

    def release(self) -> None:
        """Nothing is held."""
