"""Models all GEMMs of a pass through a model: sums, the baseline, and the goals.

A record keeps the sums of a design beside the constants of the cost model that made them, so that a later design is
compared with it only as long as both come from the same model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.sm100.cases import Case
from nvfp4_sgl.cutedsl_kernels.sm100.cost import B200, EXPERT_COUNTS_CYCLES, HANDOFF_SECONDS, Problem, cost

BASELINE = Path(__file__).parents[2] / "results" / "sm100_baseline.json"
"""The design before split-K for experts, overlapping launches and the merged shared expert, recorded by
``launch/bench_sm100 --modelled --tp 1 4 8 --record`` when the model was calibrated."""
DECODE_GOALS = {("flash", 1): 0.75, ("flash", 8): 0.6, ("pro", 8): 0.6}
"""One token's modelled sum over that of the baseline, by model and ranks."""
PREFILL_TOKENS = 8192
WHOLE_WAVES = 9472
"""Tokens of a prefill whose tiles of 256 by 256 are a multiple of 74 for nearly all GEMMs: 74 pairs of SMs."""
PREFILL_SHARE = 0.8
"""Floor over time of a product of ``PREFILL_TOKENS`` whose floor is LONG_FLOOR or more, at least."""
LONG_FLOOR = 25e-6
SHORT_ALLOWANCE = 6e-6
"""Seconds that a shorter GEMM may take beyond its floor."""


@dataclass(frozen=True)
class Step:
    """The sum of a pass.

    Attributes:
        launches: of GEMMs, in all layers.
        seconds: modelled.
        floor_seconds: no kernels are faster, one launch a GEMM and launches free of cost.
    """

    model: str
    ranks: int
    tokens: int
    launches: int
    seconds: float
    floor_seconds: float

    @property
    def name(self) -> tuple[str, int, int]:
        """A name that tells steps apart."""
        return self.model, self.ranks, self.tokens


def passes(cases: Iterable[Case]) -> dict[tuple[str, int, int], list[Case]]:
    """Cases by model, ranks and tokens."""
    found: dict[tuple[str, int, int], list[Case]] = {}
    for case in cases:
        found.setdefault((case.model, case.ranks, case.tokens), []).append(case)
    return found


def steps(cases: Iterable[Case]) -> list[Step]:
    """The sums over all GEMMs of each pass that ``cases`` have."""
    return [
        Step(
            *name,
            launches=sum(case.layers for case in found),
            seconds=sum(case.layers * cost(case.shape, case.problem).seconds for case in found),
            floor_seconds=sum(case.layers * case.problem.floor_seconds() for case in found),
        )
        for name, found in passes(cases).items()
    ]


def step_row(step: Step, baseline: Step | None) -> dict[str, Any]:
    """A step's line of the report, beside the same step of the baseline."""
    line: dict[str, Any] = {
        "model": step.model,
        "ranks": step.ranks,
        "tokens": step.tokens,
        "launches": step.launches,
        "floor us": round(step.floor_seconds * 1e6),
        "modelled us": round(step.seconds * 1e6),
    }
    if baseline is not None:
        goal = DECODE_GOALS.get((step.model, step.ranks)) if step.tokens == 1 else None
        line |= {
            "baseline us": round(baseline.seconds * 1e6),
            "of baseline": round(step.seconds / baseline.seconds, 3),
            "goal": "" if goal is None else f"{goal}: {'met' if step.seconds <= goal * baseline.seconds else 'MISSED'}",
        }
    return line


def goal_seconds(problem: Problem) -> float:
    """Seconds that a GEMM of a prefill may take."""
    floor = problem.floor_seconds()
    return floor / PREFILL_SHARE if floor >= LONG_FLOOR else floor + SHORT_ALLOWANCE


def prefill_excess(case: Case) -> float:
    """Seconds by which a GEMM of a prefill misses its goal; negative if it meets it."""
    return cost(case.shape, case.problem).seconds - goal_seconds(case.problem)


def persistent_gain(cases: Iterable[Case]) -> float:
    """Share of a pass, all of whose cases are given, that one kernel for experts' gate/up and down would win.

    Nothing like it is built. It would save a launch, filling the pipeline, and reading the experts' counts again, and
    would hand the hidden activations over through L2.
    """
    found = list(cases)
    saved = B200.launch_seconds - B200.overlap_seconds - HANDOFF_SECONDS
    saved += (B200.fill_cycles + EXPERT_COUNTS_CYCLES) / B200.clock_hz
    layers = sum(case.layers for case in found if case.product.gated and case.routed)
    return layers * saved / sum(case.layers * cost(case.shape, case.problem).seconds for case in found)


def record(found: Iterable[Step], path: Path) -> None:
    """Write what :func:`recorded` reads. How many clusters a design launches is its own affair, not the model's."""
    machine = {name: value for name, value in asdict(B200).items() if name != "clusters"}
    path.write_text(json.dumps({"machine": machine, "steps": [asdict(step) for step in found]}, indent=1) + "\n")


def recorded(path: Path = BASELINE) -> dict[tuple[str, int, int], Step]:
    """The steps of a record by name.

    Raises:
        ValueError: another cost model made them.
    """
    content = json.loads(path.read_text())
    other = {name: value for name, value in content["machine"].items() if getattr(B200, name, None) != value}
    if other:
        raise ValueError(f"{path.name}: expected the constants of cost.py, found {other}: record the old design again")
    found = [Step(**fields) for fields in content["steps"]]
    return {step.name: step for step in found}
