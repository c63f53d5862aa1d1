"""A half-precision GEMM that others wrote for SM100 hardware gives the right numbers in the emulator."""

from __future__ import annotations

import pytest

from tests.sm100.emulator import Options

pytest.importorskip("flashinfer")

Case = tuple[str, str, tuple[int, int], tuple[int, int], str, bool, tuple[int, int, int], Options]
CASES: dict[str, Case] = {
    "one CTA": ("BFloat16", "Float32", (128, 128), (1, 1), "kkn", True, (200, 136, 96), Options()),
    "64 rows, stored by threads": (
        "BFloat16", "BFloat16", (64, 128), (1, 1), "kkn", False, (128, 256, 96), Options("random", 1)
    ),
    "MN-major": ("Float16", "Float16", (128, 64), (1, 1), "mnm", True, (136, 72, 96), Options("random", 1)),
    "pair": ("BFloat16", "Float32", (256, 128), (2, 1), "knn", True, (200, 136, 96), Options("random", 2)),
    "pair of 64 rows": ("BFloat16", "Float32", (128, 128), (2, 1), "mkn", True, (200, 136, 96), Options("random", 3)),
    "2x2 multicast": ("Float16", "Float16", (256, 64), (2, 2), "kkn", True, (264, 136, 64), Options("random", 4)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_output_is_exact(case: str) -> None:
    from tests.sm100.support.dense_half_gemm import run_half_gemm

    right, statistics = run_half_gemm(*CASES[case])
    assert right
    assert any("tcgen05.mma" in opcode and "kind::f16" in opcode for opcode in statistics.by_opcode())
