"""MXFP4: the recipe, and the exactness of its conversion to NVFP4 up to the limit of the exponent spread."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import e2m1, mxfp4
from nvfp4_sgl.formats.mxfp4 import MxFp4Tensor, largest_exponent, to_nvfp4
from tests.numerics import oracles
from tests.numerics.oracles import E2M1_GRID, ceil_log2, nearest_code


def random_tensor(*shape: int, lowest: int, highest: int, seed: int = 0) -> MxFp4Tensor:
    """Random codes [*shape]; block exponents spread over lowest..highest, both of which occur."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
    codes[..., ::32] = 7  # no block is all zeros
    scale = torch.randint(lowest, highest + 1, (*shape[:-1], shape[-1] // 32), generator=generator)
    scale[..., 0, 0], scale[..., 0, 1] = lowest, highest
    return MxFp4Tensor(e2m1.pack(codes), (scale + 127).to(torch.uint8))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that also tells −0 from +0."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_recipe_is_exactly_as_stated() -> None:
    w = torch.nan_to_num(oracles.awkward_rows(48, 96, seed=1).float(), 0.0, 1.0, -1.0).clamp(-(2.0**127), 2.0**127)
    w[7] *= 1.0009765625  # not bf16
    got = mxfp4.quantize(w)
    codes = e2m1.unpack(got.packed)
    for n, row in enumerate(w.tolist()):
        for block in range(3):
            values = [Fraction(abs(v)) for v in row[block * 32 : block * 32 + 32]]
            exponent = ceil_log2(max(max(values), Fraction(6, 2**126)) / 6)
            assert got.scale[n, block].item() == exponent + 127
            expected = [nearest_code(value / Fraction(2) ** exponent, E2M1_GRID) for value in values]
            assert (codes[n, block * 32 : block * 32 + 32] & 7).tolist() == expected
    assert torch.equal(codes >> 3 != 0, torch.signbit(w))


def test_a_block_exponent_is_the_exact_ceiling_for_every_bf16_maximum() -> None:
    amax = oracles.all_bf16().float().abs().unique()
    near = torch.cat((amax, torch.nextafter(amax, torch.tensor(float("inf")))))
    near = near[near <= 2.0**127]
    w = torch.zeros(len(near), 32)
    w[:, 5] = -near
    floor = Fraction(6, 2**126)
    expected = [ceil_log2(max(Fraction(v), floor) / 6) + 127 for v in near.tolist()]
    assert mxfp4.quantize(w).scale.flatten().tolist() == expected


def test_dequantize_is_exact() -> None:
    tensor = random_tensor(8, 64, lowest=-100, highest=100)
    values, codes = tensor.dequantize().tolist(), e2m1.unpack(tensor.packed).tolist()
    for n in range(8):
        for k in range(64):
            magnitude = E2M1_GRID[codes[n][k] & 7] * Fraction(2) ** (tensor.scale[n, k // 32].item() - 127)
            assert Fraction(values[n][k]) == (-magnitude if codes[n][k] & 8 else magnitude)


@pytest.mark.parametrize(("lowest", "highest"), [(-17, 0), (-10, 7), (3, 3), (-60, -43), (100, 117), (-126, -109)])
def test_conversion_is_bit_exact_up_to_a_spread_of_17(lowest: int, highest: int) -> None:
    tensor = random_tensor(40, 96, lowest=lowest, highest=highest)
    converted = to_nvfp4(tensor)
    assert converted.packed is tensor.packed
    assert converted.shape == tensor.shape
    assert same_bits(converted.dequantize(), tensor.dequantize())
    assert torch.isfinite(converted.block_scale.float()).all()
    assert converted.block_scale.float().gt(0).all()


def test_the_first_spread_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OperandError, match=r"within 2\^-9\.\.2\^8 .*found 2\^-10\.\.2\^8"):
        to_nvfp4(random_tensor(8, 64, lowest=-18, highest=0))


def test_blocks_of_zeros_do_not_widen_the_spread() -> None:
    tensor = random_tensor(8, 64, lowest=-2, highest=3)
    tensor.packed[2, :16] = 0x80  # ±0
    tensor.scale[2, 0] = 0
    tensor.packed[3, 16:] = 0x08
    tensor.scale[3, 1] = 250
    converted = to_nvfp4(tensor)
    assert largest_exponent(tensor).item() == 3
    assert converted.block_scale.float()[2, :2].tolist() == [1.0, 1.0]
    assert same_bits(converted.dequantize(), tensor.dequantize())
    zero = MxFp4Tensor(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8))
    assert to_nvfp4(zero).dequantize().eq(0).all()
    assert to_nvfp4(zero).global_scale > 0


def test_gate_and_up_share_a_global_scale_through_their_common_exponent() -> None:
    gate = random_tensor(3, 8, 64, lowest=-9, highest=-4, seed=1)
    up = random_tensor(3, 8, 64, lowest=-7, highest=2, seed=2)
    top = torch.maximum(largest_exponent(gate), largest_exponent(up))
    assert top.tolist() == [2, 2, 2]
    a, b = to_nvfp4(gate, top), to_nvfp4(up, top)
    assert torch.equal(a.global_scale, b.global_scale)
    assert same_bits(a.dequantize(), gate.dequantize())
    assert same_bits(b.dequantize(), up.dequantize())
    with pytest.raises(OperandError, match="spread too wide"):
        to_nvfp4(up, largest_exponent(gate))  # too small: scales would exceed 2^8


def test_every_matrix_of_a_stack_has_its_own_global_scale() -> None:
    tensors = [random_tensor(8, 64, lowest=low, highest=low + 5, seed=low + 30) for low in (-30, 0, 20)]
    stack = MxFp4Tensor(torch.stack([t.packed for t in tensors]), torch.stack([t.scale for t in tensors]))
    converted = to_nvfp4(stack)
    assert converted.global_scale.tolist() == [2.0 ** (low + 5 - 8) for low in (-30, 0, 20)]
    assert same_bits(converted.dequantize(), stack.dequantize())


def test_quantised_gaussian_survives_conversion() -> None:
    w = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    tensor = mxfp4.quantize(w)
    assert same_bits(to_nvfp4(tensor).dequantize(), tensor.dequantize())
    assert (tensor.dequantize() - w).norm() / w.norm() < 0.13


def test_wrong_input_is_named() -> None:
    packed, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.full((4, 2), 127, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"MXFP4 packed: expected dtype torch\.uint8, found torch\.int8"):
        MxFp4Tensor(packed.view(torch.int8), scale)
    with pytest.raises(TypeError, match="MXFP4 scale: expected dtype"):
        MxFp4Tensor(packed, scale.view(torch.float8_e8m0fnu))
    with pytest.raises(ValueError, match=r"MXFP4 scale: expected shape \(4, 2\), found \(4, 1\)"):
        MxFp4Tensor(packed, scale[:, :1])
    with pytest.raises(ValueError, match=r"weight: .*multiple of 32, found 48"):
        mxfp4.quantize(torch.zeros(4, 48))
    scale[1, 1] = 255
    with pytest.raises(OperandError, match=r"MXFP4 scale: expected bytes 0\.\.254, found 255"):
        to_nvfp4(MxFp4Tensor(packed, scale))
