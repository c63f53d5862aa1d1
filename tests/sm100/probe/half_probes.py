"""tcgen05.mma on bf16, as Triton makes it of ``tl.dot``; CuTeDSL's layouts decide where operands and results lie."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch

from tests.sm100.hardware.case import Case, untouched
from tests.sm100.probe.probe import Probe
from tests.sm100.support.one_tile_gemm import OneTileGemm


class HalfTile(OneTileGemm):
    """On the default stream."""

    @cute.jit
    def __call__(self, a: Any, b: Any, c: Any) -> None:
        self.launch(a, b, c, None)


def bf16_tile(name: str, shape: tuple[int, int, int], ctas: int) -> Probe:
    """Small integers, so that every partial sum is exact."""
    m, n, k = shape
    random = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-8, 9, (rows, k), generator=random).bfloat16() for rows in (m, n))
    case = Case(
        name,
        HalfTile(cutlass.BFloat16, shape, ctas, ("K_SW128", "K_SW64"), ("32x32b", 16)),
        {"a": a, "b": b},
        {"c": untouched((m, n), torch.float32)},
        timed=True,
    )
    expected = (a.double() @ b.double().T).float().numpy()
    return Probe(case, f"tcgen05.mma.cta_group::{ctas}.kind::f16 on swizzled bf16 tiles", {"c": expected})


def probes() -> list[Probe]:
    return [bf16_tile("bf16 MMA", (128, 64, 64), 1), bf16_tile("bf16 MMA of a pair of CTAs", (256, 64, 64), 2)]
