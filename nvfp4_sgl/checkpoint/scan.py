"""Scan the values of a checkpoint: those that a server refuses, those that no good exporter writes, ranges of scales.

What is refused is decided by the reader that a server loads with, tensor by tensor, so that both agree. Beyond that:

* a *problem* is also an all-zero matrix, or one that has blocks of codes other than zero under a scale of zero;
* a *note* is a matrix of which many block scales are the largest that E4M3 holds. Evenly distributed weights have that,
  too: a comparison with the source tells (:mod:`.compare`).

``input_scale`` is not read, as a server does not read it. A draft is scanned by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TextIO

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint import values
from nvfp4_sgl.checkpoint.classes import MatrixClass
from nvfp4_sgl.checkpoint.decoders import Part
from nvfp4_sgl.checkpoint.drafts import Draft
from nvfp4_sgl.checkpoint.findings import Finding
from nvfp4_sgl.checkpoint.names import Role, TensorSpec, tensor_specs
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.stored_files import StoredFiles
from nvfp4_sgl.checkpoint.sweep import Sweep, available_cores, row_ranges
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.errors import CheckpointError, Nvfp4SglError
from nvfp4_sgl.formats.nvfp4 import BLOCK

CHUNK_BYTES = 4 * 2**20
"""Stored bytes that a thread reads at once of a tensor that is not a scale."""
SATURATED_SHARE, SATURATED_COUNT = 0.01, 16
"""A matrix is noted if more block scales than this, in share and in number, are at 448. The block that holds a matrix's
maximum has that scale, and with normally distributed weights one in 10^5 beside it (measured on 2048 × 2048)."""
ZERO_CODES = 0x77
"""Bits of a byte of E2M1 codes that are zero if both codes are ±0."""


@dataclass(frozen=True)
class ScaleRange:
    """Scales of several matrices.

    Attributes:
        count: scales. zero: those that are 0. saturated: E4M3 scales of 448. nan, infinite, negative: those (−0, too).
        low, high: smallest scale above zero, and largest; NaN where there is none.
    """

    count: int = 0
    zero: int = 0
    saturated: int = 0
    nan: int = 0
    infinite: int = 0
    negative: int = 0
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of(cls, scales: Tensor) -> ScaleRange:
        """Range of a tensor of scales of any dtype."""
        found, counts = _distinct(scales)

        def count(mask: Tensor) -> int:
            return int(counts[mask].sum())

        positive = found[(found > 0) & found.isfinite()]
        is_e4m3 = scales.dtype is torch.float8_e4m3fn
        return cls(
            count=scales.numel(),
            zero=count(found == 0),
            saturated=count(found == torch.finfo(torch.float8_e4m3fn).max) if is_e4m3 else 0,
            nan=count(found.isnan()),
            infinite=count(found.isinf()),
            negative=count(found.signbit() & ~found.isnan()),
            low=float(positive.min()) if positive.numel() else math.nan,
            high=float(positive.max()) if positive.numel() else math.nan,
        )

    def __add__(self, other: ScaleRange) -> ScaleRange:
        names = ("count", "zero", "saturated", "nan", "infinite", "negative")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        low, high = fmin(self.low, other.low), -fmin(-self.high, -other.high)
        return replace(self, **sums, low=low, high=high)


def fmin(a: float, b: float) -> float:
    """The smaller of two numbers; NaN counts as absent."""
    return b if math.isnan(a) else a if math.isnan(b) else min(a, b)


def _distinct(scales: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 values and how often each occurs; those of an 8-bit dtype once each."""
    if scales.dtype.itemsize > 1:
        return scales.flatten().float(), torch.ones(scales.numel(), dtype=torch.int64)
    every = torch.arange(256, dtype=torch.uint8).view(scales.dtype).float()
    counts = torch.bincount(scales.flatten().view(torch.uint8), minlength=256)
    return every[counts > 0], counts[counts > 0]


class ScaleKey(NamedTuple):
    """Scales that are counted together; ``part`` is ``block`` or ``global``."""

    matrix_class: MatrixClass
    storage: Storage
    part: str


