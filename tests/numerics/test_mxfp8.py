"""MXFP8 against exact fractions and ml_dtypes: activations, and FP8 weights of 128 × 128 without loss."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from nvfp4_sgl.errors import OperandTypeError, OperandValueError
from nvfp4_sgl.formats import fp8_block, mxfp8, ue8m0
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor, from_blocks, quantize_rows
from tests.numerics import oracles
from tests.numerics.oracles import ceil_log2

ml_dtypes = pytest.importorskip("ml_dtypes")

VALUE_MAX = 1.875 * 2.0**127
"""Where activations are clamped: what rounds to no more than fp32 holds."""


def exact_exponent(amax: float) -> int:
    """ceil(log2(amax / 448)), no less than UE8M0's least."""
    return -127 if amax == 0 else max(-127, ceil_log2(Fraction(amax) / 448))


def test_the_exponent_of_every_bf16_maximum_and_of_its_fp32_neighbours() -> None:
    amax = oracles.all_bf16().float().abs().unique()
    steps = torch.tensor([448.0 * 2.0**k for k in range(-140, 119)])
    near = torch.cat((amax, steps))
    near = torch.cat((near, torch.nextafter(near, torch.tensor(torch.inf)), torch.nextafter(near, torch.tensor(0.0))))
    near = near[near <= VALUE_MAX]
    assert mxfp8.block_exponent(near).tolist() == [exact_exponent(value) + 127 for value in near.tolist()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [32, 64, 416, 40])
def test_activation_recipe_is_exactly_as_stated(columns: int, dtype: torch.dtype) -> None:
    x = oracles.awkward_rows(60, columns, seed=columns).to(dtype)
    x[0], x[1], x[2, ::3] = 0.0, -0.0, 1e-40
    got = quantize_rows(x)
    clean = np.nan_to_num(x.float().numpy(), nan=0.0, posinf=np.inf, neginf=-np.inf).clip(-VALUE_MAX, VALUE_MAX)
    for t in range(60):
        for block in range(-(-columns // 32)):
            part = slice(32 * block, 32 * block + 32)
            values = clean[t, part].astype(np.float64)
            exponent = exact_exponent(float(np.abs(values).max()))
            assert int(got.scale[t, block]) == exponent + 127
            scaled = np.ldexp(values, -exponent)
            assert np.abs(scaled).max() <= 448, "nothing saturates"
            expected = scaled.astype(ml_dtypes.float8_e4m3fn)
            assert np.array_equal(got.codes[t, part].view(torch.uint8).numpy(), expected.view(np.uint8))
    assert got.dequantize().isfinite().all()


def test_a_block_of_zeros_has_scale_and_codes_zero() -> None:
    got = quantize_rows(torch.tensor([[0.0] * 32 + [float("nan")] * 32 + [1.0] * 32]))
    assert got.scale.tolist() == [[0, 0, 119]]
    assert not got.codes[0, :64].float().any() and (got.codes[0, 64:].float() == 256).all()


def test_the_largest_significands_are_not_cut_off() -> None:
    """OCP's floor(log2 amax) - 8 would give the scale of 1 to all of them, and 448 for 511."""
    x = torch.zeros(4, 32)
    x[:, 0] = torch.tensor([256.0, 448.0, 449.0, 511.0])
    got = quantize_rows(x)
    assert got.scale[:, 0].tolist() == [127, 127, 128, 128]
    assert got.dequantize()[:, 0].tolist() == [256.0, 448.0, 448.0, 512.0]


def test_the_error_of_a_normal_number_is_at_most_a_sixteenth() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 64)[:, None]
    blocks = x.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    error = (quantize_rows(x).dequantize() - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, blocks * 2.0**-17)).all()


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 129), (3, 130, 160)])
def test_fp8_weights_keep_every_value(shape: tuple[int, ...]) -> None:
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 2.0**-5
    blocks = fp8_block.quantize_weight(w)
    got = from_blocks(blocks)
    assert torch.equal(got.codes.view(torch.uint8), blocks.weight.view(torch.uint8))
    assert torch.equal(got.dequantize(), blocks.dequantize())
    scales = ue8m0.as_bytes(blocks.scale)
    for row in (0, shape[-2] - 1):
        for column in (0, shape[-1] - 1):
            expected = scales[..., row // 128, column // 128]
            assert torch.equal(got.scale[..., row, column // 32], expected)


def test_what_is_no_mxfp8_is_refused() -> None:
    codes = torch.zeros(4, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(OperandTypeError, match="MXFP8 scale"):
        MxFp8Tensor(codes, torch.zeros(4, 2))
    with pytest.raises(OperandValueError, match="MXFP8 scale"):
        MxFp8Tensor(codes, torch.zeros(4, 4, dtype=torch.uint8))
    with pytest.raises(OperandTypeError, match="activations"):
        quantize_rows(torch.zeros(1, 32, dtype=torch.float16))
