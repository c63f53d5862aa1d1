"""Hopper's GEMMs on a Hopper GPU: every kernel shape against the dequantised weights, exactness, graphs, experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels import plan
from nvfp4_sgl.cutedsl_kernels.common.shape import TOKEN_TILES
from nvfp4_sgl.cutedsl_kernels.sm90.choose import expert_shapes, gemm_shapes
from nvfp4_sgl.cutedsl_kernels.sm90.shape import MIN_STAGES, KernelShape
from nvfp4_sgl.cutedsl_kernels.w4a16 import operations
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from nvfp4_sgl.ops.swiglu import clamped_swiglu
from tests.support import native
from tests.support.hopper_results import assert_close, tokens
from tests.support.sanitized import one_of_each_sanitized

pytestmark = pytest.mark.gpu

LIMIT = 10.0
SHAPES = [shape for shape in gemm_shapes(2112, TOKEN_TILES[-1], "bf16") if shape.stages >= MIN_STAGES]
SANITIZED = {(8, 8), (16, 1), (32, 4), (64, 2), (256, 1)}
"""Token tile and split of K of the shapes that run under compute-sanitizer, too."""


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    if native.targets() != ("sm_90a",):
        pytest.skip("these kernels are made for Hopper")
    torch.manual_seed(0)
    yield


def weights(*shape: int, scales: tuple[int, int] = (0x28, 0x48)) -> NvFp4Tensor:
    """Random codes [groups, features, K] and block scales of those E4M3 bytes; a global scale for each feature."""
    codes = torch.randint(0, 256, (*shape[:2], shape[2] // 2), dtype=torch.uint8, device="cuda")
    blocks = torch.randint(*scales, (*shape[:2], shape[2] // 16), dtype=torch.uint8, device="cuda")
    return NvFp4Tensor(codes, blocks.view(torch.float8_e4m3fn), torch.rand(shape[:2], device="cuda") + 0.5)


def tiled(plain: NvFp4Tensor) -> TiledWeights:
    return TiledWeights.grouped(plain.packed, plain.block_scale, plain.global_scale)


@pytest.mark.parametrize("shape", one_of_each_sanitized(SHAPES, SANITIZED), ids=str)
def test_every_shape(shape: KernelShape) -> None:
    """Ragged features and tokens, several tiles of each, groups; launched in a row, each on another's heels."""
    rows = shape.token_tile + 5
    plain = weights(2, 1160, 2112)
    packed = tiled(plain)
    # Made after the weights: a GEMM loads these before the launch before it has ended.
    x = tokens(rows, 2, 2112)
    with mock.patch.object(plan, "plan_w4a16", mock.Mock(return_value=shape)):
        outs = [torch.full((rows, 2, 1160), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        for out in outs:
            operations.grouped_product(x, packed, out=out)
    for group in range(2):
        assert_close(outs[0][:, group], x[:, group], plain.dequantize()[group])
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("tile", TOKEN_TILES)
def test_expansion_is_exact(tile: int) -> None:
    """Tokens that are the unit matrix give the weights: all codes with all finite block scales, bit for bit."""
    plain = weights(1, 256, 128, scales=(0, 127))
    plain.block_scale.view(torch.uint8).view(-1)[:127] = torch.arange(127, device="cuda")
    exact = NvFp4Tensor(plain.packed, plain.block_scale, torch.ones(1, 256, device="cuda"))
    unit = torch.eye(128, dtype=torch.bfloat16, device="cuda").unsqueeze(1)
    with mock.patch.object(plan, "plan_w4a16", mock.Mock(return_value=KernelShape(tile, output="fp32"))):
        found = operations.grouped_product(unit, tiled(exact), dtype=torch.float32)
    assert torch.equal(found[:, 0], exact.unscaled()[0].T)


@pytest.mark.parametrize("rows", [1, 7, 64, 300, 4096])
def test_the_planned_kernel_in_a_graph(rows: int) -> None:
    """Replayed with other tokens; equal to an eager call bit for bit."""
    plain = weights(1, 4096, 4096)
    packed, out = tiled(plain), torch.empty(rows, 1, 4096, dtype=torch.bfloat16, device="cuda")
    x = tokens(rows, 1, 4096)
    operations.grouped_product(x, packed, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            operations.grouped_product(x, packed, out=out)
    x.copy_(tokens(rows, 1, 4096))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, operations.grouped_product(x, packed))
    assert_close(out[:, 0], x[:, 0], plain.dequantize()[0])


@pytest.mark.parametrize("copies", [1, 3, 7])
@pytest.mark.parametrize("rows", [1, 16, 60, 300])
def test_copies_have_the_bits_of_out(rows: int, copies: int) -> None:
    """Rows of wider matrices; a row of NaNs is not taken for one that has not arrived, which holds 0xFFFF."""
    plain = weights(1, 1160, 2112)
    x = tokens(rows + 1, 2112)
    x[rows] = torch.tensor(-1, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    expected = operations.product(x, tiled(plain))
    memory = torch.full((1 + copies, rows + 4, 1160 + 24), -1, dtype=torch.int16, device="cuda")
    out, *others = memory.view(torch.bfloat16)[:, : rows + 1, :1160].unbind()
    operations.product(x, tiled(plain), out=out, copies=others)
    assert_close(out[:rows], x[:rows], plain.dequantize()[0])
    written = memory[:, : rows + 1, :1160]
    assert (written == expected.view(torch.int16)).all() and (written[:, rows] == 0x7FFF).all()
    assert (memory[:, rows + 1 :] == -1).all() and (memory[:, :, 1160:] == -1).all()


EXPERT_SHAPES = [
    (shape.token_tile, shape.split_k, shape.ctas_per_sm)
    for tile in TOKEN_TILES
    for shape in expert_shapes(2048, tile, True, "bf16")
    if shape.stages >= MIN_STAGES
]
"""Token tile, split of K, CTAs an SM."""
SANITIZED_EXPERTS = {(8, 8, 2), (16, 2, 2), (32, 4, 1), (64, 1, 2)}
"""Those that run under compute-sanitizer, too."""


@pytest.mark.parametrize(("tile", "split", "ctas"), EXPERT_SHAPES)
def test_fp32_sums_of_experts(tile: int, split: int, ctas: int) -> None:
    """As the first GEMM of experts in mode ``w4a4``: no SwiGLU, alphas of one."""
    counts = [0, 1, tile, tile + 1, 0]
    sizes = [-(-count // tile) * tile for count in counts]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    plain = weights(len(counts), 1152, 2048)
    packed = TiledWeights.allocate_experts(len(counts), 1152, 2048, torch.device("cuda"))
    packed.put_experts(0, plain.packed, plain.block_scale, torch.ones(len(counts), device="cuda"))
    x = tokens(sum(sizes), 2048)
    first_rows, counted = (torch.tensor(part, dtype=torch.int32, device="cuda") for part in (offsets, counts))
    out = torch.full((len(x), 1152), float("nan"), device="cuda")
    shape = KernelShape(tile, split, "fp32", grouped=True, max_ctas=ctas)
    with mock.patch.object(plan, "plan_w4a16_experts", mock.Mock(return_value=shape)):
        operations.expert_down(x, tile, first_rows, counted, packed, out=out)
    for i, (first, count) in enumerate(zip(offsets, counts, strict=True)):
        rows = slice(first, first + count)
        assert_close(out[rows], x[rows], plain.unscaled()[i])


@pytest.mark.parametrize(
    ("tile", "split", "ctas"),
    [pytest.param(*shape, marks=[pytest.mark.sanitized] * (shape in SANITIZED_EXPERTS)) for shape in EXPERT_SHAPES],
)
def test_experts(tile: int, split: int, ctas: int) -> None:
    """Empty, ragged and full experts, gate and up with SwiGLU, then down."""
    counts = [0, 1, tile, tile + 1, 0, 3 * tile - 2, 0]
    inner, width = 1024, 2048
    sizes = [-(-count // tile) * tile for count in counts]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    experts = len(counts)
    w13 = TiledWeights.allocate_gated_experts(experts, inner, width, torch.device("cuda"))
    w2 = TiledWeights.allocate_experts(experts, width, inner, torch.device("cuda"))
    ups, downs = weights(experts, 2 * inner, width), weights(experts, width, inner)
    gates = torch.rand(experts, 2, device="cuda") * 0.001
    scales = torch.rand(experts, device="cuda")
    codes, blocks = (part.unflatten(1, (2, inner)) for part in (ups.packed, ups.block_scale.view(torch.uint8)))
    w13.put_gated_experts(0, codes, blocks.view(torch.float8_e4m3fn), gates)
    w2.put_experts(0, downs.packed, downs.block_scale, scales)
    x = tokens(sum(sizes), width)
    first_rows, counted = (torch.tensor(part, dtype=torch.int32, device="cuda") for part in (offsets, counts))
    chosen = [KernelShape(tile, split, gated=gated, grouped=True, max_ctas=ctas) for gated in (True, False)]
    with mock.patch.object(plan, "plan_w4a16_experts", mock.Mock(side_effect=chosen)):
        hidden = operations.expert_gate_up(x, tile, first_rows, counted, w13, LIMIT)
        output = operations.expert_down(hidden, tile, first_rows, counted, w2)
    if operations.w4a16_gathers(tile):
        used = torch.cat([torch.arange(first, first + count) for first, count in zip(offsets, counts, strict=True)])
        order = torch.randperm(len(used))
        sources = torch.full((sum(sizes),), -1, dtype=torch.int32)
        sources[used[order]] = torch.arange(len(used), dtype=torch.int32)
        with mock.patch.object(plan, "plan_w4a16_experts", mock.Mock(return_value=replace(chosen[0], gathers=True))):
            taken = (x[used[order].cuda()], tile, first_rows, counted, w13, LIMIT)
            gathered = operations.expert_gate_up(*taken, sources=sources.cuda())
        assert torch.equal(gathered[used.cuda()], hidden[used.cuda()])
    for i, (first, count) in enumerate(zip(offsets, counts, strict=True)):
        rows = slice(first, first + count)
        matrix = ups.unscaled()[i].unflatten(0, (2, inner)) * gates[i][:, None, None]
        gate, up = (x[rows].float() @ half.T for half in matrix)
        expected = clamped_swiglu(gate, up, LIMIT)
        assert torch.allclose(hidden[rows].float(), expected, rtol=2.0**-7, atol=1e-3 * LIMIT)
        assert_close(output[rows], hidden[rows], downs.unscaled()[i] * scales[i])
