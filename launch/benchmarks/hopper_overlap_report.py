"""The report of ``launch/bench_hopper_overlap``: rows, and the constants that follow from them. Plain Python.

A fit has three constants, in µs a launch, for each of two kernels in front: a small one, beside which a GEMM's CTAs
find room, and a GEMM, which leaves room on few SMs before it ends.

* ``overlap``: hidden of a GEMM that reads nothing before its wait.
* ``weights``: hidden beyond that where the weights of the first stages are sent for before the wait (dense GEMMs).
* ``experts``: hidden beyond ``overlap`` where counts are read and weights sent for before the wait (the down GEMM).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Ahead = Literal["nothing", "weights", "counts and weights"]
"""What a GEMM reads before its wait."""
HEADER = (
    "| TP | GEMM | groups × features × K | tokens | reads ahead | alone us | weights alone us | behind a GEMM us"
    " | hidden us (share) | behind a small kernel us | hidden us (share) |\n" + "| --- " * 11 + "|"
)
LAYER_HEADER = (
    "| TP | tokens | launches | ordinary us | overlapped, down waits first us | overlapped us | sum of parts us |\n"
    + "| --- " * 7
    + "|"
)
FIT_HEADER = "| tokens | in front | constant | us (least to most) | rows |\n" + "| --- " * 5 + "|"


@dataclass(frozen=True)
class Times:
    """Microseconds of the same launches, made the ordinary way and as programmatic dependents (PDL)."""

    ordinary: float
    overlapped: float

    @property
    def hidden(self) -> float:
        """Microseconds that overlap takes away."""
        return self.ordinary - self.overlapped

    def less(self, other: Times) -> Times:
        return Times(self.ordinary - other.ordinary, self.overlapped - other.overlapped)

    def over(self, count: int) -> Times:
        return Times(self.ordinary / count, self.overlapped / count)


@dataclass(frozen=True)
class Row:
    """A GEMM's times a launch.

    Attributes:
        shape: token tile, split of K, CTAs an SM.
        floor_us: its weights at the bandwidth of a copy. The rest of a launch alone is launch, fill and epilogue.
        behind_gemm: one launch after the other, of the GEMM alone.
        behind_small: by turns with a small kernel, whose own time in such a chain is taken off.
    """

    ranks: int
    name: str
    groups: int
    features: int
    k: int
    tokens: int
    ahead: Ahead
    shape: tuple[int, int, int]
    floor_us: float
    behind_gemm: Times
    behind_small: Times

    def share(self, times: Times) -> float:
        """The part of launch, fill and epilogue that overlap hides."""
        exposed = times.ordinary - self.floor_us
        return times.hidden / exposed if exposed > 0 else 0.0

    def text(self) -> str:
        cells = [
            f"{times.overlapped:.2f} | {times.hidden:.2f} ({self.share(times):.0%})"
            for times in (self.behind_gemm, self.behind_small)
        ]
        size = f"{self.groups} × {self.features} × {self.k}"
        alone = f"{self.behind_gemm.ordinary:.2f} | {self.floor_us:.2f}"
        first, *others = self.name.split(" + ")
        name = f"{first} + {len(others)}" if others else first
        return f"| {self.ranks} | {name} | {size} | {self.tokens} | {self.ahead} | {alone} | {' | '.join(cells)} |"


@dataclass(frozen=True)
class LayerRow:
    """The GEMMs of a layer in their order, with small kernels where the layer has kernels.

    Attributes:
        launches: of a layer, small kernels included.
        waiting, ahead: microseconds of a layer whose down GEMM waits before it reads counts, and of one that need not;
            both have the ordinary launches' time beside them.
        parts_us: what ``ahead`` would be overlapped if each launch took what it takes in a chain of its own.
    """

    ranks: int
    tokens: int
    launches: int
    waiting: Times
    ahead: Times
    parts_us: float

    def text(self) -> str:
        overlapped = f"{self.waiting.overlapped:.2f} | {self.ahead.overlapped:.2f}"
        sizes = f"{self.ranks} | {self.tokens} | {self.launches}"
        return f"| {sizes} | {self.ahead.ordinary:.2f} | {overlapped} | {self.parts_us:.2f} |"


def constant(values: Iterable[float]) -> dict[str, float]:
    """The median of what rows give, with its range; empty without rows."""
    found = sorted(values)
    if not found:
        return {}
    return {"us": statistics.median(found), "least": found[0], "most": found[-1], "rows": len(found)}


def fit(rows: Sequence[Row], layers: Sequence[LayerRow]) -> dict[str, Any]:
    """The constants by the number of tokens and the kernel in front; medians over the numbers of ranks."""
    return {
        str(tokens): {
            "small": _behind_small([row for row in rows if row.tokens == tokens]),
            "gemm": _behind_gemm(
                [row for row in rows if row.tokens == tokens], [layer for layer in layers if layer.tokens == tokens]
            ),
        }
        for tokens in dict.fromkeys(row.tokens for row in rows)
    }


def _behind_small(rows: Sequence[Row]) -> dict[str, Any]:
    hidden = {ahead: [row.behind_small.hidden for row in rows if row.ahead == ahead] for ahead in _AHEAD}
    waits = {row.ranks: row.behind_small.hidden for row in rows if row.ahead == "nothing" and row.name == DOWN}
    experts = [
        row.behind_small.hidden - waits[row.ranks]
        for row in rows
        if row.ahead == "counts and weights" and row.ranks in waits
    ]
    return _constants(hidden["nothing"], hidden["weights"], experts)


def _behind_gemm(rows: Sequence[Row], layers: Sequence[LayerRow]) -> dict[str, Any]:
    """Down follows gates and ups in a layer, and its gain is taken from there; the rest from chains of one GEMM."""
    hidden = {ahead: [row.behind_gemm.hidden for row in rows if row.ahead == ahead] for ahead in _AHEAD}
    experts = [layer.waiting.overlapped - layer.ahead.overlapped for layer in layers]
    return _constants(hidden["nothing"], hidden["weights"], experts)


DOWN = "experts.w2"
_AHEAD: tuple[Ahead, ...] = ("nothing", "weights", "counts and weights")


def _constants(nothing: list[float], weights: list[float], experts: list[float]) -> dict[str, Any]:
    overlap = constant(nothing)
    beyond = constant(value - overlap["us"] for value in weights) if overlap else {}
    return {"overlap": overlap, "weights": beyond, "experts": constant(experts)}


def fit_lines(found: dict[str, Any]) -> list[str]:
    """The fit as a table's lines."""
    return [
        f"| {tokens} | {front} | {name} | {one['us']:.2f} ({one['least']:.2f} to {one['most']:.2f}) | {one['rows']} |"
        for tokens, fronts in found.items()
        for front, constants in fronts.items()
        for name, one in constants.items()
        if one
    ]
