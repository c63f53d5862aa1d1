"""Measures what each kernel shape of Hopper's GEMMs adds to a decode step of Flash's first layers.

The step is captured again with another shape of one GEMM, in all layers that have it, and replayed: neighbours, their
CTAs on the same SMs and weights that are fetched ahead are those of a served step. Alone, or behind a kernel that
waits, the same GEMMs rank their shapes otherwise. In the end the step is captured with the best shape of each.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from benchmarks.families import relative_error
from benchmarks.hopper_runs import compile_all
from benchmarks.options import AT_ONCE, LAYERS, RANKS, output_file
from benchmarks.profile_decoder import FLASH_PROMPT, each_us, flash_model, next_tokens, prompt
from nvfp4_sgl.captured import CapturedDecode, capture
from nvfp4_sgl.cutedsl_kernels import plan
from nvfp4_sgl.cutedsl_kernels.common.shape import Output
from nvfp4_sgl.cutedsl_kernels.plan import Pin
from nvfp4_sgl.cutedsl_kernels.sm90.choose import expert_shapes, gemm_shapes
from nvfp4_sgl.cutedsl_kernels.sm90.shape import MIN_STAGES, KernelShape
from nvfp4_sgl.formats.checks import keeping_nothing
from nvfp4_sgl.standalone import Standalone

LIMIT = 0.1
"""Largest relative error of the logits against those of the planned shapes, which add in another order."""
GAIN_US = 0.3
"""What a shape must gain a launch to count as better: replays of one graph differ by about half as much."""
NARROWEST = 4
"""Token tiles that need more passes over the weights than this are not tried."""


@dataclass(frozen=True)
class Gemm:
    """The sizes that a GEMM is planned by. rows: tokens, or the rows of all experts' buffers. tile: of experts, else
    0."""

    kind: Literal["product", "experts"]
    features: int
    k: int
    rows: int
    matrices: int
    output: Output
    gated: bool = False
    tile: int = 0
    gathers: bool = False
    counts_ahead: bool = False
    copies: int = 0

    @classmethod
    def of_product(
        cls, features: int, k: int, rows: int, groups: int, output: Output, *_: object, copies: int = 0
    ) -> Gemm:
        """From the arguments of ``plan.plan_w4a16``."""
        return cls("product", features, k, rows, groups, output, copies=copies)

    @classmethod
    def of_experts(
        cls, features: int, k: int, rows: int, experts: int, gated: bool, tile: int, output: Output, _: object,
        gathers: bool = False, counts_ahead: bool = False,
    ) -> Gemm:  # fmt: skip
        """From the arguments of ``plan.plan_w4a16_experts``."""
        return cls("experts", features, k, rows, experts, output, gated, tile, gathers, counts_ahead)

    @property
    def shapes(self) -> list[KernelShape]:
        """The shapes worth trying."""
        if self.kind == "experts":
            shapes = [
                replace(shape, gathers=self.gathers, counts_ahead=self.counts_ahead)
                for shape in expert_shapes(self.k, self.tile, self.gated, self.output)
            ]
        else:
            found = gemm_shapes(self.k, self.rows, self.output)
            shapes = [
                replace(shape, copies=self.copies) for shape in found if shape.token_tile * NARROWEST >= self.rows
            ]
        return [shape for shape in shapes if shape.stages >= MIN_STAGES]

    def __str__(self) -> str:
        name = "gate, up" if self.gated else "down" if self.kind == "experts" else "dense"
        return f"{name} {self.matrices} × {self.features} × {self.k}"


class Plans:
    """The plans of a step's GEMMs.

    Attributes:
        planned: GEMMs that ran, and the shapes planned for them. calls: how often each was planned.
        instead: shapes to take instead.
    """

    def __init__(self) -> None:
        self.planned: dict[Gemm, KernelShape] = {}
        self.calls: Counter[Gemm] = Counter()
        self.instead: dict[Gemm, KernelShape] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """See and replace all plans inside the block, where each launch is planned."""
        with ExitStack() as stack:
            stack.enter_context(keeping_nothing())
            for name, of in (("plan_w4a16", Gemm.of_product), ("plan_w4a16_experts", Gemm.of_experts)):
                stack.enter_context(mock.patch.object(plan, name, partial(self._plan, getattr(plan, name), of)))
            yield

    def _plan(self, planned: Any, of: Any, *arguments: Any, pin: Pin | None = None, **named: Any) -> KernelShape:
        gemm = of(*arguments, **named)
        self.planned[gemm] = planned(*arguments, pin=pin, **named)
        self.calls[gemm] += 1
        return self.instead.get(gemm, self.planned[gemm])


class Step:
    """A decode step of so many requests, captured with one choice of shapes or another."""

    def __init__(self, model: Standalone, requests: int):
        self.plans, self.requests = Plans(), requests
        model.reset()
        for request in range(requests):
            model.extend({request: prompt(FLASH_PROMPT)})
        with self.plans.active():
            self._captured = CapturedDecode(model, requests)
        self._captured(next_tokens(requests))
        runs = 2  # one before the capture
        self.launches = {gemm: count // runs for gemm, count in self.plans.calls.items()}
        self.largest_error = 0.0
        self._logits = self._captured.logits.clone()

    def us(self, instead: dict[Gemm, KernelShape]) -> float:
        """Microseconds of the step with other shapes of some GEMMs.

        Raises:
            AssertionError: its logits are others.
        """
        self.plans.instead = instead
        with self.plans.active():
            graph = capture(self._captured.forward)
        us = each_us(graph.replay)
        self._check(self._captured.logits, instead)
        return us

    def _check(self, logits: Tensor, instead: dict[Gemm, KernelShape]) -> None:
        error = relative_error(logits, self._logits)
        assert error < LIMIT, f"{instead}: error {error:.3g} of the logits, expected below {LIMIT}"
        self.largest_error = max(self.largest_error, error)


def numbers(shape: KernelShape) -> tuple[int, int, int]:
    """Token tile, split of K, CTAs an SM."""
    return shape.token_tile, shape.split_k, shape.ctas_per_sm


def try_shapes(step: Step) -> dict[str, Any]:
    """Time every shape of each GEMM; the rows are printed as they come."""
    best: dict[Gemm, KernelShape] = {}
    rows = []
    for gemm, launches in step.launches.items():
        planned, base = step.plans.planned[gemm], step.us({})
        found = {shape: (step.us({gemm: shape}) - base) / launches for shape in gemm.shapes}
        shape = min(found, key=lambda each: found[each])
        if found[shape] < -GAIN_US:
            best[gemm] = shape
        print(
            f"| {step.requests} | {gemm} | {launches} | {numbers(planned)} {found.get(planned, 0):+.2f}"
            f" | {numbers(shape)} {found[shape]:+.2f} |",
            flush=True,
        )
        times = [[*numbers(shape), round(us, 2)] for shape, us in found.items()]
        rows.append(vars(gemm) | {"launches": launches, "planned": numbers(planned), "us": times})
    base, together = step.us({}), step.us(best)
    print(
        f"{step.requests}: as planned {base:.0f} µs, the best together {together:.0f} µs, largest error of the logits"
        f" {step.largest_error:.2g}",
        flush=True,
    )
    return {"requests": step.requests, "us": base, "best_us": together, "gemms": rows}


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="launch/bench_hopper_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tp",
        type=int,
        choices=RANKS,
        default=2,
        metavar="N",
        help="time one rank of N; nothing is reduced (default: 2)",
    )
    parser.add_argument("--layers", type=LAYERS, default=8, help="the first layers of Flash (default: 8)")
    parser.add_argument("--tokens", nargs="+", type=AT_ONCE, default=[1, 16, 64], help="requests of a step")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write the times here, as JSON")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device here; these kernels run on Hopper GPUs")
    torch.manual_seed(0)
    model = flash_model(args.layers, args.tp)
    shapes: list[KernelShape] = []
    seen = Plans()
    with seen.active():
        for count in args.tokens:
            for gemm in Step(model, count).launches:
                shapes += gemm.shapes
    compile_all([*seen.planned.values(), *shapes], model.config.swiglu_limit)
    chip, date = torch.cuda.get_device_name(), datetime.date.today().isoformat()
    print(f"{chip}, torch {torch.__version__}, {date}: Flash, {args.layers} layers, a rank of {args.tp}\n")
    print("| requests | GEMM | launches | planned (tile, split, CTAs an SM), µs a launch beside it | best |")
    print("| --- " * 5 + "|", flush=True)
    steps = [try_shapes(Step(model, count)) for count in args.tokens]
    if args.output:
        report = {"chip": chip, "torch": torch.__version__, "date": date, "layers": args.layers, "ranks": args.tp}
        args.output.write_text(json.dumps(report | {"steps": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
