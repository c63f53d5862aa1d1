"""Block-scaled FP8 weights: 128×128 blocks of E4M3 with UE8M0 scales. Source: specification §3.5, §8.1.

Ragged edges are allowed: the last block of a dimension that is no multiple of 128 is simply smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nvfp4_sgl.formats import ue8m0
from nvfp4_sgl.formats.blocks import FP8
from nvfp4_sgl.formats.checks import require_dtype, require_matrix, require_shape
from nvfp4_sgl.formats.e4m3 import E4M3_MAX, round_to_e4m3
from nvfp4_sgl.formats.values import POWER_SCALE_MAX, divide, require_finite

BLOCK = FP8.columns
AMAX_FLOOR = 1e-4
"""Block maxima are floored here (on the amax, not on the scale), as DeepSeek's, SGLang's and vLLM's code does."""

VALUE_MAX = 1.875 * 2.0**127
"""Activations are clamped here: 240·2^120 is the largest E4M3 multiple of a power-of-two scale that is finite in
fp32, and the largest bf16 would round to 256·2^120 = infinity."""


@dataclass(frozen=True)
class Fp8BlockTensor:
    """A matrix [..., N, K], or a stack of them: value = e4m3 · 2^(scale − 127).

    weight: float8_e4m3fn [..., N, K]. scale: ``float8_e8m0fnu`` or uint8 [..., ceil(N/128), ceil(K/128)].
    """

    weight: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        require_dtype("FP8 weight", self.weight, torch.float8_e4m3fn)
        ue8m0.as_bytes(self.scale, "FP8 weight scale")
        require_matrix("FP8 weight", self.weight)
        n, k = self.weight.shape[-2:]
        require_shape("FP8 weight scale", self.scale, (*self.weight.shape[:-2], -(-n // BLOCK), -(-k // BLOCK)))

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., N, K]."""
        return self.weight.shape

    def dequantize(self) -> Tensor:
        """fp32 [..., N, K], exact; exact in bf16 too. NaN where a scale byte is 255."""
        return dequantize_blocks(self.weight, ue8m0.decode(ue8m0.as_bytes(self.scale)))


def dequantize_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., N, K]: e4m3 · scale, one rounding; exact where scales are powers of two.

    weight: float8_e4m3fn [..., N, K]. scale: fp32 [..., ceil(N/128), ceil(K/128)].
    """
    require_dtype("FP8 weight", weight, torch.float8_e4m3fn)
    require_dtype("FP8 weight scale", scale, torch.float32)
    n, k = weight.shape[-2:]
    require_shape("FP8 weight scale", scale, (*weight.shape[:-2], -(-n // BLOCK), -(-k // BLOCK)))
    scale = scale.repeat_interleave(BLOCK, dim=-2)[..., :n, :].repeat_interleave(BLOCK, dim=-1)[..., :k]
    return weight.float() * scale


def quantize_weight(w: Tensor) -> Fp8BlockTensor:
    """Quantise bf16 or fp32 [..., N, K] (|w| ≤ 2^127) to 128×128 blocks; the scale comes out as ``float8_e8m0fnu``.

    In fp32: s = 2^ceil(log2(max(amax_block, 1e-4) / 448)), value = e4m3(w / s). Nothing saturates, as s ≥ amax/448.
    """
    require_matrix("weight", w)
    require_dtype("weight", w, torch.float32, torch.bfloat16)
    require_finite("weight", w, POWER_SCALE_MAX)
    n, k = w.shape[-2:]
    blocks = functional.pad(w.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = blocks.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., N/128, 128, K/128, 128]
    scale = block_exponent(blocks.abs().amax(dim=(-3, -1)))
    inverse = ue8m0.decode_reciprocal(scale)[..., :, None, :, None]
    weight = round_to_e4m3(blocks * inverse).flatten(-4, -3).flatten(-2)[..., :n, :k].contiguous()
    return Fp8BlockTensor(weight, scale.view(torch.float8_e8m0fnu))


def block_exponent(amax: Tensor) -> Tensor:
    """uint8 UE8M0 byte of 2^ceil(log2(max(amax, 1e-4) / 448)); amax fp32, any shape. The key cache uses it too.

    The division cannot round onto a power of two from above, so this is the exact ceiling for every fp32 amax.
    A kernel may multiply by fp32(1/448) instead: the exponent is the same for every fp32 amax.
    """
    return ue8m0.encode_ceil(divide(amax.clamp_min(AMAX_FLOOR), E4M3_MAX))
