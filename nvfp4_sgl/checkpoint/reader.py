"""Hand out a verified checkpoint's tensors bit for bit, and check their values on the way.

Where the bytes come from is the files' business: :mod:`.stored_files` maps them for the CPU, :mod:`.staged_files` reads
them to a GPU. Checks and decoders run where the tensors are. On the CPU a check raises at once; on a GPU it leaves a
flag (:mod:`.late_checks`), and :meth:`CheckpointReader.finish` does not return before all of them were looked at.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint import values
from nvfp4_sgl.checkpoint.decoders import Decoder, Matrix, MatrixRange, Part
from nvfp4_sgl.checkpoint.inventory import SHOWN, Inventory
from nvfp4_sgl.checkpoint.late_checks import Checked, LateChecks
from nvfp4_sgl.checkpoint.names import DRAFT_COPIES, MTP_PREFIX
from nvfp4_sgl.checkpoint.progress import ByteProgress
from nvfp4_sgl.checkpoint.safetensors_header import Entry, called
from nvfp4_sgl.checkpoint.staged_files import StagedFiles
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.stored_files import MappedFiles, StoredFiles
from nvfp4_sgl.errors import CheckpointError, Nvfp4SglError
from nvfp4_sgl.formats import mxfp8, nvfp4
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor

logger = logging.getLogger(__name__)

CHECKED_BYTES = 64 << 20
"""Tables are checked in pieces of this size: intermediate results of a vocabulary's would take gigabytes."""


def reader_for(
    inventory: Inventory,
    device: torch.device | str,
    say: Callable[[str], None] | None = None,
    *,
    of_draft: bool = False,
) -> CheckpointReader:
    """Make a reader onto ``device``, or onto the CPU if that is no GPU; ``say`` takes lines of progress."""
    device = torch.device(device)
    return CheckpointReader(inventory, StagedFiles(device) if device.type == "cuda" else None, say, of_draft=of_draft)


