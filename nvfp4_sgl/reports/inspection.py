"""The report of ``nvfp4-sgl inspect``, for people and for programs (docs/formats.md has the fields)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvfp4_sgl.architectures import unread_fields
from nvfp4_sgl.checkpoint.classes import MatrixClass
from nvfp4_sgl.checkpoint.drafts import Draft
from nvfp4_sgl.checkpoint.findings import Finding
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.errors import Nvfp4SglError
from nvfp4_sgl.files import escaped, shown
from nvfp4_sgl.targets.choose import mode_of
from nvfp4_sgl.targets.requirements import check_target
from nvfp4_sgl.targets.storages import how
from nvfp4_sgl.targets.target import words

if TYPE_CHECKING:
    from nvfp4_sgl.checkpoint.scan import Scan

SHOWN = 20
"""Findings that are printed; the rest are counted."""

UNUSABLE_DRAFT = "; its draft cannot be served"
"""Part of a verdict on a decoder that is right."""


@dataclass(frozen=True)
class Inspection:
    """A checkpoint whose headers are right.

    Attributes:
        refused: by target, why a server would not load it there; ``None`` if it would. One rank.
        scan: of its values; ``None`` if they were not read.
        checksums: what differs from the manifest of a conversion; ``None`` if nothing was held against it.
        draft: what is bundled for drafting; ``None`` if nothing, or if ``draft_problem`` says why it cannot be used.
    """

    verified: Verified
    refused: dict[str, str | None]
    scan: Scan | None = None
    checksums: list[str] | None = None
    draft: Draft | None = None
    draft_problem: str | None = None

    @property
    def problems(self) -> list[Finding]:
        """Problems of the checkpoint itself; what single targets refuse is no problem."""
        found = list(self.scan.problems) if self.scan else []
        found += [Finding(None, "checksum", line) for line in self.checksums or ()]
        if all(self.refused.values()):
            found.insert(0, Finding(None, "not-served", f"no target serves it: {next(iter(self.refused.values()))}"))
        return found

    @property
    def notes(self) -> list[Finding]:
        """Notes: unknown fields of config.json, and findings in the values."""
        unknown = unread_fields(self.verified.raw)
        text = "is not known here and was not read: nothing that is computed depends on it"
        found = [Finding(None, "field-not-read", f"config.json: field {shown(name)} {text}") for name in unknown]
        if self.draft_problem is not None:
            found.append(Finding(None, "draft-not-usable", self.draft_problem))
        return found + (list(self.scan.notes) if self.scan else [])

    def as_json(self) -> dict[str, Any]:
        """The report as an object that JSON can hold."""
        summary = self.verified.summary
        draft = self.draft
        bundled = {
            "kind": summary.draft,
            "tensors": summary.skipped,
            "bytes": summary.skipped_bytes,
            "complete": self.draft_problem is None,
            "algorithm": draft and draft.kind.algorithm,
            "stages": draft and draft.stages,
            "block": draft and draft.block,
            "not_read": list(draft.not_read) if draft else [],
        }
        return {
            "directory": str(summary.directory),
            "format": summary.format,
            "tensors": len(self.verified.inventory.entries) - summary.skipped,
            "bytes": summary.nbytes,
            "draft": bundled if summary.skipped else None,
            "matrices": _matrices(self.verified),
            "others": [
                {"role": role.value, "tensors": summary.count(role), "bytes": summary.nbytes_of(role)}
                for role in summary.other_roles()
            ],
            "targets": {
                target: {
                    "serves": reason is None,
                    "reason": reason,
                    "runs": {storage.value: how(target, storage) for storage in _stored(summary)},
                }
                for target, reason in self.refused.items()
            },
            "values": _values(self.scan) if self.scan else None,
            "checksums": None if self.checksums is None else not self.checksums,
            "problems": [finding._asdict() for finding in self.problems],
            "notes": [finding._asdict() for finding in self.notes],
        }

    def lines(self) -> list[str]:
        """The report for a person; the last line is the verdict."""
        lines = [self.verified.summary.table()]
        for target, reason in self.refused.items():
            lines.append(f"{target:<17}{'serves it' if reason is None else f'refuses it: {reason}'}")
        lines += self.draft_lines()
        if self.scan is not None:
            lines += _value_lines(self.scan)
        if self.checksums == []:
            lines.append(f"checksums: all {len(self.verified.inventory.entries)} tensors match")
        lines += finding_lines(self.problems, self.notes)
        return [*lines, f"{self.verified.inventory.directory}: {self._verdict()}"]

    def draft_lines(self) -> list[str]:
        """The draft in a line, if one is there and complete."""
        return [] if self.draft is None else [f"{'draft':<17}{self.draft.describe()}"]

    def _verdict(self) -> str:
        if self.problems:
            return f"WRONG, {counted(len(self.problems), 'problem')}"
        notes = f", {counted(len(self.notes), 'note')}" if self.notes else ""
        is_whole = self.draft_problem is None
        rest = notes if is_whole else f"{UNUSABLE_DRAFT}{notes}"
        complete = "complete" if is_whole else "its decoder is complete"
        if self.scan is None:
            return f"{complete}, by its headers (--values reads the tensors){'' if is_whole else rest}"
        what = "values are right" if self.scan.whole else "scales are right (--values reads the other tensors)"
        return f"{complete}, and its {what}{rest}"


def inspect(
    verified: Verified,
    scan: Scan | None = None,
    checksums: list[str] | None = None,
    draft_scan: Scan | None = None,
) -> Inspection:
    """Ask every target whether it serves a checkpoint.

    Args:
        scan, draft_scan: what the values of the decoder and of the draft gave. checksums: what differs from them.
    """
    refused: dict[str, str | None] = {}
    for target in words():
        try:
            mode = mode_of(target, verified.raw.get("activation_mode"))
            check_target(target, verified.config, 1, verified.inventory.storage, mode)
            refused[target] = None
        except Nvfp4SglError as error:
            refused[target] = str(error).removeprefix(f"target {target}: ")
    draft, problem = None, None
    if not verified.is_dummy:
        try:
            draft = verified.draft()
        except Nvfp4SglError as error:
            problem = str(error)
    if draft_scan is not None and draft_scan.problems:
        wrong = draft_scan.problems
        said = "; ".join(finding_lines(wrong, ()))
        draft, problem = None, f"draft: values of {counted(len(wrong), 'tensor')} are wrong: {said}"
    return Inspection(verified, refused, scan, checksums, draft, problem)


def broken_as_json(directory: object, error: Nvfp4SglError) -> dict[str, Any]:
    """The report on a checkpoint that cannot be opened, or whose headers or configuration are wrong."""
    return {"directory": str(directory), "problems": [Finding(None, "structure", str(error))._asdict()]}


def finding_lines(problems: Sequence[Finding], notes: Sequence[Finding]) -> list[str]:
    """The first of each as lines of text."""
    lines = []
    for word, findings in (("problem", problems), ("note", notes)):
        for finding in findings[:SHOWN]:
            is_named = finding.tensor is None or finding.tensor in finding.message
            lines.append(escaped(f"{word}: {'' if is_named else f'{finding.tensor}: '}{finding.message}"))
        if len(findings) > SHOWN:
            lines.append(f"and {counted(len(findings) - SHOWN, f'more {word}')}")
    return lines


def counted(count: int, noun: str) -> str:
    """``1 matrix``, ``2 problems``."""
    plural = "matrices" if noun == "matrix" else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def table(rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Columns as wide as their widest cell; the first ``left`` of them begin at the left."""
    rows = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def number(value: float) -> float | None:
    """``value`` as JSON has it: ``None`` if it is not finite."""
    return value if math.isfinite(value) else None


