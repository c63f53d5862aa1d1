"""All products of a pass through a model, modelled: one sum for each model, number of ranks and number of tokens.

A record keeps the sums of a design beside the constants of the cost model that made them, so that a later design is
compared with it only as long as both come from the same model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sm100_cases import Case

from nvfp4_sgl.cutedsl_kernels.sm100.cost import B200, cost

BASELINE = Path(__file__).parent / "results" / "sm100_baseline.json"
"""The design before split-K, overlapping launches and the merged shared expert, recorded by ``launch/bench_sm100
--modelled --ranks 1 4 8 --record`` when the model was calibrated."""


@dataclass(frozen=True)
class Step:
    """The sum of a pass.

    Attributes:
        launches: of products, in all layers.
        seconds: modelled.
        floor_seconds: no kernels are faster, one launch a product and launches free of cost.
    """

    model: str
    ranks: int
    tokens: int
    launches: int
    seconds: float
    floor_seconds: float

    @property
    def name(self) -> tuple[str, int, int]:
        """What tells steps apart."""
        return self.model, self.ranks, self.tokens


def steps(cases: Iterable[Case]) -> list[Step]:
    """The sums over all products of each pass that ``cases`` have."""
    passes: dict[tuple[str, int, int], list[Case]] = {}
    for case in cases:
        passes.setdefault((case.model, case.ranks, case.tokens), []).append(case)
    return [
        Step(
            *name,
            launches=sum(case.layers for case in found),
            seconds=sum(case.layers * cost(case.shape, case.problem).seconds for case in found),
            floor_seconds=sum(case.layers * case.problem.floor_seconds() for case in found),
        )
        for name, found in passes.items()
    ]


def step_row(step: Step) -> dict[str, Any]:
    """A step's line of the report."""
    return {
        "model": step.model,
        "ranks": step.ranks,
        "tokens": step.tokens,
        "launches": step.launches,
        "floor us": round(step.floor_seconds * 1e6),
        "modelled us": round(step.seconds * 1e6),
    }


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