@dataclass
class Scan:
    """Findings in a checkpoint's values.

    Attributes:
        nbytes: read. whole: all tensors were read; else the scales alone.
        scales: ranges by class of matrix; global scales as they multiply, whichever way they are stored.
        converted, inexact: MXFP4 matrices, and those of them that NVFP4 does not hold exactly.
    """

    whole: bool
    nbytes: int = 0
    scales: dict[ScaleKey, ScaleRange] = field(default_factory=dict)
    converted: int = 0
    inexact: int = 0
    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)


def scan(
    verified: Verified,
    *,
    whole: bool = True,
    threads: int | None = None,
    progress: TextIO | None = None,
    files: StoredFiles | None = None,
    draft: Draft | None = None,
) -> Scan:
    """Read all tensors of the decoder, or with ``whole=False`` the scales of its matrices alone.

    A thread holds a tensor of scales, or :data:`CHUNK_BYTES` of another tensor and a few times that for what is
    computed from it.

    Args:
        threads: the cores of this process unless given.
        progress: where progress lines go after five seconds; stderr unless given.
        files: where the bytes come from; mapped unless given.
        draft: what is read in place of the decoder; its scales are not counted.
    """
    worker = _Worker(verified, whole, files, draft)
    total = sum(worker.nbytes(spec) for spec in worker.specs)
    worker.sweep = Sweep([worker.reader], total, "reading", progress)
    result = Scan(whole)
    for found in worker.sweep.run(worker.examine, worker.specs, threads or available_cores()):
        for key, range in found.scales.items():
            result.scales[key] = result.scales.get(key, ScaleRange()) + range
        result.problems += found.problems
        result.notes += found.notes
        result.converted += found.converted
        result.inexact += found.inexact
    result.nbytes = worker.sweep.nbytes
    return result


def scan_draft(
    verified: Verified, *, whole: bool = True, threads: int | None = None, progress: TextIO | None = None
) -> Scan | None:
    """:func:`scan` of the draft that is bundled; ``None`` if there is none, or none that is complete."""
    try:
        draft = verified.draft()
    except Nvfp4SglError:
        return None
    return None if draft is None else scan(verified, whole=whole, threads=threads, progress=progress, draft=draft)