def _stored(summary: CheckpointSummary) -> list[Storage]:
    return [storage for storage in Storage if storage in set(summary.storages.values())]


def _matrices(verified: Verified) -> list[dict[str, Any]]:
    """Matrices and bytes by class and storage."""
    inventory = verified.inventory
    found: dict[tuple[MatrixClass, Storage], tuple[int, int]] = {}
    for stem, storage in verified.summary.storages.items():
        names = (inventory.part_name(stem, part) for part in storage.decoder.parts)
        nbytes = sum(inventory.entries[name].nbytes for name in names if name in inventory.entries)
        count, total = found.get((MatrixClass.of(stem), storage), (0, 0))
        found[MatrixClass.of(stem), storage] = count + 1, total + nbytes
    return [
        {
            "class": key.value,
            "storage": storage.value,
            "matrices": found[key, storage][0],
            "bytes": found[key, storage][1],
        }
        for key in MatrixClass
        for storage in Storage
        if (key, storage) in found
    ]


def _values(scan: Scan) -> dict[str, Any]:
    return {
        "read": "all" if scan.whole else "scales",
        "bytes": scan.nbytes,
        "mxfp4": {"matrices": scan.converted, "not_exact": scan.inexact},
        "scales": [
            {
                "class": key.matrix_class.value,
                "storage": key.storage.value,
                "part": key.part,
                "count": range.count,
                "min": number(range.low),
                "max": number(range.high),
                "zero": range.zero,
                "saturated": range.saturated,
                "nan": range.nan,
                "infinite": range.infinite,
                "negative": range.negative,
            }
            for key, range in _sorted(scan)
        ],
    }


def _value_lines(scan: Scan) -> list[str]:
    rows = [("class", "storage", "scales", "min > 0", "max", "zero", "448", "bad")]
    for key, range in _sorted(scan):
        bad = range.nan + range.infinite + range.negative
        cells = (f"{range.low:.3g}", f"{range.high:.3g}", str(range.zero), str(range.saturated), str(bad))
        rows.append((key.matrix_class.value, key.storage.value, key.part, *cells))
    lines = ["", *table(rows, left=3), ""] if len(rows) > 1 else []
    if scan.converted:
        exact = scan.converted - scan.inexact
        lines.append(f"MXFP4 read as NVFP4, every value as it is: {exact} of {scan.converted} matrices")
    return lines


def _sorted(scan: Scan) -> list[tuple[Any, Any]]:
    classes, storages = list(MatrixClass), list(Storage)
    return sorted(
        scan.scales.items(),
        key=lambda item: (classes.index(item[0].matrix_class), storages.index(item[0].storage), item[0].part),
    )
