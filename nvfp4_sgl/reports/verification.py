"""The report of ``nvfp4-sgl verify``: a checkpoint by itself and beside its source (docs/formats.md has the fields)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from nvfp4_sgl.checkpoint import checksums
from nvfp4_sgl.checkpoint.beside import check_beside
from nvfp4_sgl.checkpoint.classes import MatrixClass
from nvfp4_sgl.checkpoint.findings import Finding
from nvfp4_sgl.checkpoint.scan import scan, scan_draft
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.errors import Nvfp4SglError
from nvfp4_sgl.reports.compare import Compared, Comparison, compare
from nvfp4_sgl.reports.inspection import UNUSABLE_DRAFT, Inspection, counted, finding_lines, inspect, number, table
from nvfp4_sgl.reports.thresholds import Thresholds


class ClassKey(NamedTuple):
    """Matrices that are reported together."""

    matrix_class: MatrixClass
    source_storage: Storage
    storage: Storage

    @property
    def storages(self) -> str:
        """``MXFP4 → NVFP4``."""
        return f"{self.source_storage.value} → {self.storage.value}"


@dataclass(frozen=True)
class ClassErrors:
    """Errors of the matrices of one class and pair of storages."""

    matrices: int
    equal: int
    rms_median: float
    rms_max: float
    cosine_min: float
    worst_block: float

    @classmethod
    def of(cls, matrices: Sequence[Compared]) -> ClassErrors:
        """Errors of the matrices of a class; there is at least one."""
        return cls(
            matrices=len(matrices),
            equal=sum(matrix.is_equal for matrix in matrices),
            rms_median=statistics.median(matrix.rms for matrix in matrices),
            rms_max=max(matrix.rms for matrix in matrices),
            cosine_min=min(matrix.cosine for matrix in matrices),
            worst_block=max(matrix.worst.error for matrix in matrices),
        )


@dataclass(frozen=True)
class Verification:
    """A checkpoint, right or wrong.

    Attributes:
        source: directory that it was compared with, if any.
        inspection: ``None`` if headers or configuration are wrong, as ``error`` says.
        comparison: ``None`` without a source, or if there is an error.
    """

    directory: Path
    source: Path | None
    inspection: Inspection | None = None
    comparison: Comparison | None = None
    error: Nvfp4SglError | None = None

    @property
    def problems(self) -> list[Finding]:
        """All problems, each once."""
        if self.error is not None:
            return [Finding(None, "structure", str(self.error))]
        found = list(self.inspection.problems) if self.inspection else []
        told = {finding.message for finding in found}
        if self.comparison is not None:
            found += [finding for finding in self.comparison.problems if finding.message not in told]
        return found

    def classes(self) -> dict[ClassKey, ClassErrors]:
        """Errors by class and storages, in the order of the classes."""
        matrices = self.comparison.matrices if self.comparison else []
        grouped: dict[ClassKey, list[Compared]] = {}
        for matrix in matrices:
            key = ClassKey(matrix.matrix_class, matrix.source_storage, matrix.storage)
            grouped.setdefault(key, []).append(matrix)
        order = list(MatrixClass)
        return {key: ClassErrors.of(grouped[key]) for key in sorted(grouped, key=lambda key: order.index(key[0]))}

    def as_json(self) -> dict[str, Any]:
        """The report as an object that JSON can hold."""
        return {
            "directory": str(self.directory),
            "verdict": "wrong" if self.problems else "right",
            "problems": [finding._asdict() for finding in self.problems],
            "inspection": self.inspection.as_json() if self.inspection else None,
            "comparison": self._comparison(self.comparison) if self.comparison else None,
        }

    def lines(self) -> list[str]:
        """The report for a person; the last line is the verdict."""
        lines = []
        notes = self.inspection.notes if self.inspection else []
        if self.comparison is not None:
            lines += [*table(self.class_rows(), left=2), "", *self._tensor_lines(self.comparison)]
        if self.inspection is not None:
            lines += [*self.inspection.draft_lines(), self._checksums(self.inspection.checksums)]
        return [*lines, *finding_lines(self.problems, notes), f"{self.directory}: {self.verdict()}"]

    def class_rows(self) -> list[tuple[str, ...]]:
        """A table of the errors by class, with its head."""
        rows: list[tuple[str, ...]] = [("class", "storage", "matrices", "equal", "rms", "rms max", "cos min", "block")]
        for key, e in self.classes().items():
            numbers = (f"{e.rms_median:.4f}", f"{e.rms_max:.4f}", f"{e.cosine_min:.5f}", f"{e.worst_block:.3f}")
            rows.append((key.matrix_class.value, key.storages, str(e.matrices), str(e.equal), *numbers))
        return rows

    def verdict(self) -> str:
        """The verdict in a few words."""
        if problems := self.problems:
            return f"WRONG, {counted(len(problems), 'problem')}"
        unusable = self.inspection is not None and self.inspection.draft_problem is not None
        return f"{self._right()}{UNUSABLE_DRAFT if unusable else ''}"

    def _right(self) -> str:
        if self.comparison is None:
            return "right: tensors, configuration and values"
        matrices = self.comparison.all_matrices
        equal = sum(matrix.is_equal for matrix in matrices)
        if equal == len(matrices):
            but = " but those of the draft" if self.comparison.undrafted is not None else ""
            return f"right, and every value{but} is that of {self.source}"
        limits = self.comparison.thresholds
        return (
            f"right: {equal} of {counted(len(matrices), 'matrix')} equal those of {self.source}, the others within"
            f" {limits.rms:g} (RMS) and {limits.block:g} (block)"
        )

    def _checksums(self, differing: list[str] | None) -> str:
        """The line on the manifest of a conversion."""
        if differing is None:
            return f"checksums: none to hold the tensors against, since there is no {checksums.FILE}"
        matching = f"not all tensors match {checksums.FILE}" if differing else f"all tensors match {checksums.FILE}"
        return f"checksums: {matching}"

    def _tensor_lines(self, comparison: Comparison) -> list[str]:
        lossless = [matrix for matrix in comparison.matrices if matrix.lossless]
        equal = sum(matrix.is_equal for matrix in lossless)
        blocks = sum(matrix.blocks for matrix in lossless if matrix.is_equal)
        proved = f"storages without loss: {equal} of {counted(len(lossless), 'matrix')} equal, block by block"
        return [
            *([f"{proved} ({blocks} of 16)"] if lossless else []),
            f"other tensors: {comparison.equal_tensors} of {comparison.tensors} equal",
            *self._draft_line(comparison),
        ]

    def _draft_line(self, comparison: Comparison) -> list[str]:
        """The line on drafts, if there is one anywhere."""
        if comparison.undrafted is not None:
            return [f"draft: not compared, since {comparison.undrafted} has none"]
        if comparison.draft is None:
            return []
        equal = sum(matrix.is_equal for matrix in comparison.draft.matrices)
        matrices = f"{equal} of {counted(len(comparison.draft.matrices), 'matrix')}"
        return [f"draft: {matrices} and {comparison.draft.equal_tensors} of {comparison.draft.tensors} others equal"]

    def _comparison(self, comparison: Comparison) -> dict[str, Any]:
        return {
            "source": str(self.source),
            "max_rms": comparison.thresholds.rms,
            "max_block": comparison.thresholds.block,
            "classes": [
                {
                    "class": key.matrix_class.value,
                    "storage": key.storage.value,
                    "source_storage": key.source_storage.value,
                    "matrices": errors.matrices,
                    "equal": errors.equal,
                    "rms_median": number(errors.rms_median),
                    "rms_max": number(errors.rms_max),
                    "cosine_min": errors.cosine_min,
                    "worst_block": number(errors.worst_block),
                }
                for key, errors in self.classes().items()
            ],
            "tensors": {"compared": comparison.tensors, "equal": comparison.equal_tensors},
            "draft": None if comparison.draft is None else _draft(comparison.draft),
            "undrafted": None if comparison.undrafted is None else str(comparison.undrafted),
            "missing": comparison.missing,
            "extra": comparison.extra,
            "matrices": [_matrix(matrix) for matrix in comparison.matrices],
        }


def verify_checkpoint(
    directory: Path,
    source: Path | None = None,
    thresholds: Thresholds | None = None,
    *,
    threads: int | None = None,
    progress: TextIO | None = None,
) -> Verification:
    """Check all of ``directory``, and with ``source`` what has become of that checkpoint's values.

    Where a conversion has left its manifest, every tensor is held against its checksum: a bit that has flipped gives
    another value that may be as good as the right one.

    Raises:
        Nvfp4SglError: ``source`` cannot be read.
    """
    original = verify(source) if source is not None else None
    try:
        ours = verify(directory)
        check_beside(directory, ours.config.vocab_size)
        has_manifest = (ours.inventory.directory / checksums.FILE).exists()
        differing = checksums.check(ours.inventory) if has_manifest else None
    except Nvfp4SglError as error:
        return Verification(directory, source, error=error)
    found, of_draft = (each(ours, threads=threads, progress=progress) for each in (scan, scan_draft))
    inspection = inspect(ours, found, differing, of_draft)
    comparison = None
    if original is not None:
        comparison = compare(ours, original, thresholds, threads=threads, progress=progress)
    return Verification(directory, source, inspection, comparison)


def _draft(comparison: Comparison) -> dict[str, Any]:
    matrices = comparison.matrices
    return {
        "matrices": len(matrices),
        "equal_matrices": sum(matrix.is_equal for matrix in matrices),
        "rms_max": number(max((matrix.rms for matrix in matrices), default=0.0)),
        "worst_block": number(max((matrix.worst.error for matrix in matrices), default=0.0)),
        "tensors": {"compared": comparison.tensors, "equal": comparison.equal_tensors},
        "missing": comparison.missing,
        "extra": comparison.extra,
    }


def _matrix(matrix: Compared) -> dict[str, Any]:
    return {
        "name": matrix.stem,
        "class": matrix.matrix_class.value,
        "layer": matrix.layer,
        "storage": matrix.storage.value,
        "source_storage": matrix.source_storage.value,
        "blocks": matrix.blocks,
        "equal_blocks": matrix.equal_blocks,
        "lossless": matrix.lossless,
        "rms": number(matrix.rms),
        "cosine": matrix.cosine,
        "worst": {"error": number(matrix.worst.error), "row": matrix.worst.row, "column": matrix.worst.column},
        "problem": matrix.problem,
    }
