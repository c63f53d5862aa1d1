"""The activation recipe: every operation against exact fractions, and what it promises about NaN, zero and range."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from nvfp4_sgl.formats import e2m1, nvfp4
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor, quantize_rows, swiglu_row_scale
from tests.numerics import oracles
from tests.numerics.oracles import E2M1_GRID, E4M3_GRID, nearest_code, round_fp32

C2688 = round_fp32(Fraction(1, 2688))
C6 = round_fp32(Fraction(1, 6))


def exact_rows(x: torch.Tensor, row_scale: float | None) -> tuple[list[list[int]], list[list[int]], list[Fraction]]:
    """Codes, E4M3 scale codes and row scales of the recipe, every fp32 operation rounded from the exact result."""
    codes, scales, globals_ = [], [], []
    for row in x.float().tolist():
        values, signs = [], []
        for value in row:
            if value != value:
                values.append(Fraction(0))
                signs.append(0)
            else:
                magnitude = (
                    oracles.BF16_MAX if abs(value) == float("inf") else min(Fraction(abs(value)), oracles.BF16_MAX)
                )
                values.append(magnitude)
                signs.append(int(np.signbit(value)))
        if row_scale is None:
            g = round_fp32(max(max(values), Fraction(2) ** -100) * C2688)
        else:
            g = round_fp32(Fraction(row_scale))
        r = round_fp32(1 / g)
        row_codes, row_scales = [], []
        for start in range(0, len(values), 16):
            block = values[start : start + 16]
            s_code = nearest_code(round_fp32(round_fp32(max(block) * r) * C6), E4M3_GRID)
            row_scales.append(s_code)
            if s_code == 0:
                row_codes += [0] * 16
                continue
            inverse = round_fp32(1 / round_fp32(E4M3_GRID[s_code] * g))
            for value, sign in zip(block, signs[start : start + 16], strict=True):
                row_codes.append(nearest_code(round_fp32(value * inverse), E2M1_GRID) | sign << 3)
        codes.append(row_codes)
        scales.append(row_scales)
        globals_.append(g)
    return codes, scales, globals_


def assert_equals_exact(x: torch.Tensor, row_scale: float | None) -> NvFp4Tensor:
    got = quantize_rows(x, row_scale)
    codes, scales, globals_ = exact_rows(x, row_scale)
    assert [Fraction(g) for g in got.global_scale.tolist()] == globals_
    assert got.block_scale.view(torch.uint8).tolist() == scales
    assert e2m1.unpack(got.packed).tolist() == codes
    return got


@pytest.mark.parametrize("columns", [16, 48, 80])
def test_dynamic_recipe_is_exactly_as_stated(columns: int) -> None:
    assert_equals_exact(oracles.awkward_rows(48, columns, seed=columns), None)


@pytest.mark.parametrize("row_scale", [100 / 2688, 2.0**-117, 2.0**116, 1e-3, 1e-9, 3e30])
def test_constant_recipe_is_exactly_as_stated(row_scale: float) -> None:
    assert_equals_exact(oracles.awkward_rows(36, 48, seed=7), row_scale)


def test_fp32_input_is_not_rounded_to_bf16_first() -> None:
    x = oracles.awkward_rows(24, 32, seed=3).float() * 1.0009765625
    x[4] = 3.4028234663852886e38  # above the largest bf16: clamped
    assert_equals_exact(x, None)


def test_dynamic_recipe_on_many_random_rows_against_numpy() -> None:
    """NumPy's fp32 is another implementation of IEEE; this one covers a million elements."""
    x = oracles.awkward_rows(1500, 704, seed=11)
    x[:, 37] += x[:, 91]
    clean = np.nan_to_num(x.float().numpy(), nan=0.0, posinf=float(oracles.BF16_MAX), neginf=-float(oracles.BF16_MAX))
    blocks = clean.reshape(1500, -1, 16)
    amax = np.abs(blocks).max(axis=-1)
    g = np.maximum(amax.max(axis=-1), np.float32(2.0**-100)) * np.float32(float(C2688))
    r = np.float32(1) / g
    s_code = oracles.e4m3_codes((amax * r[:, None]) * np.float32(float(C6)))
    s = oracles.e4m3_values(s_code).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = blocks * (np.float32(1) / (s * g[:, None]))[..., None]
    code = np.where((s_code == 0)[..., None], 0, oracles.e2m1_codes(np.nan_to_num(scaled, nan=0.0))).reshape(1500, 704)
    got = quantize_rows(x)
    assert np.array_equal(got.global_scale.numpy(), g)
    assert np.array_equal(got.block_scale.view(torch.uint8).numpy(), s_code)
    assert np.array_equal(e2m1.unpack(got.packed).numpy(), code)


