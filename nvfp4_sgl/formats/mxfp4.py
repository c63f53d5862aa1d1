"""MXFP4: E2M1 codes with a UE8M0 scale for each 32 of a row, and its exact conversion to NVFP4.

Source: specification §8.1 (the experts of the original releases), §9.6 (conversion); OCP MX 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats import e2m1, ue8m0
from nvfp4_sgl.formats.blocks import MXFP4
from nvfp4_sgl.formats.checks import holds_any, require_dtype, require_matrix, require_shape
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from nvfp4_sgl.formats.values import POWER_SCALE_MAX, divide, require_finite

BLOCK = MXFP4.columns
AMAX_FLOOR = 6.0 * 2.0**-126

TOP = 8
"""Block scales of a converted tensor start at 2^8, the largest power of two in E4M3."""

BOTTOM = -9
"""…and end at 2^-9, the smallest. So block exponents may differ by at most 17."""

LOWEST_GLOBAL_EXPONENT = -117
"""A converted tensor's global scale is at least 2^this, so that its smallest block scale times it is normal in fp32."""

HIGHEST_GLOBAL_EXPONENT = 116
"""…and at most 2^this, so that its largest value is finite (:data:`.nvfp4.SCALE_MAX`)."""


@dataclass(frozen=True)
class MxFp4Tensor:
    """A matrix [..., N, K], or a stack of them, in MXFP4: value = e2m1 · 2^(scale − 127).

    packed: uint8 [..., N, K/2], low nibble = even k (a checkpoint's int8 must be viewed as uint8).
    scale: uint8 [..., N, K/32] (``float8_e8m0fnu`` must be viewed as uint8: ``ue8m0.as_bytes``).
    """

    packed: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        require_dtype("MXFP4 packed", self.packed, torch.uint8)
        require_dtype("MXFP4 scale", self.scale, torch.uint8)
        require_matrix("MXFP4 packed", self.packed, BLOCK // 2)
        require_shape("MXFP4 scale", self.scale, (*self.packed.shape[:-1], self.packed.shape[-1] * 2 // BLOCK))

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., N, K]."""
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * 2))

    def dequantize(self) -> Tensor:
        """fp32 [..., N, K], exact (above fp32's subnormals: scale byte 2 or more). Scale byte 255 gives NaN."""
        values = e2m1.decode_packed(self.packed).unflatten(-1, (-1, BLOCK))
        return (values * ue8m0.decode(self.scale)[..., None]).flatten(-2)


def quantize(w: Tensor) -> MxFp4Tensor:
    """Quantise bf16 or fp32 [..., N, K] (|w| ≤ 2^127, K a multiple of 32) to MXFP4.

    In fp32: s = 2^ceil(log2(max(amax_block, 6·2^-126) / 6)), code = e2m1(w / s). Nothing saturates, as s ≥ amax/6.
    """
    require_matrix("weight", w, BLOCK)
    require_dtype("weight", w, torch.float32, torch.bfloat16)
    require_finite("weight", w, POWER_SCALE_MAX)
    blocks = w.float().unflatten(-1, (-1, BLOCK))
    scale = ue8m0.encode_ceil(divide(blocks.abs().amax(dim=-1).clamp_min(AMAX_FLOOR), e2m1.E2M1_MAX))
    codes = e2m1.encode(blocks * ue8m0.decode_reciprocal(scale)[..., None]).flatten(-2)
    return MxFp4Tensor(e2m1.pack(codes), scale)


def exponents(tensor: MxFp4Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest block exponent of each matrix, int32 [...], over blocks that hold anything but zeros.

    The largest is −127 for an all-zero matrix; the smallest is then the least that is exact, −126.
    """
    _require_no_nan(tensor)
    exponent, is_zero = tensor.scale.int() - ue8m0.BIAS, _is_zero_block(tensor)
    high = torch.where(is_zero, -ue8m0.BIAS, exponent).amax(dim=(-2, -1))
    least = high.clamp_min(LOWEST_GLOBAL_EXPONENT + BOTTOM)[..., None, None]
    low = torch.where(is_zero, least, exponent).amin(dim=(-2, -1))
    return low.to(torch.int32), high.to(torch.int32)


def largest_exponent(tensor: MxFp4Tensor) -> Tensor:
    """int32 [...]: the largest block exponent of each matrix, over blocks that hold anything but zeros.

    −127 for an all-zero matrix. Matrices that must share a global scale (gate and up) take the maximum of theirs.
    """
    return exponents(tensor)[1]


def why_not_exact(low: int, high: int) -> str | None:
    """Why a matrix whose block exponents reach from ``low`` to ``high`` has no exact NVFP4 form; ``None`` if it has.

    Block scales must be E4M3's powers of two, 2^-9 to 2^8, under a global scale from 2^-117 to 2^116.
    """
    m = max(high - TOP, LOWEST_GLOBAL_EXPONENT)
    if low - m < BOTTOM:
        return (
            f"block exponents from {low} to {high}, expected at most {TOP - BOTTOM} apart and none below"
            f" {LOWEST_GLOBAL_EXPONENT + BOTTOM}"
        )
    if m > HIGHEST_GLOBAL_EXPONENT:
        return f"a block exponent of {high}, expected at most {HIGHEST_GLOBAL_EXPONENT + TOP}"
    return None


def to_nvfp4(tensor: MxFp4Tensor, exponent: Tensor | None = None) -> NvFp4Tensor:
    """The same values in NVFP4, bit for bit; the packed codes are shared, not copied.

    exponent: int32 broadcastable over the leading dimensions, at least each matrix's :func:`largest_exponent`
    (the default). With m = max(exponent − 8, −117): global_scale = 2^m, and both halves of a block of exponent k
    get block scale 2^(k − m). Blocks of zeros get block scale 1, as their exponent means nothing.

    :class:`OperandValueError` if a scale is NaN, or if a block's scale is not within [2^-9, 2^8], that is if the
    exponents of one matrix spread over more than 17: such a tensor has no exact NVFP4 form.
    """
    _require_no_nan(tensor)
    top = largest_exponent(tensor) if exponent is None else exponent
    m = (top - TOP).clamp_min(LOWEST_GLOBAL_EXPONENT)
    k = tensor.scale.int() - ue8m0.BIAS - m[..., None, None]
    k = torch.where(_is_zero_block(tensor), 0, k)
    if holds_any((k < BOTTOM) | (k > TOP)):
        low, high = int(k.min()), int(k.max())
        raise OperandValueError(
            f"MXFP4 to NVFP4: expected block scales within 2^{BOTTOM}..2^{TOP} under the global scale, found"
            f" 2^{low}..2^{high}; the exponents spread too wide for an exact conversion: requantise from the source"
        )
    block_scale = ue8m0.decode((k + ue8m0.BIAS).to(torch.uint8)).to(torch.float8_e4m3fn)
    # As bytes: torch does not repeat e4m3 everywhere.
    halves = block_scale.view(torch.uint8).repeat_interleave(2, dim=-1).view(torch.float8_e4m3fn)
    global_scale = ue8m0.decode((m + ue8m0.BIAS).to(torch.uint8))
    return NvFp4Tensor(tensor.packed, halves, global_scale)


def _is_zero_block(tensor: MxFp4Tensor) -> Tensor:
    """bool [..., N, K/32]: every code of the block is ±0."""
    return (tensor.packed.unflatten(-1, (-1, BLOCK // 2)) & 0x77 == 0).all(dim=-1)


def _require_no_nan(tensor: MxFp4Tensor) -> None:
    if holds_any(tensor.scale == ue8m0.NAN_BYTE):
        raise OperandValueError("MXFP4 scale: expected bytes 0..254, found 255 (NaN); the tensor is damaged")
