"""launch/bench_hopper_step: what needs no GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels import plan
from nvfp4_sgl.cutedsl_kernels.sm90.choose import H200_CLUSTERS
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.cutedsl_kernels.w4a16.operations import product
from tests.packaging.checkout import ROOT
from tests.sm90.support.products import random_tokens
from tests.sm90.test_operations import matrix
from tests.sm100.support.launcher import emulated_operations

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from benchmarks.hopper_step import GAIN_US, Gemm, Plans, Step, try_shapes

DENSE = Gemm("product", 4096, 1024, 1, 1, "bf16")
DOWN = Gemm("experts", 4096, 1024, 56, 257, "bf16", False, 8)


def plan_both() -> tuple[KernelShape, KernelShape]:
    return (
        plan.plan_w4a16(4096, 1024, 1, 1, "bf16", H200_CLUSTERS),
        plan.plan_w4a16_experts(4096, 1024, 56, 257, False, 8, "bf16", H200_CLUSTERS),
    )


def test_plans_are_seen_and_replaced() -> None:
    before, plans = plan_both(), Plans()
    with plans.active():
        assert plan_both() == before
        assert plans.planned == dict(zip((DENSE, DOWN), before, strict=True))
        plans.instead = {DOWN: replace(before[1], max_ctas=1)}
        assert plan_both() == (before[0], replace(before[1], max_ctas=1))
    assert plan_both() == before
    assert plans.calls == {DENSE: 2, DOWN: 2}


def test_gemms_with_copies_are_tried_with_them() -> None:
    plans = Plans()
    with plans.active():
        shape = plan.plan_w4a16(4096, 1024, 1, 1, "bf16", H200_CLUSTERS, copies=3)
    assert shape.copies == 3 and plans.planned == {replace(DENSE, copies=3): shape}
    assert {shape.copies for shape in replace(DENSE, copies=3).shapes} == {3} and shape in replace(
        DENSE, copies=3
    ).shapes


def test_each_launch_is_planned() -> None:
    """Operations remember their launches; another shape would not be tried, and one launch of a shape counted."""
    weights, tokens = matrix(16, 128, seed=1), random_tokens(1, 128, seed=2)
    tiled = TiledWeights.dense(weights.packed, weights.block_scale, weights.global_scale)
    gemm = Gemm("product", 16, 128, 1, 1, "bf16")
    with emulated_operations(name="sm_90a", gpu=H200_CLUSTERS) as runner:
        first, plans = product(tokens, tiled), Plans()
        with plans.active():
            planned = [product(tokens, tiled) for _ in range(2)]
            plans.instead = {gemm: KernelShape(16, output="bf16")}
            replaced = product(tokens, tiled)
        last = product(tokens, tiled)
    assert plans.calls == {gemm: 3}
    assert [key.shape.token_tile for key in runner.keys] == [8, 8, 8, 16, 8]
    assert all(torch.allclose(out.float(), first.float(), rtol=2.0**-7) for out in (*planned, replaced, last))


def test_all_shapes_but_the_narrowest_are_tried() -> None:
    assert {shape.token_tile for shape in replace(DENSE, rows=64).shapes} == {16, 32, 64}
    for gemm in (DENSE, DOWN):
        numbers = {(shape.split_k, shape.ctas_per_sm) for shape in gemm.shapes}
        assert {(1, 1), (1, 2), (1, 3), (3, 1)} <= numbers
        assert len(numbers) == len(gemm.shapes)
    gathering = replace(DOWN, gated=True, gathers=True)
    assert gathering.shapes and all(shape.gathers and shape.gated for shape in gathering.shapes)


class Fake(Step):
    """A step of 100 µs, in which two shapes have times of their own."""

    def __init__(self, gains: dict[Gemm, float]):
        self.requests, self.launches, self.largest_error = 1, dict.fromkeys((DENSE, DOWN), 4), 0.0
        self.plans, self.gains = Plans(), gains
        with self.plans.active():
            plan_both()

    def us(self, instead: dict[Gemm, KernelShape]) -> float:
        return 100 - sum(4 * self.gains[gemm] for gemm, shape in instead.items() if shape.split_k == 2)


def test_the_best_shapes_are_taken_together(capsys: pytest.CaptureFixture[str]) -> None:
    found = try_shapes(Fake({DENSE: GAIN_US + 0.1, DOWN: GAIN_US - 0.1}))
    assert found["us"] - found["best_us"] == pytest.approx(4 * (GAIN_US + 0.1))
    assert [gemm["launches"] for gemm in found["gemms"]] == [4, 4]
    assert min(us for *_, us in found["gemms"][1]["us"]) == pytest.approx(-(GAIN_US - 0.1))
    assert "as planned 100 µs, the best together 98 µs" in capsys.readouterr().out
    json.dumps(found)
