"""GEMMs of half precision and of FP8 that others wrote for SM100 hardware give the right numbers in the emulator."""

from __future__ import annotations

import pytest

from tests.sm100.emulator import Options
from tests.sm100.support.dense_gemm import DenseGemm

pytest.importorskip("flashinfer")

Case = tuple[DenseGemm, tuple[int, int, int], Options]
HALF: dict[str, Case] = {
    "one CTA": (DenseGemm("BFloat16", "Float32", (128, 128), (1, 1)), (200, 136, 96), Options()),
    "64 rows, stored by threads": (
        DenseGemm("BFloat16", "BFloat16", (64, 128), (1, 1), tma_store=False), (128, 256, 96), Options("random", 1)
    ),
    "MN-major": (DenseGemm("Float16", "Float16", (128, 64), (1, 1), "mnm"), (136, 72, 96), Options("random", 1)),
    "pair": (DenseGemm("BFloat16", "Float32", (256, 128), (2, 1), "knn"), (200, 136, 96), Options("random", 2)),
    "pair of 64 rows": (
        DenseGemm("BFloat16", "Float32", (128, 128), (2, 1), "mkn"), (200, 136, 96), Options("random", 3)
    ),
    "2x2 multicast": (DenseGemm("Float16", "Float16", (256, 64), (2, 2)), (264, 136, 64), Options("random", 4)),
    "prefetching": (
        DenseGemm("BFloat16", "Float32", (128, 64), (1, 1), source="dense_gemm_persistent_prefetch"), (136, 72, 320),
        Options("random", 5),
    ),
}  # fmt: skip
NARROW: dict[str, Case] = {
    "one CTA": (DenseGemm("Float8E4M3FN", "Float32", (128, 128), (1, 1)), (200, 136, 160), Options("random", 1)),
    "64 rows": (DenseGemm("Float8E5M2", "Float16", (64, 64), (1, 1)), (72, 72, 160), Options()),
    "MN-major": (DenseGemm("Float8E5M2", "BFloat16", (128, 64), (1, 1), "mnm"), (144, 80, 160), Options("random", 2)),
    "pair": (DenseGemm("Float8E4M3FN", "Float32", (256, 128), (2, 1), "knn"), (200, 144, 160), Options("random", 3)),
}


@pytest.mark.parametrize(("kind", "cases", "case"), [
    (kind, cases, case) for kind, cases in (("f16", HALF), ("f8f6f4", NARROW)) for case in cases
])  # fmt: skip
def test_output_is_exact(kind: str, cases: dict[str, Case], case: str) -> None:
    gemm, shape, options = cases[case]
    right, statistics = gemm.run(shape, options)
    assert right
    assert any("tcgen05.mma" in opcode and f"kind::{kind}" in opcode for opcode in statistics.by_opcode())
    assert bool(statistics.engine_bytes["prefetch"]) == (case == "prefetching")
