"""Fused MoE GEMMs that others wrote for SM100 hardware give the right codes, scales and sums in the emulator."""

from __future__ import annotations

import pytest

from tests.sm100.emulator import Options
from tests.sm100.support.finalizing_moe_gemm import run_finalizing_moe
from tests.sm100.support.fused_moe_gemm import run_fused_moe

pytest.importorskip("flashinfer")

EXPERTS = [70, 150, 0, 5]
"""Tokens of each: one expert without any, one with more than a tile."""


@pytest.mark.parametrize(("tile", "cluster", "options"), [
    ((128, 128), (1, 1), Options()),
    ((128, 128), (1, 1), Options("random", 1)),
    ((256, 128), (2, 1), Options("random", 2)),
], ids=["one CTA", "random", "pair, random"])  # fmt: skip
def test_codes_and_scales_are_right(tile: tuple[int, int], cluster: tuple[int, int], options: Options) -> None:
    right, statistics = run_fused_moe(tile, cluster, EXPERTS, 128, 256, options)
    assert right
    counts = statistics.by_opcode()
    assert counts["cp.async.cg.shared.global"] and counts["cvt.rn.satfinite.e2m1x2.f32"]


@pytest.mark.parametrize(("tile", "cluster", "options"), [
    ((128, 128), (1, 1), Options()),
    ((256, 128), (2, 1), Options("random", 1)),
], ids=["one CTA", "pair, random"])  # fmt: skip
def test_weighted_sums_are_right(tile: tuple[int, int], cluster: tuple[int, int], options: Options) -> None:
    right, statistics = run_finalizing_moe(tile, cluster, EXPERTS, 256, 256, options)
    assert right
    assert any(opcode.startswith("cp.reduce.async.bulk") for opcode in statistics.by_opcode())
