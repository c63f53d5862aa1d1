"""Judges the GEMMs that :mod:`.hopper` has timed by their goals, row by row.

Beside Marlin: 1.3 times as fast up to 64 tokens where the weights are 8 MB or more, elsewhere no slower.
Of a copy's bandwidth up to 16 tokens: 60 % from 16 MB of weights. From 64 MB: 80 %.
Of the rate of bf16 GEMMs: 60 % from 4096 tokens a matrix, of experts from 256 rows each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Timed:
    """The figures that goals are judged by.

    Attributes:
        what: the GEMM and its number of tokens. tokens: of all. rows_each: of a matrix, a mean for experts.
        weights: MB that are read. of_marlin: Marlin's time by ours, if it ran. of_copy, of_rate: parts of a copy's
            bandwidth and of the rate of bf16 GEMMs.
    """

    what: str
    tokens: int
    rows_each: float
    weights: float
    of_marlin: float | None
    of_copy: float
    of_rate: float
    is_experts: bool = False


@dataclass(frozen=True)
class Goal:
    """A ratio that a row must reach."""

    name: str
    least: float
    found: float


def goals(row: Timed) -> Iterator[Goal]:
    """The goals of a row."""
    if row.of_marlin is not None:
        is_small = row.tokens <= 64 and row.weights >= 8
        name = "1.3 times Marlin up to 64 tokens from 8 MB" if is_small else "no slower than Marlin elsewhere"
        yield Goal(name, 1.3 if is_small else 1.0, row.of_marlin)
    if row.tokens <= 16 and row.weights >= 16:
        least = 0.8 if row.weights >= 64 else 0.6
        yield Goal(f"{least:.0%} of a copy from {64 if least == 0.8 else 16} MB", least, row.of_copy)
    if row.rows_each >= (256 if row.is_experts else 4096):
        yield Goal("60 % of bf16 products from 4096 rows (experts: 256 each)", 0.6, row.of_rate)


def verdict(rows: Iterable[Timed]) -> list[str]:
    """A line for each goal: how many rows meet it, and which do not."""
    found: dict[str, list[tuple[Timed, Goal]]] = {}
    for row in rows:
        for goal in goals(row):
            found.setdefault(goal.name, []).append((row, goal))
    lines = []
    for name, rated in found.items():
        missed = [f"{row.what} ({goal.found:.2f})" for row, goal in rated if goal.found < goal.least]
        words = f"{name}: {len(rated) - len(missed)} of {len(rated)} rows"
        lines.append(f"{words}; missed by {', '.join(missed)}" if missed else words)
    return lines
