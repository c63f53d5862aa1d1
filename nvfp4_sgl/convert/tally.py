"""Counts and errors of converted matrices by class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nvfp4_sgl.checkpoint.classes import MatrixClass

SHOWN = 5
"""Matrices without an exact form that are named."""


@dataclass
class ClassTally:
    """Counts and errors of one class.

    Attributes:
        exact: MXFP4 matrices that were cast with no change of value; ``quantised``: matrices that lost something.
        error, square: sums of squares of their errors and of their values.
        inexact: MXFP4 matrices that had no exact form, among the quantised; reason by stem.
    """

    exact: int = 0
    quantised: int = 0
    error: float = 0.0
    square: float = 0.0
    inexact: dict[str, str] = field(default_factory=dict)

    @property
    def relative_rms(self) -> float:
        """Root mean square of the errors of quantised matrices over that of their values."""
        return float((self.error / self.square) ** 0.5) if self.square else 0.0

    def add(self, other: ClassTally) -> None:
        self.exact += other.exact
        self.quantised += other.quantised
        self.error += other.error
        self.square += other.square
        self.inexact |= other.inexact


class Tally:
    """Tallies by class."""

    def __init__(self) -> None:
        self.classes = {kind: ClassTally() for kind in MatrixClass}

    def add(self, other: Tally) -> None:
        for kind, tally in other.classes.items():
            self.classes[kind].add(tally)

    def losses(self) -> dict[str, Any]:
        """By class of matrices that were written anew: how many exactly, how many not, and the error of those."""
        return {
            kind.value: {
                "exact_casts": of.exact,
                "quantised": of.quantised,
                "relative_rms_error": float(f"{of.relative_rms:.4g}"),
                "without_exact_form": dict(sorted(of.inexact.items())),
            }
            for kind, of in self.classes.items()
            if of.exact or of.quantised
        }

    def table(self) -> list[str]:
        """A line for each class of which something was cast or quantised, under a head."""
        lines = [f"{'class':<11}{'exact casts':>12}{'quantised':>11}{'relative RMS error of these':>29}"]
        for kind, of in self.classes.items():
            if of.exact or of.quantised:
                error = f"{of.relative_rms:.3%}" if of.quantised else "-"
                lines.append(f"{kind.value:<11}{of.exact:>12}{of.quantised:>11}{error:>29}")
        return lines if len(lines) > 1 else ["no matrix was cast or quantised"]

    def inexact(self) -> list[str]:
        """MXFP4 matrices that had no exact form and were quantised, each with the reason; the first of them."""
        reasons = {stem: reason for of in self.classes.values() for stem, reason in of.inexact.items()}
        if not reasons:
            return []
        lines = [f"{len(reasons)} MXFP4 matrices have no exact NVFP4 form and were quantised:"]
        lines += [f"  {stem}: {reason}" for stem, reason in list(reasons.items())[:SHOWN]]
        return lines + ([f"  and {len(reasons) - SHOWN} more"] if len(reasons) > SHOWN else [])

    def as_json(self) -> dict[str, Any]:
        return {kind.value: asdict(tally) for kind, tally in self.classes.items() if tally != ClassTally()}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Tally:
        tally = cls()
        for kind, fields in raw.items():
            tally.classes[MatrixClass(kind)] = ClassTally(**fields)
        return tally
