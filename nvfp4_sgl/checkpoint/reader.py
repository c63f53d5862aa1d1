"""Hand out a verified checkpoint's tensors bit for bit, and check their values on the way.

Files are mapped into memory; a whole tensor or a range of rows is a view of the mapping, a range of columns a copy.
The mapping is private: writing to a tensor never reaches the file.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.inventory import SHOWN, Inventory
from nvfp4_sgl.checkpoint.names import MTP_PREFIX, Storage
from nvfp4_sgl.checkpoint.safetensors_header import Entry
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.formats import fp8_block, nvfp4
from nvfp4_sgl.formats.fp8_block import Fp8BlockTensor
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor

__all__ = ["CheckpointReader", "Storage"]

DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""The dtypes that verified tensors can have."""


class CheckpointReader:
    """Reads tensors, or the part of each that a rank needs, and remembers which.

    Args:
        inventory: verified (:meth:`Inventory.verify`).
    """

    def __init__(self, inventory: Inventory):
        if inventory.config is None:
            raise CheckpointError(f"{inventory.directory}: not verified; call Inventory.verify before reading")
        self._inventory, self._config = inventory, inventory.config
        self._files: dict[Path, Tensor] = {}
        self._read: set[str] = set()

    def storage(self, stem: str) -> Storage:
        """Format that the matrix ``stem`` is stored in."""
        return self._inventory.storage(stem)

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """Tensor ``name`` as stored: shape and dtype of the file (packed FP4 as uint8), bit-identical.

        Args:
            name: full name (``layers.0.attn.wq_a.weight``).
            rows, cols: ranges of the first and second dimension, in stored elements, step 1.

        Raises:
            CheckpointError: there is no such tensor, the range does not fit, or the part that is read holds a value
                that no checkpoint may hold: NaN or infinity; a NaN or negative block scale; a scalar scale that is
                not finite and positive; an expert id out of range.
        """
        entry = self._entry(name)
        tensor = self._map(entry)
        part = tensor
        for dim, extent in ((0, rows), (1, cols)):
            if extent is not None:
                start, stop = bounds(entry, name, dim, extent)
                part = part.narrow(dim, start, stop - start)
        if cols is not None:
            part = part.contiguous()
        self._check_values(entry, name, part, rows, cols)
        self._read.add(name)
        return part

    def read_plain(self, name: str, rows: slice | None = None) -> Tensor:
        """Like :meth:`read`, but the tensor must be BF16 or F32."""
        entry = self._entry(name)
        if entry.dtype not in ("BF16", "F32"):
            raise CheckpointError(f"tensor '{name}' in {entry.file}: expected BF16 or F32, found {entry.dtype}")
        return self.read(name, rows=rows)

    def read_nvfp4(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> NvFp4Tensor:
        """The NVFP4 matrix ``stem``, or a part: ``rows`` and ``cols`` count logical elements, ``cols`` whole blocks."""
        self._require(stem, Storage.NVFP4)
        global_scale = self.read(f"{stem}.weight_scale_2").reshape(())
        return NvFp4Tensor(
            packed=self.read(f"{stem}.weight", rows, self._coarser(stem, cols, nvfp4.BLOCK, 2)),
            block_scale=self.read(f"{stem}.weight_scale", rows, self._coarser(stem, cols, nvfp4.BLOCK, nvfp4.BLOCK)),
            global_scale=global_scale,
        )

    def read_fp8(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """The FP8 128×128 matrix ``stem``, or any part, dequantised: fp32, exact."""
        self._require(stem, Storage.FP8)
        entry = self._entry(f"{stem}.weight")
        n, k = entry.shape
        row = slice(*bounds(entry, entry.name, 0, rows or slice(None)))
        col = slice(*bounds(entry, entry.name, 1, cols or slice(None)))
        # Whole blocks are read, so that scales and values keep to the same grid; the edges are cut afterwards.
        outer_rows, outer_cols = _whole_blocks(row, n), _whole_blocks(col, k)
        part = Fp8BlockTensor(
            self.read(f"{stem}.weight", outer_rows, outer_cols),
            self.read(
                f"{stem}.scale",
                _ceil_divide(outer_rows, fp8_block.BLOCK),
                _ceil_divide(outer_cols, fp8_block.BLOCK),
            ),
        ).dequantize()
        r, c = row.start - outer_rows.start, col.start - outer_cols.start
        return part[r : r + row.stop - row.start, c : c + col.stop - col.start]

    def finish(self) -> None:
        """Demand that every tensor of the decoder was read, in whole or in part; release the files.

        ``input_scale`` need not be read: it is a calibration constant that the dynamic recipe does without.
        """
        unread = [
            f"'{name}' in {entry.file.name}"
            for name, entry in self._inventory.entries.items()
            if name not in self._read and not name.startswith(MTP_PREFIX) and not name.endswith(".input_scale")
        ]
        if unread:
            more = f" and {len(unread) - SHOWN} more" if len(unread) > SHOWN else ""
            raise CheckpointError(
                f"{self._inventory.directory}: {len(unread)} tensors were never read:"
                f" {', '.join(unread[:SHOWN])}{more}; the model does not use its whole checkpoint"
            )
        self._files.clear()

    def _entry(self, name: str) -> Entry:
        entry = self._inventory.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._inventory.directory}: tensor '{name}' is missing")
        return entry

    def _map(self, entry: Entry) -> Tensor:
        mapped = self._files.get(entry.file)
        if mapped is None:
            size = entry.file.stat().st_size
            mapped = torch.from_file(str(entry.file), shared=False, size=size, dtype=torch.uint8)
            self._files[entry.file] = mapped
        if entry.offset + entry.nbytes > mapped.numel():
            raise CheckpointError(f"{entry.file}: became shorter while it was read")
        raw, dtype = mapped[entry.offset : entry.offset + entry.nbytes], DTYPES[entry.dtype]
        if entry.offset % dtype.itemsize:
            raw = raw.clone()  # the format does not promise alignment
        return raw.view(dtype).view(entry.shape)

    def _require(self, stem: str, storage: Storage) -> None:
        found = self.storage(stem)
        if found is not storage:
            raise CheckpointError(f"tensor '{stem}.weight': expected {storage.value}, found {found.value}")

    def _coarser(self, stem: str, cols: slice | None, multiple: int, unit: int) -> slice | None:
        if cols is None:
            return None
        start, stop = cols.start or 0, cols.stop
        if stop is None:
            stop = self._entry(f"{stem}.weight").shape[1] * 2
        if start % multiple or stop % multiple or cols.step not in (None, 1):
            raise CheckpointError(
                f"tensor '{stem}.weight': columns {start}:{stop} are not whole blocks of {multiple};"
                " choose a tensor-parallel size that keeps blocks whole"
            )
        return slice(start // unit, stop // unit)

    def _check_values(self, entry: Entry, name: str, part: Tensor, rows: slice | None, cols: slice | None) -> None:
        bad, expected = self._invalid(entry, name, part)
        if bad is None or not bool(bad.any()):
            return
        index = bad.nonzero()[0].tolist()
        value = part[tuple(index)]
        for dim, extent in ((0, rows), (1, cols)):
            if extent is not None:
                index[dim] += extent.start or 0
        raise CheckpointError(
            f"tensor '{name}' in {entry.file}: expected {expected}, found {value.float().item()} at index {index}"
            f" ({int(bad.sum())} such values); the file is damaged or was exported wrongly"
        )

    def _invalid(self, entry: Entry, name: str, part: Tensor) -> tuple[Tensor | None, str]:
        """Where ``part`` holds what it must not, and what was expected."""
        if name.endswith((".weight_scale_2", ".input_scale")):
            # Beyond these the largest value or a reciprocal is not a normal fp32 number.
            low, high = nvfp4.SCALE_MIN, nvfp4.SCALE_MAX
            return ~((part >= low) & (part <= high)), "a scale > 0 from 2^-117 to 2^116"
        if entry.dtype == "F8_E4M3":
            bits = part.view(torch.uint8)
            if name.endswith(".weight_scale"):
                if part.numel() and not bool(bits.any()):
                    return bits == 0, "block scales of which one at least is > 0"
                return bits >= 0x7F, "block scales that are numbers >= +0"
            return (bits & 0x7F) == 0x7F, "no NaN"
        if entry.dtype == "F8_E8M0":
            return part.view(torch.uint8) == 0xFF, "no NaN scale"
        if part.is_floating_point():
            return ~part.isfinite(), "finite values"
        if name.endswith(".tid2eid"):
            experts = self._config.n_routed_experts
            return (part < 0) | (part >= experts), f"expert ids in [0, {experts})"
        return None, ""


def bounds(entry: Entry, name: str, dim: int, extent: slice) -> tuple[int, int]:
    """Start and stop of ``extent`` in dimension ``dim`` of a tensor; CheckpointError if it is no range of it."""
    size = entry.shape[dim] if dim < len(entry.shape) else 0
    start = extent.start if extent.start is not None else 0
    stop = extent.stop if extent.stop is not None else size
    if extent.step not in (None, 1) or not 0 <= start < stop <= size:
        what = ("rows", "columns")[dim]
        raise CheckpointError(
            f"tensor '{name}' in {entry.file}: {what} {extent.start}:{extent.stop}:{extent.step} are not a range of"
            f" {list(entry.shape)}"
        )
    return start, stop


def _whole_blocks(extent: slice, size: int) -> slice:
    block = fp8_block.BLOCK
    return slice(extent.start // block * block, min(-(-extent.stop // block) * block, size))


def _ceil_divide(extent: slice, unit: int) -> slice:
    return slice(extent.start // unit, -(-extent.stop // unit))
