"""A block-scaled GEMM that others wrote for SM100 hardware gives the right numbers in the emulator: MXFP8 and MXFP4."""

from __future__ import annotations

import pytest

from tests.sm100.emulator import Options
from tests.sm100.support.scaled_gemm import ScaledGemm

pytest.importorskip("flashinfer")

CASES: dict[str, tuple[ScaledGemm, tuple[int, int, int], Options]] = {
    "E4M3": (ScaledGemm("e4m3", (128, 128), (1, 1)), (160, 160, 256), Options()),
    "E5M2, narrow": (ScaledGemm("e5m2", (128, 64), (1, 1)), (128, 96, 256), Options("random", 1)),
    "E4M3, pair": (ScaledGemm("e4m3", (256, 128), (2, 1)), (288, 128, 256), Options("random", 2)),
    "E2M1": (ScaledGemm("e2m1", (128, 128), (1, 1)), (160, 160, 512), Options("random", 3)),
    "E2M1, pair": (ScaledGemm("e2m1", (256, 192), (2, 1)), (288, 192, 256), Options()),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str) -> None:
    gemm, shape, options = CASES[case]
    right, statistics = gemm.run(shape, options)
    assert right
    kind = "mxf4" if gemm.kind == "e2m1" else "mxf8f6f4"
    assert any("tcgen05.mma" in opcode and f"kind::{kind}" in opcode for opcode in statistics.by_opcode())
