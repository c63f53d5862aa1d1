"""Credits of what SM100's GEMMs do before they wait for the kernel in front, by constants that a Hopper GPU gave.

``cost``, by which kernels are chosen, credits ``Machine.overlap_seconds`` a launch and nothing else. Before its wait a
dense GEMM also sets up and sends for the weights of its first stages. Experts' GEMMs read their counts besides. How
much of that is hidden depends on the kernel in front: beside a small one a GEMM's CTAs find room, beside a GEMM they do
on the SMs that this one has left.

The constants (:class:`Hidden`) come from one place, ``launch/results/hopper_overlap_h200.json``, if it is there. To put
measured ones in:

1. On an H200: ``launch/bench_hopper_overlap --output launch/results/hopper_overlap_h200.json``.
2. Anywhere: ``launch/bench_sm100 --modelled``. Its last table before the shapes then has sums with these credits.
3. Copy that table to ``launch/results/sm100_modelled.md``.

Values without that file are those of the model: 0.5 µs for the launch (flashinfer-ai/flashinfer#2277), nothing for the
rest. Of the rest one value is measured in another way: in a decode step of one token on an H200 the down GEMM gained
nothing by counts that it reads ahead, behind gates and ups (``launch/results/hopper_step_h200.md``, 2026-11-27).

Times of a Hopper GPU are taken for SM100 as they are: launches, the way from memory and barriers take about as long.
No constant hides more than the model has: the launch itself, then set-up, counts, the way of the first weights, and the
loading of as many stages as a ring holds, less their multiplication.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sm100.cases import Case
from nvfp4_sgl.cutedsl_kernels.sm100.cost import B200, EXPERT_COUNTS_CYCLES, Problem, cost, multiply_cycles
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape

CALIBRATION = Path(__file__).parents[2] / "results" / "hopper_overlap_h200.json"


@dataclass(frozen=True)
class Hidden:
    """Seconds of a launch that overlap hides behind one kind of kernel.

    Attributes:
        overlap: of a GEMM that reads nothing before its wait.
        weights: more, of one that sends for the weights of its first stages.
        experts: more than ``overlap``, of one that also reads its experts' counts.
    """

    overlap: float = B200.overlap_seconds
    weights: float = 0.0
    experts: float = 0.0


@dataclass(frozen=True)
class Overlap:
    """The constants: behind a small kernel, and behind a GEMM."""

    small: Hidden = Hidden()
    gemm: Hidden = Hidden()

    def behind(self, case: Case) -> Hidden:
        """Down follows gates and ups; all others follow a small kernel, which makes their tokens."""
        return self.gemm if case.routed and not case.product.gated else self.small


NOTHING_TAKES_TIME = Overlap(*(Hidden(weights=math.inf, experts=math.inf) for _ in range(2)))
"""A bound: all that a GEMM does before its wait takes no time."""


def calibrated(tokens: int, path: Path = CALIBRATION) -> Overlap | None:
    """The constants that ``launch/bench_hopper_overlap`` fitted for a number of tokens; None without its file.

    Raises:
        ValueError: the file lacks one of them.
    """
    if not path.exists():
        return None
    fronts = json.loads(path.read_text()).get("fit", {}).get(str(tokens), {})
    return Overlap(*(_hidden(fronts, front, f"{path.name}: fit.{tokens}") for front in ("small", "gemm")))


def _hidden(fronts: dict[str, Any], front: str, place: str) -> Hidden:
    found = {}
    for name in ("overlap", "weights", "experts"):
        us = fronts.get(front, {}).get(name, {}).get("us")
        if not isinstance(us, int | float):
            raise ValueError(
                f"{place}.{front}.{name}.us: expected microseconds, found {us!r}; write it again with"
                " launch/bench_hopper_overlap --output"
            )
        found[name] = us * 1e-6
    return Hidden(**found)


def counts_seconds(shape: KernelShape) -> float:
    """Seconds until a kernel that reads counts ahead knows its tiles."""
    return EXPERT_COUNTS_CYCLES / B200.clock_hz if shape.counts_ahead else 0.0


def ahead_seconds(shape: KernelShape, problem: Problem) -> float:
    """Modelled seconds of all that a launch does before its wait.

    The tokens' way from memory is no part of it, nor is the multiplication of the stages that it has sent for.
    """
    if shape.waits_first:
        return 0.0
    found = cost(shape, problem)
    of_sm = found.waves * math.ceil(math.ceil(problem.k / shape.tile_k) / shape.split_k)
    sent = min(float(shape.stages), of_sm)
    multiplied = sent * multiply_cycles(shape) / B200.clock_hz
    loading = max(0.0, sent / of_sm * found.body_seconds - multiplied)
    way = (B200.fill_cycles - B200.latency_cycles) / B200.clock_hz
    return counts_seconds(shape) + way + loading


def credited_seconds(case: Case, overlap: Overlap) -> float:
    """Modelled seconds of a launch less what overlap hides of it."""
    shape, hidden = case.shape, overlap.behind(case)
    wanted = hidden.experts if shape.counts_ahead else hidden.weights
    ahead = min(max(wanted, 0.0), ahead_seconds(shape, case.problem))
    launch = min(max(hidden.overlap, 0.0), B200.launch_seconds)
    return cost(shape, case.problem).alone_seconds - launch - ahead


def overlap_row(found: Iterable[Case], overlap: Overlap | None) -> dict[str, Any]:
    """A line of the report: a pass, all of whose cases are given, without credits, with them, and the bounds.

    Args:
        overlap: measured constants, if there are any.
    """
    cases = list(found)
    modelled = sum(case.layers * cost(case.shape, case.problem).seconds for case in cases)
    counts = sum(case.layers * counts_seconds(case.shape) for case in cases)

    def credited(constants: Overlap) -> int:
        return round(sum(case.layers * credited_seconds(case, constants) for case in cases) * 1e6)

    return {
        "model": cases[0].model,
        "ranks": cases[0].ranks,
        "tokens": cases[0].tokens,
        "modelled us": round(modelled * 1e6),
        "counts in no time us": round((modelled - counts) * 1e6),
        "all in no time us": credited(NOTHING_TAKES_TIME),
        "by an H200's constants us": "not measured" if overlap is None else credited(overlap),
    }