def test_nothing_gives_nan_and_a_zero_or_underflowing_block_has_zero_scale_and_codes() -> None:
    x = oracles.awkward_rows(240, 96, seed=5)
    for row_scale in (None, 1e-5, 2.0**-117, 2.0**116):
        got = quantize_rows(x, row_scale)
        assert torch.isfinite(got.dequantize()).all()
        assert torch.isfinite(got.global_scale).all()
        empty = got.block_scale.float() == 0
        assert (e2m1.unpack(got.packed).unflatten(-1, (-1, 16))[empty] == 0).all()
        assert not torch.signbit(got.block_scale.float()).any()
    rows = torch.zeros(3, 32, dtype=torch.bfloat16)
    rows[1] = -0.0
    rows[2, 0] = 1.0
    rows[2, 16:] = 1.0 / 458752 * 0.99  # just below the smallest block scale
    got = quantize_rows(rows)
    assert got.packed[:2].eq(0).all()
    assert got.block_scale.float()[2].tolist() == [448.0, 0.0]
    rows[2, 16:] = 1.0 / 458752 * 1.02  # just above it
    assert quantize_rows(rows).block_scale.float()[2].tolist() == [448.0, 2.0**-9]


def test_the_row_maximum_survives_and_the_error_is_that_of_e2m1() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1024, generator=generator).to(torch.bfloat16)
    got = quantize_rows(x).dequantize()
    relative = (got - x.float()).norm() / x.float().norm()
    assert 0.09 < relative < 0.1
    rows = torch.arange(64)
    columns = x.float().abs().argmax(dim=1)
    assert torch.allclose(got[rows, columns], x.float()[rows, columns], rtol=1e-6)


def test_scaling_a_row_by_a_power_of_two_changes_its_row_scale_only() -> None:
    x = oracles.awkward_rows(96, 64, seed=9)
    x = x[torch.isfinite(x.float()).all(dim=1) & (x.float().abs().amax(dim=1) > 1e-20)]
    x = x[x.float().abs().amax(dim=1) < 1e20]
    one, two = quantize_rows(x), quantize_rows(x.float() * 1024)
    assert torch.equal(one.packed, two.packed)
    assert torch.equal(one.block_scale.view(torch.uint8), two.block_scale.view(torch.uint8))
    assert torch.equal(one.global_scale * 1024, two.global_scale)


def test_rows_do_not_depend_on_each_other_nor_on_strides() -> None:
    x = oracles.awkward_rows(50, 64, seed=4)
    whole = quantize_rows(x)
    for row in (0, 17, 49):
        alone = quantize_rows(x[row : row + 1])
        assert torch.equal(alone.packed[0], whole.packed[row])
        assert torch.equal(alone.global_scale[0], whole.global_scale[row])
    strided = torch.empty(64, 50, dtype=torch.bfloat16).copy_(x.T).T
    assert not strided.is_contiguous()
    assert torch.equal(quantize_rows(strided).packed, whole.packed)


def test_no_rows_are_no_error() -> None:
    for row_scale in (None, 0.5):
        got = quantize_rows(torch.empty(0, 64, dtype=torch.bfloat16), row_scale)
        assert (got.shape, got.packed.shape, got.block_scale.shape) == ((0, 64), (0, 32), (0, 4))
        assert got.dequantize().shape == (0, 64)


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.0, 10.0, 1e4])
def test_the_swiglu_scale_never_cuts_a_block_scale_off(limit: float) -> None:
    scale = swiglu_row_scale(limit)
    assert np.float32(scale) == scale
    assert scale == float(np.float32(limit * limit / 2688))
    gate = torch.cat((torch.linspace(-30, limit, 4000), torch.tensor([limit, -1.27846, -1e30])))
    for up in (limit, -limit):
        h = torch.nn.functional.silu(gate.double()) * up
        assert h.abs().max() <= limit * limit
    at_bound = torch.full((1, 16), limit * limit)
    got = quantize_rows(at_bound, scale)
    assert got.block_scale.float().item() == 448.0
    assert torch.allclose(got.dequantize(), at_bound, rtol=1e-6)  # not saturated
    assert quantize_rows(at_bound * 1.5, scale).dequantize().max() < 1.01 * limit * limit  # what saturation looks like


@pytest.mark.parametrize("limit", [0.0, -1.0, 0.2, float("inf"), float("nan"), 1e30])
def test_the_swiglu_scale_refuses_limits_it_cannot_bound(limit: float) -> None:
    with pytest.raises(ValueError, match="swiglu_limit"):
        swiglu_row_scale(limit)


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"activations: .*multiple of 16, found 40"):
        quantize_rows(torch.zeros(2, 40))
    with pytest.raises(ValueError, match=r"activations: expected shape \[rows, K\], found \(2, 3, 16\)"):
        quantize_rows(torch.zeros(2, 3, 16))
    with pytest.raises(TypeError, match=r"found torch\.float16"):
        quantize_rows(torch.zeros(2, 16, dtype=torch.float16))
    for bad in (0.0, -1.0, float("nan"), float("inf"), 2.0**-118, 2.0**116 * 1.01):
        with pytest.raises(ValueError, match="row_scale"):
            quantize_rows(torch.zeros(2, 16), bad)
    good = quantize_rows(torch.zeros(2, 32))
    with pytest.raises(ValueError, match=r"NVFP4 block_scale: expected shape \(2, 2\), found \(2, 1\)"):
        NvFp4Tensor(good.packed, good.block_scale[:, :1], good.global_scale)
    with pytest.raises(ValueError, match="NVFP4 global_scale"):
        NvFp4Tensor(good.packed, good.block_scale, good.global_scale[:1])


def test_constants() -> None:
    assert Fraction(nvfp4.INVERSE_FULL_SCALE) == C2688
    assert Fraction(nvfp4.INVERSE_E2M1_MAX) == C6
    assert nvfp4.FULL_SCALE == 2688.0
