"""The weight recipe against exact fractions, its tensors, and the promise that decoding is exact."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from nvfp4_sgl.formats import e2m1
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor, quantize_weight
from tests.numerics import oracles
from tests.numerics.oracles import E2M1_GRID, E4M3_GRID, nearest_code, round_fp32


def awkward_weight(*shape: int, seed: int = 0) -> torch.Tensor:
    w = torch.nan_to_num(oracles.awkward_rows(int(np.prod(shape[:-1])), shape[-1], seed).float(), 0.0, 1.0, -1.0)
    w = w.clamp(-1e6, 1e6)
    return w.view(shape)


def assert_equals_exact(w: torch.Tensor, global_scale: torch.Tensor | None) -> None:
    """w [N, K]: every fp32 operation of the recipe rounded from the exact result."""
    got = quantize_weight(w, global_scale)
    rows = [[Fraction(abs(v)) for v in row] for row in w.float().tolist()]
    if global_scale is None:
        g = round_fp32(max(max(map(max, rows)), Fraction(2) ** -100) / 2688)
    else:
        g = Fraction(global_scale.item())
    assert Fraction(got.global_scale.item()) == g
    for n, row in enumerate(rows):
        for block in range(len(row) // 16):
            values = row[block * 16 : block * 16 + 16]
            s = round_fp32(max(values) / round_fp32(6 * g))
            s = Fraction(1) if s == 0 else min(max(s, Fraction(1, 512)), Fraction(448))
            s_code = nearest_code(s, E4M3_GRID)
            assert got.block_scale.view(torch.uint8)[n, block].item() == s_code
            step = round_fp32(E4M3_GRID[s_code] * g)
            expected = [nearest_code(round_fp32(value / step), E2M1_GRID) for value in values]
            codes = e2m1.unpack(got.packed)[n, block * 16 : block * 16 + 16]
            assert (codes & 7).tolist() == expected
            assert torch.equal(codes >> 3 != 0, torch.signbit(w[n, block * 16 : block * 16 + 16]))


@pytest.mark.parametrize("seed", range(3))
def test_recipe_is_exactly_as_stated(seed: int) -> None:
    assert_equals_exact(awkward_weight(24, 48, seed=seed), None)


def test_recipe_with_a_given_global_scale() -> None:
    w = awkward_weight(24, 48, seed=4)
    assert_equals_exact(w, torch.tensor(1e-3))
    assert_equals_exact(w, torch.tensor(1e9))  # every block scale clamps at 2^-9
    assert_equals_exact(w.to(torch.bfloat16), torch.tensor(1e-7))  # and at 448


def test_elements_on_the_edge_of_two_codes_are_divided_and_not_multiplied_by_a_reciprocal() -> None:
    """Every element but the block's maximum sits within an ulp of a midpoint, where one wrong rounding shows."""
    generator = torch.Generator().manual_seed(5)
    w = torch.randn(512, 256, generator=generator)
    first = quantize_weight(w)
    step = (first.block_scale.float() * first.global_scale).repeat_interleave(16, dim=-1)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    edge = middles[torch.randint(0, 7, w.shape, generator=generator)] * step * w.sign()
    edge = (edge.view(torch.int32) + torch.randint(-1, 2, w.shape, generator=generator, dtype=torch.int32)).view(
        torch.float32
    )
    blocks = w.unflatten(-1, (-1, 16)).abs()
    largest = (blocks == blocks.amax(-1, keepdim=True)).flatten(-2)
    w = torch.where(largest, w, edge)
    got = quantize_weight(w, first.global_scale)
    assert torch.equal(got.block_scale.view(torch.uint8), first.block_scale.view(torch.uint8))
    expected = oracles.e2m1_codes(w.numpy() / step.numpy())
    assert np.array_equal(e2m1.unpack(got.packed).numpy(), expected)


def test_a_gaussian_has_the_error_the_format_allows() -> None:
    w = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    error = (quantize_weight(w).dequantize() - w).norm() / w.norm()
    assert abs(error.item() - 0.0952) < 0.0006


def test_zero_blocks_and_zero_matrices() -> None:
    w = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    w[1, 16:] = 0
    got = quantize_weight(w)
    assert got.block_scale.float()[1, 1] == 1.0
    assert got.packed[1, 8:].eq(0).all()
    zero = quantize_weight(torch.zeros(2, 4, 32))
    assert zero.global_scale.gt(0).all()
    assert zero.block_scale.float().eq(1).all()
    assert zero.dequantize().eq(0).all()


