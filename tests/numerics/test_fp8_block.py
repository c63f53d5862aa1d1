"""Block-scaled FP8 weights against exact fractions, ragged edges included."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from nvfp4_sgl.formats import fp8_block, ue8m0
from nvfp4_sgl.formats.fp8_block import Fp8BlockTensor, quantize_weight
from tests.numerics import oracles
from tests.numerics.oracles import ceil_log2

FLOOR = Fraction(float(np.float32(1e-4)))


def exact_exponent(amax: float) -> int:
    return ceil_log2(max(Fraction(amax), FLOOR) / 448)


def test_the_exponent_of_every_bf16_maximum_and_of_its_fp32_neighbours() -> None:
    amax = oracles.all_bf16().float().abs().unique()
    # 448·2^k is where the exponent steps; its neighbours are where a rounded quotient would step too late.
    steps = torch.tensor([448.0 * 2.0**k for k in range(-30, 119)])
    near = torch.cat((amax, steps))
    near = torch.cat(
        (near, torch.nextafter(near, torch.tensor(float("inf"))), torch.nextafter(near, torch.tensor(0.0)))
    )
    near = near[torch.isfinite(near)]
    expected = [exact_exponent(v) + 127 for v in near.tolist()]
    assert fp8_block.block_exponent(near).tolist() == expected
    # What kernels may do instead. The exponent steps at 448·2^k only, and rounding is monotonic: this is a proof.
    by_product = near.clamp_min(1e-4).numpy() * np.float32(1 / 448)
    assert ue8m0.encode_ceil(torch.from_numpy(by_product)).tolist() == expected


@pytest.mark.parametrize(("n", "k"), [(128, 128), (300, 200), (1, 129), (127, 1), (256, 384)])
def test_weight_recipe_is_exactly_as_stated(n: int, k: int) -> None:
    w = torch.nan_to_num(oracles.awkward_rows(n, k, seed=n + k).float(), 0.0, 1.0, -1.0).clamp(-(2.0**127), 2.0**127)
    got = quantize_weight(w)
    assert got.scale.dtype == torch.float8_e8m0fnu
    assert got.scale.shape == (-(-n // 128), -(-k // 128))
    expected = torch.empty(n, k)
    for i in range(got.scale.shape[0]):
        for j in range(got.scale.shape[1]):
            block = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
            exponent = exact_exponent(w[block].abs().max().item())
            assert got.scale.view(torch.uint8)[i, j].item() == exponent + 127
            codes = oracles.e4m3_codes(np.ldexp(w[block].numpy().astype(np.float64), -exponent).astype(np.float32))
            assert np.array_equal(got.weight.view(torch.uint8)[block].numpy(), codes)
            expected[block] = torch.from_numpy(np.ldexp(oracles.e4m3_values(codes), exponent).astype(np.float32))
    assert torch.equal(got.dequantize(), expected)
    assert torch.equal(got.dequantize().to(torch.bfloat16).float(), expected)


def test_weights_nothing_saturates() -> None:
    w = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    w[:128, :128] = 448 * 2.0**-9
    got = quantize_weight(w)
    assert ((got.dequantize() - w).abs() <= w.abs() / 16 + 2.0**-16).all()


def test_stacked_weights_and_both_scale_dtypes() -> None:
    w = torch.randn(2, 3, 130, 140, generator=torch.Generator().manual_seed(1))
    got = quantize_weight(w)
    assert got.scale.shape == (2, 3, 2, 2)
    assert torch.equal(got.dequantize()[1, 2], quantize_weight(w[1, 2]).dequantize())
    assert torch.equal(Fp8BlockTensor(got.weight, got.scale.view(torch.uint8)).dequantize(), got.dequantize())


def test_wrong_input_is_named() -> None:
    good = quantize_weight(torch.zeros(130, 128))
    with pytest.raises(ValueError, match=r"FP8 weight scale: expected shape \(2, 1\), found \(1, 1\)"):
        Fp8BlockTensor(good.weight, good.scale[:1])
    with pytest.raises(TypeError, match=r"FP8 weight scale: expected dtype .* found torch\.float32"):
        Fp8BlockTensor(good.weight, torch.zeros(2, 1))
    with pytest.raises(TypeError, match=r"FP8 weight: expected dtype torch\.float8_e4m3fn"):
        Fp8BlockTensor(torch.zeros(130, 128), good.scale)
    with pytest.raises(ValueError, match="weight: expected finite values"):
        quantize_weight(torch.full((2, 2), float("inf")))
    with pytest.raises(ValueError, match="found 4 NaN, infinite or larger"):
        quantize_weight(torch.full((2, 2), 2.5e38))