class CheckpointReader:
    """Reads tensors, or the part of each that a rank needs, and remembers which.

    Args:
        inventory: verified (:meth:`Inventory.verify`).
        files: where the bytes come from; mapped, on the CPU, unless given.
        say: takes lines that say how far reading is, in bytes of the tensors of which this rank has taken its part.
        of_draft: what :meth:`finish` demands is the draft that is bundled, not the decoder.

    Attributes:
        nbytes: handed out so far.
    """

    def __init__(
        self,
        inventory: Inventory,
        files: StoredFiles | None = None,
        say: Callable[[str], None] | None = None,
        *,
        of_draft: bool = False,
    ):
        if inventory.config is None:
            raise CheckpointError(f"{inventory.directory}: not verified; call Inventory.verify before reading")
        self._inventory, self._config = inventory, inventory.config
        self._files: StoredFiles = MappedFiles() if files is None else files
        self._late = LateChecks(self._explain)
        self._say, self._of_draft = say, of_draft
        self._decoded: dict[str, Storage] = {}
        self.nbytes = 0

    @property
    def waited(self) -> float:
        """Seconds of waiting for files; 0 for mapped ones, which are read when they are touched."""
        return self._files.waited

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
                that no checkpoint may hold (:mod:`.values`): NaN, infinity or a value beyond the bounds of its kind; a
                negative block scale; an expert id out of range. On a GPU such a value is told later, by another
                read or by :meth:`check_read`.
        """
        part = self.read_unchecked(name, rows, cols)
        if self._files.is_asynchronous:
            self._check_later(name, part, rows, cols)
        else:
            self.check_values(name, part, rows, cols)
        self._count(name, part)
        return part

    def read_unchecked(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """Like :meth:`read`, whatever the values are; :meth:`check_values` tells. Does not count as read."""
        entry = self._entry(name)
        part = self._files.read(entry, slice(*bounds(entry, name, 0, rows)) if rows is not None else None)
        if cols is None:
            return part
        # As bytes: torch does not copy every dtype with a stride on every device.
        start, stop = (column * part.itemsize for column in bounds(entry, name, 1, cols))
        return part.view(torch.uint8)[:, start:stop].contiguous().view(part.dtype)

    def check_values(self, name: str, part: Tensor, rows: slice | None = None, cols: slice | None = None) -> None:
        """Raise CheckpointError if ``part``, the given ranges of tensor ``name``, holds an invalid value."""
        entry, start, count = self._entry(name), 0, 0
        first: tuple[list[int], float, str] | None = None
        for piece in self._checked_pieces(name, part):
            bad, expected = self._invalid(entry, name, piece)
            if bad is not None and bool(bad.any()):
                count += int(bad.sum())
                if first is None:
                    index = bad.nonzero()[0].tolist()
                    value = piece[tuple(index)].float().item()
                    first = [start + index[0], *index[1:]] if index else [], value, expected
            start += len(piece) if piece.dim() else 0
        if first is None:
            return
        index, value, expected = first
        for dim, extent in ((0, rows), (1, cols)):
            if extent is not None:
                index[dim] += extent.start or 0
        raise CheckpointError(
            f"tensor {called(name, entry)} in {entry.file}: expected {expected}, found {value} at index {index}"
            f" ({count} such values); the file is damaged or was exported wrongly"
        )

    def read_matrix(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> Matrix:
        """The matrix ``stem``, or a part of it, decoded (:mod:`.decoders`).

        Args:
            rows, cols: ranges of the matrix, step 1. Columns of NVFP4 begin and end at multiples of 16.

        Raises:
            CheckpointError: as :meth:`read`; or the matrix has no exact form here, and so have all that are named.
        """
        decoder = self.storage(stem).decoder
        pieces, row, col = self._pieces(stem, rows, cols, nvfp4.BLOCK if decoder.is_packed else 1)
        try:
            if decoder.problem(pieces) is not None:
                raise self._not_exact()
            matrix = decoder.decode(pieces)
        except Nvfp4SglError:
            self.check_read()  # a damaged value is a better reason, and names its tensor
            raise
        self._decoded[stem] = self.storage(stem)
        return _cut(matrix, row, col)

    def expect(self, matrices: Sequence[MatrixRange]) -> None:
        """Announce the matrices that are read next, in order: their files may be read ahead, for two calls at most."""
        places: list[tuple[Entry, slice | None]] = []
        for stem, rows, cols in matrices:
            decoder = self.storage(stem).decoder
            pieces, _, _ = self._pieces(stem, rows, cols, nvfp4.BLOCK if decoder.is_packed else 1)
            for part in decoder.parts:
                if not part.optional:
                    extent = None if part.unit is None else _in_units(pieces.rows, part.unit[0])
                    places.append((self._entry(self._inventory.part_name(stem, part)), extent))
        self._files.expect(places)

    def read_mxfp8(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> MxFp8Tensor:
        """The matrix ``stem``, or a part of it, in MXFP8 with every value as it is.

        Args:
            rows, cols: ranges of the matrix, step 1. Columns begin and end at multiples of 32.

        Raises:
            CheckpointError: as :meth:`read`; or the matrix is in a storage that has no MXFP8 form.
        """
        storage = self.storage(stem)
        if not storage.is_mxfp8:
            raise CheckpointError(f"tensor '{stem}.weight': expected FP8 with UE8M0 scales, found {storage.value}")
        pieces, row, col = self._pieces(stem, rows, cols, mxfp8.BLOCK)
        matrix = storage.decoder.mxfp8(pieces)
        self.check_read()  # so that GEMMs which refuse codes and scales, and wait for that, are given sound ones
        blocks = slice(col.start // mxfp8.BLOCK, -(-col.stop // mxfp8.BLOCK))
        return MxFp8Tensor(matrix.codes[row, col].contiguous(), matrix.scale[row, blocks].contiguous())

    def _pieces(self, stem: str, rows: slice | None, cols: slice | None, unit: int) -> tuple[_Pieces, slice, slice]:
        """The whole blocks that hold a range of the matrix ``stem``, and the range within them.

        Whole blocks are read, so that scales and values keep to the same grid.

        Args:
            unit: columns begin and end at multiples of this, or with the matrix.
        """
        decoder = self.storage(stem).decoder
        n, k = self.matrix_shape(stem)
        weight = self._entry(self._inventory.part_name(stem, decoder.parts[0]))
        row, col = _range(weight, "rows", rows, n), _range(weight, "columns", cols, k)
        if col.start % unit or (col.stop % unit and col.stop != k):
            raise CheckpointError(
                f"tensor {called(f'{stem}.{decoder.parts[0].suffixes[0]}', weight)}: columns {col.start}:{col.stop} are"
                f" not whole blocks of {unit}; choose a tensor-parallel size that keeps blocks whole"
            )
        pieces = _Pieces(self, stem, decoder, _widened(row, decoder.block[0], n), _widened(col, decoder.block[1], k))
        return pieces, _shifted(row, pieces.rows.start), _shifted(col, pieces.cols.start)

    def problems(self) -> dict[str, str]:
        """Matrices that have no exact form here, each with the reason. Reads scales of whole matrices, or all of them.

        Only of matrices in a storage that may have none, which are MXFP4.
        """
        converted = (stem for stem, storage in self._storages().items() if storage.is_converted)
        found = ((stem, self.problem(stem)) for stem in converted)
        return {stem: reason for stem, reason in found if reason is not None}

    def problem(self, stem: str) -> str | None:
        """Why the matrix ``stem`` has no exact form here; ``None`` if it has one."""
        decoder = self.storage(stem).decoder
        n, k = self.matrix_shape(stem)
        return decoder.problem(_Pieces(self, stem, decoder, slice(0, n), slice(0, k)))

    def read_values(self, stem: str, rows: slice) -> Tensor:
        """fp32 [rows, K]: values of the matrix ``stem``, also of one that has no exact form here.

        Args:
            rows: a range that begins with a whole block, and ends with one or with the matrix.

        Raises:
            CheckpointError: as :meth:`read`.
        """
        decoder = self.storage(stem).decoder
        return decoder.values(_Pieces(self, stem, decoder, rows, slice(0, self.matrix_shape(stem)[1])))

    def release(self) -> None:
        """Close the files; they are opened again when something is read."""
        self._files.release()

    def part(self, stem: str, part: Part, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """A stored tensor of the matrix ``stem``, or the share of it that a range of the matrix has."""
        name = self._inventory.part_name(stem, part)
        if part.unit is None:
            return self.read(name)
        return self.read(name, _in_units(rows, part.unit[0]), _in_units(cols, part.unit[1]))

    def check_read(self) -> None:
        """Raise if anything read so far holds an invalid value; waits for the device.

        Raises:
            CheckpointError: as :meth:`read`, of the first tensor that does.
        """
        self._late.look()

    def finish(self, elsewhere: Collection[str] = ()) -> None:
        """Demand that every tensor of the decoder, or of the draft, was read, in whole or in part, and holds what it
        may; release the files; log conversions. Nothing must be served before this has returned.

        Optional parts (``input_scale``) need not be read: the dynamic recipe does without these constants.

        Args:
            elsewhere: matrices that other ranks read, by their names without suffix.

        Raises:
            CheckpointError: as :meth:`check_read`; or tensors were never read, which are named.
        """
        self.check_read()
        missing = {name: entry for name, entry in self._unread.items() if name.rpartition(".")[0] not in elsewhere}
        if missing:
            unread = [f"{called(name, entry)} in {entry.file.name}" for name, entry in missing.items()]
            more = f" and {len(unread) - SHOWN} more" if len(unread) > SHOWN else ""
            raise CheckpointError(
                f"{self._inventory.directory}: {len(unread)} tensors were never read:"
                f" {', '.join(unread[:SHOWN])}{more}; the model does not use its whole checkpoint"
            )
        for storage, count in Counter(self._decoded.values()).items():
            if storage.is_converted:
                logger.info("%d %s matrices are NVFP4 now, every value as it was", count, storage.value)
        self.release()

    @cached_property
    def _unread(self) -> dict[str, Entry]:
        """Tensors that must be read before :meth:`finish`, and were not yet."""
        return {
            name: entry
            for name, entry in self._inventory.entries.items()
            if self._is_wanted(name) and not self._is_optional(name)
        }

    def _is_wanted(self, name: str) -> bool:
        is_draft = name.startswith(MTP_PREFIX)
        return is_draft and not DRAFT_COPIES.match(name) if self._of_draft else not is_draft

    @cached_property
    def _left(self) -> Counter[Path]:
        """Number of tensors of each file that must still be read."""
        return Counter(entry.file for entry in self._unread.values())

    @cached_property
    def _progress(self) -> ByteProgress | None:
        if self._say is None:
            return None
        return ByteProgress(sum(entry.nbytes for entry in self._unread.values()), self._say)

    def _count(self, name: str, part: Tensor) -> None:
        """Count ``part`` of a tensor as handed out; close a file of which no tensor is left."""
        left, progress = self._left, self._progress  # of all that must be read, the first time
        self.nbytes += part.nbytes
        entry = self._unread.pop(name, None)
        if entry is None:
            return
        left[entry.file] -= 1
        if not left[entry.file]:
            self._files.let_go(entry.file)
        if progress is not None:
            progress.add(entry.nbytes)

    def _check_later(self, name: str, part: Tensor, rows: slice | None, cols: slice | None) -> None:
        """Flag ``part`` on its device if it holds an invalid value; nothing waits for the device."""
        entry = self._entry(name)
        masks = (self._invalid(entry, name, piece)[0] for piece in self._checked_pieces(name, part))
        flags = [mask.any() for mask in masks if mask is not None]
        if flags:
            self._late.add(Checked(name, rows, cols), flags[0] if len(flags) == 1 else torch.stack(flags).any())

    def _checked_pieces(self, name: str, part: Tensor) -> Sequence[Tensor]:
        """``part``, in pieces of rows if it is a large table of BF16 or F32."""
        of_matrix = self._part_of(name)
        if (of_matrix is not None and of_matrix.rule is not values.plain) or part.nbytes <= CHECKED_BYTES:
            return [part]
        return part.split(max(CHECKED_BYTES * len(part) // part.nbytes, 1))

    def _explain(self, checked: Checked) -> None:
        """Raise the error of a part that is invalid on the device, as the CPU does, from the file."""
        entry = self._entry(checked.name)
        part = CheckpointReader(self._inventory).read(*checked)
        _, expected = self._invalid(entry, checked.name, part)
        raise CheckpointError(
            f"tensor {called(checked.name, entry)} in {entry.file}: expected {expected} where it was copied to, found"
            " others there and none in the file: the file is being written to, or memory is faulty"
        )

    def _entry(self, name: str) -> Entry:
        entry = self._inventory.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._inventory.directory}: tensor '{name}' is missing; fetch the files again")
        return entry

    def _storages(self) -> dict[str, Storage]:
        assert self._inventory.summary is not None  # verified, as __init__ demands
        return self._inventory.summary.storages

    def matrix_shape(self, stem: str) -> tuple[int, int]:
        """[N, K] of the matrix ``stem``, from the part that holds the values."""
        decoder = self.storage(stem).decoder
        entry, unit = self._entry(self._inventory.part_name(stem, decoder.parts[0])), decoder.parts[0].unit
        assert unit is not None and len(entry.shape) == 2, entry
        return entry.shape[0] * unit[0], entry.shape[1] * unit[1]

    def _not_exact(self) -> CheckpointError:
        problems = self.problems()
        named = [f"'{stem}' ({reason})" for stem, reason in problems.items()]
        more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        total = sum(storage.is_converted for storage in self._storages().values())
        return CheckpointError(
            f"{self._inventory.directory}: {len(named)} of {total} MXFP4 matrices have no exact NVFP4 form:"
            f" {'; '.join(named[:SHOWN])}{more}; expected exponents that NVFP4's scales can hold. Run"
            " 'nvfp4-sgl convert', which quantises these matrices, have the server convert while it loads"
            " (docs/convert.md), or use a checkpoint that ModelOpt quantised"
        )

    def _part_of(self, name: str) -> Part | None:
        """The part of a matrix that ``name`` is; ``None`` if it is a tensor of its own."""
        stem, _, suffix = name.rpartition(".")
        storage = self._storages().get(stem)
        if storage is None and name.startswith(MTP_PREFIX) and (stored := self._inventory.stored(stem)):
            storage = Storage.of(stored)  # verifying leaves drafts out
        return storage.decoder.part(suffix) if storage is not None else None

    def _is_optional(self, name: str) -> bool:
        part = self._part_of(name)
        return part is not None and part.optional

    def _invalid(self, entry: Entry, name: str, part: Tensor) -> tuple[Tensor | None, str]:
        """The first invalid value of ``part``, and what was expected."""
        of_matrix = self._part_of(name)
        if of_matrix is not None:
            return of_matrix.rule(part)
        if part.is_floating_point():
            return values.rule_of(name)(part)
        if name.endswith(".tid2eid"):
            experts = self._config.n_routed_experts
            return (part < 0) | (part >= experts), f"expert ids in [0, {experts})"
        return None, ""


class _Pieces:
    """The stored tensors of a matrix, cut to a range of whole blocks (:class:`.decoders.Pieces`)."""

    def __init__(self, reader: CheckpointReader, stem: str, decoder: Decoder, rows: slice, cols: slice):
        self._reader, self._stem, self._decoder, self.rows, self.cols = reader, stem, decoder, rows, cols

    def piece(self, part: str) -> Tensor:
        return self._reader.part(self._stem, self._named(part), self.rows, self.cols)

    def whole(self, part: str) -> Tensor:
        return self._reader.part(self._stem, self._named(part))

    def _named(self, part: str) -> Part:
        found = self._decoder.part(part)
        assert found is not None, part
        return found


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


def _range(entry: Entry, what: str, extent: slice | None, size: int) -> slice:
    """``extent`` of ``size`` rows or columns with both ends; CheckpointError if it is no range of them."""
    start, stop = (extent.start or 0, extent.stop) if extent is not None else (0, size)
    stop = size if stop is None else stop
    if (extent is not None and extent.step not in (None, 1)) or not 0 <= start < stop <= size:
        raise CheckpointError(
            f"tensor '{entry.name}' in {entry.file}: {what} {start}:{stop} are not a range of the matrix's {size}"
        )
    return slice(start, stop)


def _widened(extent: slice, block: int, size: int) -> slice:
    return slice(extent.start // block * block, min(-(-extent.stop // block) * block, size))


def _shifted(extent: slice, offset: int) -> slice:
    return slice(extent.start - offset, extent.stop - offset)


def _in_units(extent: slice | None, unit: int) -> slice | None:
    return slice(extent.start // unit, -(-extent.stop // unit)) if extent is not None else None


def _cut(matrix: Matrix, rows: slice, cols: slice) -> Matrix:
    if isinstance(matrix, Tensor):
        return matrix[rows, cols]
    if matrix.shape == (rows.stop - rows.start, cols.stop - cols.start):
        return matrix
    packed, scales = (slice(cols.start // unit, cols.stop // unit) for unit in (2, nvfp4.BLOCK))
    return NvFp4Tensor(
        matrix.packed[rows, packed].contiguous(), matrix.block_scale[rows, scales].contiguous(), matrix.global_scale
    )