def test_block_maxima_land_where_the_recipe_says() -> None:
    w = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    got = quantize_weight(w)
    step = got.block_scale.float() * got.global_scale
    ratio = w.unflatten(-1, (-1, 16)).abs().amax(-1) / step
    assert ratio.min() > 5.64
    assert ratio.max() < 6.41
    assert ratio.max() > 6.3  # saturation of an element does happen


def test_stacked_matrices_are_quantised_one_by_one() -> None:
    w = awkward_weight(2, 3, 20, 32, seed=6) * torch.tensor([1.0, 1e3, 1e-3])[:, None, None]
    got = quantize_weight(w)
    assert got.global_scale.shape == (2, 3)
    assert got.shape == w.shape
    for i in range(2):
        for j in range(3):
            alone = quantize_weight(w[i, j])
            assert torch.equal(alone.packed, got.packed[i, j])
            assert torch.equal(alone.global_scale, got.global_scale[i, j])
            assert torch.equal(alone.dequantize(), got.dequantize()[i, j])


def test_gate_and_up_tied_by_the_larger_scale() -> None:
    w = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2)) * torch.tensor([1.0, 0.1])[:, None, None]
    tied = quantize_weight(w).global_scale.max()
    got = quantize_weight(w, tied)
    assert got.global_scale.shape == ()
    error = (got.dequantize() - w).norm(dim=(1, 2)) / w.norm(dim=(1, 2))
    assert (error < 0.11).all()


def test_unscaled_is_exact_and_dequantize_rounds_once() -> None:
    """All 16 codes times all 127 finite scales, against fractions."""
    packed = e2m1.pack(torch.arange(16, dtype=torch.uint8).expand(127, 16))
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    g = torch.tensor(0.0123456789)
    tensor = NvFp4Tensor(packed, scale, g)
    for row, (plain, scaled) in enumerate(zip(tensor.unscaled().tolist(), tensor.dequantize().tolist(), strict=True)):
        for code in range(16):
            magnitude = E2M1_GRID[code & 7] * E4M3_GRID[row]
            sign = -1 if code >= 8 else 1
            assert Fraction(plain[code]) == sign * magnitude
            assert Fraction(scaled[code]) == sign * round_fp32(magnitude * Fraction(g.item()))


def test_requantising_a_decoded_weight_with_its_own_scale_changes_nothing() -> None:
    """Not a licence to do it: it holds because a block's own maximum code is 6 in these blocks."""
    codes = torch.randint(0, 16, (64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    codes[:, ::16] = 7
    scale = torch.randint(1, 127, (64, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    tensor = NvFp4Tensor(e2m1.pack(codes), scale.view(torch.float8_e4m3fn), torch.tensor(2.0**-10))
    again = quantize_weight(tensor.dequantize(), tensor.global_scale)
    assert torch.equal(again.block_scale.view(torch.uint8), scale)
    assert torch.equal(again.packed, tensor.packed)


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"weight: .*multiple of 16, found 24"):
        quantize_weight(torch.zeros(4, 24))
    with pytest.raises(ValueError, match="weight: expected finite values, found 1 NaN"):
        quantize_weight(torch.tensor([[float("nan")] + [0.0] * 15]))
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="global_scale"):
            quantize_weight(torch.ones(4, 16), torch.tensor(bad))
    good = quantize_weight(torch.ones(3, 4, 32))
    with pytest.raises(ValueError, match=r"NVFP4 block_scale: expected shape \(3, 4, 2\), found \(3, 4, 1\)"):
        NvFp4Tensor(good.packed, good.block_scale[..., :1], good.global_scale)
    with pytest.raises(TypeError, match=r"NVFP4 block_scale: expected dtype torch\.float8_e4m3fn"):
        NvFp4Tensor(good.packed, good.block_scale.view(torch.uint8), good.global_scale)
    with pytest.raises(ValueError, match="NVFP4 global_scale"):
        NvFp4Tensor(good.packed, good.block_scale, good.global_scale[:2])
    with pytest.raises(ValueError, match="NVFP4 global_scale"):
        NvFp4Tensor(good.packed[0], good.block_scale[0], good.global_scale)
