"""Products long enough to use each operand stage several times, in tiles enough to go on in the middle of the ring."""

from __future__ import annotations

import pytest

from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Options
from tests.sm100.support.products import ProductCase

STRICT = Options(strict_tensor_waits=True)
RANDOM = Options("random", 7, strict_tensor_waits=True)
CASES = {
    "256, 2x1 pairs": (ProductCase(KernelShape(256, pair=True, shared_tokens=2), 250, features=1000, k=1600), RANDOM),
    "128, 2x2 pairs": (
        ProductCase(KernelShape(128, pair=True, shared_tokens=2, shared_weights=2), 250, features=1000, k=2304), STRICT
    ),
}  # fmt: skip
"""Two blocks of tiles on one cluster, each with more stages than there are, and ragged edges."""


@pytest.mark.parametrize("case", CASES)
def test_operand_stages_are_used_again(case: str) -> None:
    product, options = CASES[case]
    stages = -(-product.k // product.shape.tile_k)
    assert stages > product.shape.stages and stages % product.shape.stages
    call, _ = product.build()
    assert call.blocks >= 2
    product.check(options, clusters=1)