class _Worker:
    """Examines one logical tensor after the other, in the order in which they lie in the files."""

    sweep: Sweep

    def __init__(self, verified: Verified, whole: bool, files: StoredFiles | None, draft: Draft | None = None):
        self._inventory, self._whole, self._draft = verified.inventory, whole, draft
        self._storages = draft.storages if draft else verified.summary.storages
        tensors = draft.specs if draft else tensor_specs(verified.config)
        self.reader = verified.reader() if files is None else CheckpointReader(verified.inventory, files)
        specs = [spec for spec in tensors.values() if whole or spec.role.is_matrix]
        self.specs = sorted(specs, key=self._place)

    def nbytes(self, spec: TensorSpec) -> int:
        """Bytes that will be read of a logical tensor."""
        return sum(self._inventory.entries[name].nbytes for name in self._names(spec))

    def examine(self, spec: TensorSpec) -> Scan:
        """Findings and scales of one logical tensor."""
        found = Scan(self._whole)
        if spec.role.is_matrix:
            self._examine_matrix(spec.name, found)
        else:
            self._read(spec.name, found, is_table=spec.role is Role.PLAIN and len(spec.shape) == 2)
        return found

    def _place(self, spec: TensorSpec) -> tuple[str, int]:
        name = spec.name
        if spec.role.is_matrix:
            name = self._inventory.part_name(name, self._storages[name].decoder.parts[0])
        entry = self._inventory.entries[name]
        return entry.file.name, entry.offset

    def _names(self, spec: TensorSpec) -> Iterator[str]:
        if not spec.role.is_matrix:
            yield spec.name
            return
        codes, *scales = self._storages[spec.name].decoder.parts
        for part in (codes, *scales) if self._whole else scales:
            if not part.optional:
                yield self._inventory.part_name(spec.name, part)

    def _examine_matrix(self, stem: str, found: Scan) -> None:
        storage = self._storages[stem]
        codes, *scales = storage.decoder.parts
        block_scale: Tensor | None = None
        for part in scales:
            if not part.optional and (tensor := self._examine_scales(stem, storage, part, found)) is not None:
                block_scale = tensor
        if self._whole:
            name = self._inventory.part_name(stem, codes)
            self._read(name, found, is_table=True, block_scale=block_scale)
        if storage.is_converted:
            found.converted += 1
            self._examine_exactness(stem, found)

    def _examine_scales(self, stem: str, storage: Storage, part: Part, found: Scan) -> Tensor | None:
        """Count a tensor of scales; returned if it is of E4M3, one a block of 16, with zeros."""
        name = self._inventory.part_name(stem, part)
        stored = self.reader.read_unchecked(name)
        scales = stored.reciprocal() if part.rule is values.inverse_global_scale else stored
        range = ScaleRange.of(scales)
        if self._draft is None:
            key = ScaleKey(MatrixClass.of(stem), storage, "global" if part.unit is None else "block")
            found.scales[key] = range
        self._check(name, stored, found)
        if range.saturated > SATURATED_COUNT and range.saturated > SATURATED_SHARE * range.count:
            share = f"{range.saturated} of {range.count} block scales are 448, the largest of E4M3"
            found.notes.append(Finding(name, "saturated-scale", f"{share}: larger values may have been cut off"))
        self.sweep.add(stored.nbytes)
        is_fine = part.unit == (1, BLOCK) and scales.dtype is torch.float8_e4m3fn
        return scales if is_fine and 0 < range.zero < range.count else None

    def _read(self, name: str, found: Scan, *, is_table: bool, block_scale: Tensor | None = None) -> None:
        """Check a tensor in chunks of rows; a table of nothing but zeros is a problem.

        block_scale: those of NVFP4 codes, if there are zeros among them.
        """
        entry = self._inventory.entries[name]
        rows = entry.shape[0] if entry.shape else 0
        chunks: Iterable[slice | None] = row_ranges(rows, entry.nbytes // rows, CHUNK_BYTES) if rows else [None]
        has_values, lost = False, 0
        for chunk in chunks:
            part = self.reader.read_unchecked(name, chunk)
            self._check(name, part, found, chunk)
            has_values |= is_table and _holds_values(part)
            if block_scale is not None:
                codes = (part & ZERO_CODES).unflatten(-1, (-1, BLOCK // 2)).any(dim=-1)
                lost += int((codes & (block_scale[chunk].float() == 0)).sum())
            self.sweep.add(part.nbytes)
        if is_table and not has_values:
            found.problems.append(Finding(name, "zero-matrix", "every value is zero"))
        if lost:
            text = f"{lost} blocks of codes other than zero have a block scale of zero: their values are lost"
            found.problems.append(Finding(name, "zero-scale", text))

    def _check(self, name: str, part: Tensor, found: Scan, rows: slice | None = None) -> None:
        """Check a chunk by the reader's rules; only the first wrong chunk is reported."""
        if any(problem.tensor == name for problem in found.problems):
            return
        try:
            self.reader.check_values(name, part, rows)
        except CheckpointError as error:
            found.problems.append(Finding(name, "value", str(error)))

    def _examine_exactness(self, stem: str, found: Scan) -> None:
        try:
            reason = self.reader.problem(stem)
        except CheckpointError:
            return  # a scale that is no number, which is told already
        if reason is not None:
            found.inexact += 1
            found.problems.append(Finding(stem, "not-exact", f"not exact: {stem}: {reason}"))


def _holds_values(part: Tensor) -> bool:
    """Whether there is anything but zeros in codes or values; NaN counts."""
    if part.dtype in (torch.uint8, torch.int8):
        return bool((part.view(torch.uint8) & ZERO_CODES).any())
    if part.dtype is torch.float8_e4m3fn:
        return bool((part.view(torch.uint8) & 0x7F).any())
    return bool(part.any())
