"""Hopper's GEMMs of FP8 weights on a Hopper GPU: every kernel shape against dequantised weights, exactness, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels import plan
from nvfp4_sgl.cutedsl_kernels.sm90.choose import gemm_shapes
from nvfp4_sgl.cutedsl_kernels.sm90.fp8_layout import LARGEST_EXPONENT, LEAST_EXPONENT
from nvfp4_sgl.cutedsl_kernels.sm90.shape import GEMM_TOKEN_TILES, MIN_STAGES, KernelShape
from nvfp4_sgl.cutedsl_kernels.w8a16 import operations
from nvfp4_sgl.cutedsl_kernels.w8a16.operand import Fp8TiledWeights
from nvfp4_sgl.formats import ue8m0
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from tests.support import native
from tests.support.hopper_results import assert_close, tokens
from tests.support.sanitized import one_of_each_sanitized

pytestmark = pytest.mark.gpu

TILES = GEMM_TOKEN_TILES["fp8"]
SHAPES = [shape for shape in gemm_shapes(2112, TILES[-1], "bf16", "fp8") if shape.stages >= MIN_STAGES]
SANITIZED = {(8, 8), (16, 1), (32, 4), (64, 2), (128, 1)}
"""Token tile and split of K of the shapes that run under compute-sanitizer, too."""


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    if native.targets() != ("sm_90a",):
        pytest.skip("these kernels are made for Hopper")
    torch.manual_seed(0)
    yield


def weights(groups: int, features: int, k: int, exponents: tuple[int, int] = (-12, -6)) -> MxFp8Tensor:
    """All finite codes, with another exponent for each row and 64 of K."""
    codes = torch.randint(0, 127, (groups, features, k), dtype=torch.uint8, device="cuda")
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, device="cuda") << 7
    low, high = (exponent + ue8m0.BIAS for exponent in exponents)
    scale = torch.randint(low, high + 1, (groups, features, k // 64), dtype=torch.uint8, device="cuda")
    return MxFp8Tensor(codes.view(torch.float8_e4m3fn), scale.repeat_interleave(2, dim=-1))


@pytest.mark.parametrize("shape", one_of_each_sanitized(SHAPES, SANITIZED), ids=str)
def test_every_shape(shape: KernelShape) -> None:
    """Ragged features and tokens, several tiles of each, groups; launched in a row, each on another's heels."""
    rows = shape.token_tile + 5
    plain = weights(2, 1160, 2112)
    packed = Fp8TiledWeights.of(plain)
    # Made after the weights: a GEMM loads these before the launch before it has ended.
    x = tokens(rows, 2, 2112)
    with mock.patch.object(plan, "plan_w4a16", mock.Mock(return_value=shape)):
        outs = [torch.full((rows, 2, 1160), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        for out in outs:
            operations.product(x, packed, out=out)
    for group in range(2):
        assert_close(outs[0][:, group], x[:, group], plain.dequantize()[group])
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("tile", TILES)
def test_expansion_is_exact(tile: int) -> None:
    """Tokens that are the unit matrix give the weights: all finite codes with all exponents, bit for bit."""
    plain = weights(1, 256, 128, (LEAST_EXPONENT, LARGEST_EXPONENT))
    unit = torch.eye(128, dtype=torch.bfloat16, device="cuda")
    with mock.patch.object(plan, "plan_w4a16", mock.Mock(return_value=KernelShape(tile, output="fp32", weights="fp8"))):
        found = operations.product(
            unit, Fp8TiledWeights.of(MxFp8Tensor(plain.codes[0], plain.scale[0])), dtype=torch.float32
        )
    assert torch.equal(found, plain.dequantize()[0].T)


@pytest.mark.parametrize("rows", [1, 7, 64, 300, 4096])
def test_the_planned_kernel_in_a_graph(rows: int) -> None:
    """Replayed with other tokens; equal to an eager call bit for bit."""
    plain = weights(1, 4096, 4096)
    packed, out = Fp8TiledWeights.of(plain), torch.empty(rows, 1, 4096, dtype=torch.bfloat16, device="cuda")
    x = tokens(rows, 1, 4096)
    operations.product(x, packed, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            operations.product(x, packed, out=out)
    x.copy_(tokens(rows, 1, 4096))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, operations.product(x, packed))
    assert_close(out[:, 0], x[:, 0], plain.dequantize()[0])
