"""Compare two checkpoints of one model, matrix by matrix, by the values that each one's own storage stands for.

Names may differ (DeepSeek's, transformers') and so may storages. A matrix is one of two:

* *must be equal*: its storage holds the source's values without loss (:func:`is_lossless`). Every block of 16 columns
  must then have the same values, unless ``Thresholds.lossy`` says that the quantiser was free to choose others;
* *may differ*: the relative RMS error of the matrix and the largest error in any of its blocks are bounded
  (:mod:`.thresholds`).

Tensors that are not matrices (norms, router, embedding, …) must be equal, whatever their dtypes.

Drafts (``mtp.``) are compared so, too, where both checkpoints bundle one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from torch.nn import functional

from nvfp4_sgl.checkpoint.classes import MatrixClass, layer_of
from nvfp4_sgl.checkpoint.findings import Finding
from nvfp4_sgl.checkpoint.names import TensorSpec, tensor_specs
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.sweep import Sweep, available_cores, row_ranges
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.errors import CheckpointError, Nvfp4SglError
from nvfp4_sgl.formats import ue8m0
from nvfp4_sgl.formats.nvfp4 import BLOCK
from nvfp4_sgl.reports.thresholds import Thresholds

LEAST_BLOCK_SHARE = 2.0**-14
"""Blocks whose maximum is below this share of the matrix's count as if it were that: smaller ones have subnormal scales
in E4M3 (2^-6 / 448 = 2^-14.8), or none."""
MAGNITUDES = 0x77
"""Bits of a byte of two E2M1 codes that are not signs."""
RECIPROCAL_ERROR = 2.0**-22
"""compressed-tensors stores 1 / scale: writing and reading it are two roundings in fp32."""
CHUNK_VALUES = 2**18
"""Values of a matrix that a thread decodes at once, or a row of blocks. Fits a core's cache: four times as many at once
take 1.7 times as long a value."""


@dataclass(frozen=True)
class Worst:
    """The block with the largest error relative to its largest value.

    ``error``: as a share of the source's largest value in the block (:data:`LEAST_BLOCK_SHARE`). ``row``, ``column``:
    of the block's first value.
    """

    error: float
    row: int
    column: int


@dataclass(frozen=True)
class Compared:
    """A matrix of both checkpoints.

    Attributes:
        blocks, equal_blocks: blocks of 16 columns of a row, and those with the same values in both.
        lossless: the storages leave no reason for a difference.
        rms: sqrt(Σ(a − b)² / Σb²), b the source's values, sums in fp64. 0 if both are all zero, infinite if b alone is.
        cosine: Σab / sqrt(Σa² · Σb²); 1 if both are all zero, 0 if one is.
        problem: why the matrix is not accepted.
    """

    stem: str
    storage: Storage
    source_storage: Storage
    blocks: int
    equal_blocks: int
    lossless: bool
    rms: float
    cosine: float
    worst: Worst
    problem: str | None = None

    @property
    def matrix_class(self) -> MatrixClass:
        """The role of the matrix in its layer."""
        return MatrixClass.of(self.stem)

    @property
    def layer(self) -> int:
        """Number of its layer."""
        return layer_of(self.stem)

    @property
    def is_equal(self) -> bool:
        """Whether every block is."""
        return self.equal_blocks == self.blocks


@dataclass
class Comparison:
    """Two checkpoints.

    Attributes:
        tensors, equal_tensors: those that are not matrices.
        missing, extra: logical tensors that the source alone has, and that it has not.
        problems: all that is not accepted, those of single matrices and of the draft among them.
        draft: the drafts of both; ``None`` unless each has one.
        undrafted: the checkpoint that has no draft where the other has one.
    """

    thresholds: Thresholds
    matrices: list[Compared] = field(default_factory=list)
    tensors: int = 0
    equal_tensors: int = 0
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    draft: Comparison | None = None
    undrafted: Path | None = None

    @property
    def all_matrices(self) -> list[Compared]:
        """Those of the draft included."""
        return [*self.matrices, *(self.draft.matrices if self.draft is not None else [])]


def compare(
    ours: Verified,
    source: Verified,
    thresholds: Thresholds | None = None,
    *,
    threads: int | None = None,
    progress: TextIO | None = None,
) -> Comparison:
    """Compare ``ours`` with the ``source`` that it was made from.

    A thread holds :data:`CHUNK_VALUES` values of a matrix, decoded, a few times over, and two fp32 numbers for each
    block of the whole matrix. A draft of ``ours`` that is not complete is left out: its inspection says so.

    Args:
        threads: the cores of this process unless given.
        progress: where progress lines go after five seconds; stderr unless given.

    Raises:
        CheckpointError, ConfigError: the draft of ``source`` is not complete.
    """
    try:
        draft = ours.draft()
    except Nvfp4SglError:
        drafts = None
    else:
        drafts = draft, source.draft()
    limits, running = thresholds or Thresholds(), (threads or available_cores(), progress)
    worker = _Worker(ours, source, limits)
    result = _compare(worker, tensor_specs(ours.config), tensor_specs(source.config), *running)
    if drafts is not None:
        mine, theirs = drafts
        if mine is not None and theirs is not None:
            worker = _Worker(ours, source, limits, of_draft=True)
            result.draft = _compare(worker, mine.specs, theirs.specs, *running)
            result.problems += result.draft.problems
        elif mine is not None or theirs is not None:
            result.undrafted = (ours if mine is None else source).inventory.directory
    return result


def _compare(
    worker: _Worker,
    mine: Mapping[str, TensorSpec],
    theirs: Mapping[str, TensorSpec],
    threads: int,
    progress: TextIO | None,
) -> Comparison:
    """Compare the logical tensors ``mine`` with ``theirs``, by stem or name."""
    result = Comparison(worker.thresholds)
    result.missing = [spec.key for name, spec in theirs.items() if name not in mine]
    result.extra = [spec.key for name, spec in mine.items() if name not in theirs]
    result.problems += [Finding(name, "missing", "is missing: the source has it") for name in result.missing]
    result.problems += [Finding(name, "extra", "is not in the source") for name in result.extra]
    specs = []
    for name, spec in mine.items():
        if name in theirs and spec.shape != theirs[name].shape:
            said = f"has the shape {list(spec.shape)}, in the source {list(theirs[name].shape)}"
            result.problems.append(Finding(spec.key, "shape", said))
        elif name in theirs:
            specs.append(spec)
    worker.sweep = Sweep(
        [worker.ours, worker.source],
        sum(map(worker.nbytes, specs)),
        worker.doing,
        progress,
    )
    for spec, found in zip(specs, worker.sweep.run(worker.examine, specs, threads), strict=True):
        if isinstance(found, Compared):
            result.matrices.append(found)
            if found.problem is not None:
                result.problems.append(Finding(found.stem, "differs", found.problem))
        elif found is not None:
            result.problems.append(found)
        if not spec.role.is_matrix:
            result.tensors += 1
            result.equal_tensors += found is None
    return result


def is_lossless(storage: Storage, source: Storage, dtypes: Mapping[str, str], source_dtypes: Mapping[str, str]) -> bool:
    """Whether ``storage`` holds whatever values ``source`` can, provided that the matrix has an exact form in NVFP4.

    Args:
        dtypes, source_dtypes: of the stored tensors by suffix.
    """
    if storage is Storage.PLAIN:
        if source is Storage.PLAIN:
            return dtypes["weight"] == "F32" or source_dtypes["weight"] == "BF16"
        return source in (Storage.MXFP4, Storage.FP8)  # powers of two times at most four bits
    if storage.is_nvfp4 and storage is not Storage.MXFP4:
        return source.is_nvfp4
    if storage is Storage.FP8_FLOAT_SCALES:
        return source in (Storage.FP8, Storage.FP8_FLOAT_SCALES)
    return storage is source


class _Worker:
    """Compares one logical tensor after the other."""

    sweep: Sweep

    def __init__(self, ours: Verified, source: Verified, thresholds: Thresholds, *, of_draft: bool = False):
        self._verified = ours, source
        self.thresholds = thresholds
        self.doing = f"comparing {'the draft ' if of_draft else ''}with {source.inventory.directory}"
        self.ours, self.source = (each.draft_reader() if of_draft else each.reader() for each in self._verified)

    def nbytes(self, spec: TensorSpec) -> int:
        """Bytes that both checkpoints hold of a logical tensor."""
        return sum(self._nbytes(verified, spec) for verified in self._verified)

    def examine(self, spec: TensorSpec) -> Compared | Finding | None:
        """Compare a matrix; of another tensor, return its fault."""
        try:
            return self._matrix(spec) if spec.role.is_matrix else self._tensor(spec)
        except CheckpointError as error:
            return Finding(spec.key, "value", str(error))

    @staticmethod
    def _nbytes(verified: Verified, spec: TensorSpec) -> int:
        inventory = verified.inventory
        if not spec.role.is_matrix:
            return inventory.entries[spec.name].nbytes
        return sum(inventory.entries[f"{spec.name}.{suffix}"].nbytes for suffix in inventory.stored(spec.name))

    def _tensor(self, spec: TensorSpec) -> Finding | None:
        """Row by row; values, so that BF16 may have become F32 and I32 I64."""
        rows = spec.shape[0]
        width = math.prod(spec.shape[1:])
        nbytes, different, largest = self.nbytes(spec), 0, 0.0
        for chunk in row_ranges(rows, width, CHUNK_VALUES):
            a, b = (reader.read(spec.name, chunk).to(torch.float64) for reader in (self.ours, self.source))
            different += int((a != b).sum())
            largest = max(largest, float((a - b).abs().max()))
            self.sweep.add(nbytes * (chunk.stop - chunk.start) // rows)
        if not different:
            return None
        text = f"must equal the source's: {different} of {rows * width} values differ, by {largest:.3g} at most"
        return Finding(spec.name, "differs", text)

    def _matrix(self, spec: TensorSpec) -> Compared:
        stem = spec.name
        (n, k), storages = self.ours.matrix_shape(stem), (self.ours.storage(stem), self.source.storage(stem))
        tolerance = (
            RECIPROCAL_ERROR if (Storage.NVFP4_COMPRESSED in storages and storages[0] is not storages[1]) else 0.0
        )
        nbytes = self.nbytes(spec)
        if (storages[0] is storages[1] and self._has_same_bytes(stem)) or (
            storages == (Storage.NVFP4, Storage.MXFP4) and self._is_exact_cast(stem)
        ):
            self.sweep.add(nbytes)
            blocks = n * -(-k // BLOCK)
            return Compared(stem, *storages, blocks, blocks, True, 0.0, 1.0, Worst(0.0, 0, 0))
        sums = torch.zeros(4, dtype=torch.float64)
        errors, maxima, equal = [], [], 0
        for chunk in self._chunks(stem):
            a, b = self.ours.read_values(stem, chunk), self.source.read_values(stem, chunk)
            difference = a - b
            sums += _sums(difference, a, b)
            error, maximum = _block_maxima(difference), _block_maxima(b)
            equal += int((error <= tolerance * maximum).sum())
            errors.append(error)
            maxima.append(maximum)
            self.sweep.add(nbytes * (chunk.stop - chunk.start) // n)
        error, maximum = torch.cat(errors), torch.cat(maxima)
        squared, ours, theirs, product = sums.tolist()
        compared = Compared(
            stem,
            *storages,
            blocks=error.numel(),
            equal_blocks=equal,
            lossless=self._is_lossless(stem, *storages),
            rms=math.sqrt(squared / theirs) if theirs else math.inf if squared else 0.0,
            cosine=product / math.sqrt(ours * theirs) if ours and theirs else float(ours == theirs),
            worst=_worst(error, maximum),
        )
        problem = self._problem(compared, error, tolerance * maximum)
        return compared if problem is None else replace(compared, problem=problem)

    def _has_same_bytes(self, stem: str) -> bool:
        """Whether a matrix of one storage is stored alike, which needs no decoding."""
        codes, *scales = (part for part in self.ours.storage(stem).decoder.parts if not part.optional)
        if not all(_same(self.ours.part(stem, part), self.source.part(stem, part)) for part in scales):
            return False
        return all(
            _same(self.ours.part(stem, codes, chunk), self.source.part(stem, codes, chunk))
            for chunk in self._chunks(stem)
        )

    def _is_exact_cast(self, stem: str) -> bool:
        """Whether MXFP4 became NVFP4 with the same codes under the same scales, which needs no decoding either."""
        codes, scales, total, *_ = self.ours.storage(stem).decoder.parts
        their_codes, their_scales = self.source.storage(stem).decoder.parts
        global_scale = self.ours.part(stem, total).double()
        for chunk in self._chunks(stem):
            code = self.ours.part(stem, codes, chunk)
            if not _same(code, self.source.part(stem, their_codes, chunk).view(torch.uint8)):
                return False
            scale = self.ours.part(stem, scales, chunk).double() * global_scale
            power = ue8m0.decode(ue8m0.as_bytes(self.source.part(stem, their_scales, chunk))).double()
            different = scale != power.repeat_interleave(2, dim=1)[:, : scale.shape[1]]
            # Blocks of zeros may have any scale.
            if different.any() and (code.unflatten(1, (-1, BLOCK // 2))[different] & MAGNITUDES).any():
                return False
        return True

    def _chunks(self, stem: str) -> Iterator[slice]:
        """Ranges of rows that begin with whole blocks in both storages."""
        rows, columns = self.ours.matrix_shape(stem)
        block = max(reader.storage(stem).decoder.block[0] for reader in (self.ours, self.source))
        return row_ranges(rows, columns, CHUNK_VALUES, block)

    def _is_lossless(self, stem: str, storage: Storage, source: Storage) -> bool:
        dtypes = (verified.inventory.stored(stem) for verified in self._verified)
        # What MXFP4 holds may be too wide for NVFP4.
        return is_lossless(storage, source, *dtypes) and (
            storage is source or not source.is_converted or self.source.problem(stem) is None
        )

    def _problem(self, compared: Compared, error: Tensor, accepted: Tensor) -> str | None:
        if compared.lossless and not compared.is_equal and not self.thresholds.lossy:
            row, block = divmod(int((error > accepted).flatten().int().argmax()), error.shape[1])
            return (
                f"{compared.source_storage.value} fits {compared.storage.value} without loss, but"
                f" {compared.blocks - compared.equal_blocks} of {compared.blocks} blocks differ, the first at row"
                f" {row}, column {block * BLOCK} (--lossy accepts what is within the bounds)"
            )
        if not compared.rms <= self.thresholds.rms:
            return f"relative RMS error {compared.rms:.4g}, expected at most {self.thresholds.rms:g}"
        worst = compared.worst
        if not worst.error <= self.thresholds.block:
            return (
                f"an error of {worst.error:.3g} of the block's largest value at row {worst.row}, column {worst.column},"
                f" expected at most {self.thresholds.block:g}"
            )
        return None


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two stored tensors, of any dtypes, are the same bytes."""
    return a.dtype is b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _sums(difference: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """fp64 [4]: Σd², Σa², Σb², Σab."""
    d, a, b = (x.flatten().double() for x in (difference, a, b))
    return torch.stack([torch.dot(d, d), torch.dot(a, a), torch.dot(b, b), torch.dot(a, b)])


def _block_maxima(x: Tensor) -> Tensor:
    """fp32 [N, ceil(K/16)]: the largest magnitude in each block of [N, K]."""
    padded = functional.pad(x, (0, -x.shape[1] % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).abs().amax(dim=2)


def _worst(error: Tensor, maximum: Tensor) -> Worst:
    """The block whose error is largest relative to the source's values; both arguments are [N, ceil(K/16)]."""
    floor = maximum.max() * LEAST_BLOCK_SHARE
    relative = torch.where(error > 0, error / maximum.clamp_min(floor), 0.0)
    place = int(relative.argmax())
    row, block = divmod(place, error.shape[1])
    return Worst(float(relative.flatten()[place]), row, block * BLOCK)
