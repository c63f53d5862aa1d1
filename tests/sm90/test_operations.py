"""The w4a16 operations on the Hopper kernels, executed in the emulator, against the dequantised weights in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.plan import Pin
from nvfp4_sgl.cutedsl_kernels.sm90.choose import H200_CLUSTERS
from nvfp4_sgl.cutedsl_kernels.w4a16 import operations
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor, quantize_weight
from tests.sm90.support.products import random_tokens
from tests.sm100.support.launcher import EmulatedLauncher, emulated_operations

LIMIT = 10.0


@pytest.fixture(autouse=True)
def runner() -> Iterator[EmulatedLauncher]:
    with emulated_operations(name="sm_90a", gpu=H200_CLUSTERS) as launcher:
        yield launcher


def matrix(*shape: int, seed: int) -> NvFp4Tensor:
    """Random weights with outliers, quantised; each matrix has a global scale of its own."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=random)
    return quantize_weight(values * torch.where(torch.rand(*shape, generator=random) < 0.01, 20.0, 1.0))


def plain(weights: NvFp4Tensor) -> Tensor:
    return weights.dequantize().double()


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within one rounding to bf16, beside what the fp32 sums of large terms lose."""
    assert torch.allclose(found.double(), expected, rtol=2.0**-8, atol=1e-5 * float(expected.abs().max()))


def test_product(runner: EmulatedLauncher) -> None:
    weights, tokens = matrix(136, 192, seed=1), random_tokens(3, 192, seed=2)
    tiled = TiledWeights.dense(weights.packed, weights.block_scale, weights.global_scale)
    out = operations.product(tokens, tiled, dtype=torch.float32)
    expected = tokens.double() @ plain(weights).T
    assert out.dtype == torch.float32 and torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-4)
    assert_close(operations.product(tokens, tiled), expected)
    assert [key.architecture for key in runner.keys] == ["sm_90a"] * 2


def test_the_first_rows_of_merged_weights() -> None:
    """Whole tiles of a matrix whose rows have scales of their own, in place."""
    weights, tokens = matrix(136 + 128, 128, seed=5), random_tokens(3, 128, seed=6)
    scales = torch.arange(1, 265, dtype=torch.float32) / 7
    tiled = TiledWeights.dense(weights.packed, weights.block_scale, scales)
    first = tiled.first(128)
    assert first.tiles.data_ptr() == tiled.tiles.data_ptr() and first.tiles.is_contiguous()
    assert torch.equal(operations.product(tokens, first), operations.product(tokens, tiled)[:, :128])


def test_rows_keep_their_scales() -> None:
    weights, tokens = matrix(24, 64, seed=1), random_tokens(5, 64, seed=2)
    scales = torch.arange(1, 25, dtype=torch.float32) / 7
    tiled = TiledWeights.dense(weights.packed, weights.block_scale, scales)
    expected = tokens.double() @ (weights.unscaled().double() * scales[:, None].double()).T
    assert_close(operations.product(tokens, tiled), expected)


def test_grouped_product_of_strided_rows() -> None:
    weights = matrix(2, 16, 64, seed=3)
    tokens = random_tokens(9, 3, 72, seed=4)[:, :2, :64]
    scales = weights.global_scale_of_rows().expand(2, 16).contiguous()
    out = operations.grouped_product(tokens, TiledWeights.grouped(weights.packed, weights.block_scale, scales))
    for group in range(2):
        assert_close(out[:, group], tokens[:, group].double() @ plain(weights)[group].T)


@pytest.mark.parametrize("gathers", [False, True])
def test_experts(gathers: bool, runner: EmulatedLauncher) -> None:
    """Gate and up with SwiGLU, then down, of experts that were put in one at a time."""
    counts, inner, width, tile = [3, 0, 8, 9], 64, 64, 8
    w13 = TiledWeights.allocate_gated_experts(len(counts), inner, width, torch.device("cpu"))
    w2 = TiledWeights.allocate_experts(len(counts), width, inner, torch.device("cpu"))
    ups = [matrix(2, inner, width, seed=10 + i) for i in range(len(counts))]
    downs = [matrix(width, inner, seed=20 + i) for i in range(len(counts))]
    for i, (gate_up, down) in enumerate(zip(ups, downs, strict=True)):
        w13.put_gated_experts(i, gate_up.packed[None], gate_up.block_scale[None], gate_up.global_scale.reshape(1, 2))
        w2.put_experts(i, down.packed[None], down.block_scale[None], down.global_scale.reshape(1))
    offsets = [sum(-(-count // tile) * tile for count in counts[:i]) for i in range(len(counts))]
    tokens = random_tokens(40, width, seed=5) * 0.05
    groups = (tile, torch.tensor(offsets, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))
    if gathers:
        used = [first + i for first, count in zip(offsets, counts, strict=True) for i in range(count)]
        sources = torch.full((len(tokens),), -1, dtype=torch.int32)
        sources[used] = torch.arange(len(used), dtype=torch.int32).flip(0)
        hidden = operations.expert_gate_up(tokens[used].flip(0), *groups, w13, LIMIT, sources=sources)
    else:
        hidden = operations.expert_gate_up(tokens, *groups, w13, LIMIT)
    output = operations.expert_down(hidden, *groups, w2, counts_ahead=True)
    for i, (first, count) in enumerate(zip(offsets, counts, strict=True)):
        if not count:
            continue
        rows = slice(first, first + count)
        gate, up = (tokens[rows].double() @ plain(ups[i])[half].T for half in range(2))
        expected = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
        assert_close(hidden[rows], expected)
        assert_close(output[rows], hidden[rows].double() @ plain(downs[i]).T)
    assert [(key.limit, key.shape.gathers) for key in runner.keys] == [(LIMIT, gathers), (None, False)]
    assert [key.shape.counts_ahead for key in runner.keys] == [False, True]


def test_no_rows_launch_nothing(runner: EmulatedLauncher) -> None:
    weights = matrix(16, 64, seed=1)
    tiled = TiledWeights.dense(weights.packed, weights.block_scale, weights.global_scale)
    assert operations.product(torch.empty(0, 64, dtype=torch.bfloat16), tiled).shape == (0, 16)
    assert not runner.keys


def test_pinned_plans_give_the_same_bits_in_any_batch(runner: EmulatedLauncher) -> None:
    weights, tokens = matrix(16, 512, seed=1), random_tokens(40, 512, seed=2)
    tiled = TiledWeights.dense(weights.packed, weights.block_scale, weights.global_scale)
    runner.pin = Pin(token_tile=8, split_k=2)
    whole = operations.product(tokens, tiled, dtype=torch.float32)
    alone = operations.product(tokens[:1], tiled, dtype=torch.float32)
    assert torch.equal(whole[:1], alone)
    assert {(key.shape.token_tile, key.shape.split_k) for key in runner.keys} == {(8, 2)}


def test_a_pin_that_does_not_fit_is_refused(runner: EmulatedLauncher) -> None:
    weights = matrix(16, 512, seed=1)
    tiled = TiledWeights.dense(weights.packed, weights.block_scale, weights.global_scale)
    runner.pin = Pin(token_tile=64, split_k=8)
    with pytest.raises(OperandValueError, match="split_k at most 2 on Hopper"):
        operations.product(random_tokens(1, 512, seed=2), tiled)
    stack, none = TiledWeights.allocate_experts(1, 16, 64, torch.device("cpu")), torch.zeros(1, dtype=torch.int32)
    runner.pin = Pin(token_tile=64)
    assert operations.w4a16_expert_token_tile_for(1, 1) == 64
    with pytest.raises(OperandValueError, match="token_tile: expected 64, .* found 8"):
        operations.expert_down(random_tokens(8, 64, seed=2), 8, none, none, stack)
