"""MXFP8: E4M3 codes with a UE8M0 scale for each 32 of a row. Source: OCP MX 1.0; specification §3.5 for its weights.

What SM100's tensor cores multiply where a checkpoint has FP8 matrices:

* weights, :func:`from_blocks`: FP8 in blocks of 128 × 128 with UE8M0 scales, every value as it is;
* activations, :func:`quantize_rows`: what every kernel of this project that writes MXFP8 must equal bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nvfp4_sgl.formats import fp8_block, ue8m0
from nvfp4_sgl.formats.blocks import MXFP8
from nvfp4_sgl.formats.checks import require_dtype, require_matrix, require_shape, require_table
from nvfp4_sgl.formats.e4m3 import round_to_e4m3
from nvfp4_sgl.formats.fp8_block import VALUE_MAX, Fp8BlockTensor
from nvfp4_sgl.formats.values import as_finite_fp32

BLOCK = MXFP8.columns
TOP_EXPONENT = 8
"""448, E4M3's largest, is 1.75 · 2^this."""
BEYOND_TOP = 0x800000 - 0x600001
"""Added to the bits of a positive fp32, this carries into the exponent where the significand is above 1.75."""


@dataclass(frozen=True)
class MxFp8Tensor:
    """A matrix [..., N, K], or a stack of them, in MXFP8: value = e4m3 · 2^(scale − 127).

    codes: float8_e4m3fn [..., N, K]. scale: uint8 [..., N, ceil(K/32)].
    """

    codes: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        require_dtype("MXFP8 codes", self.codes, torch.float8_e4m3fn)
        require_dtype("MXFP8 scale", self.scale, torch.uint8)
        require_matrix("MXFP8 codes", self.codes)
        require_shape("MXFP8 scale", self.scale, (*self.codes.shape[:-1], -(-self.codes.shape[-1] // BLOCK)))

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., N, K]."""
        return self.codes.shape

    def dequantize(self) -> Tensor:
        """fp32 [..., N, K], exact. Scale byte 255 gives NaN."""
        scale = ue8m0.decode(self.scale).repeat_interleave(BLOCK, dim=-1)[..., : self.codes.shape[-1]]
        return self.codes.float() * scale

    def to(self, device: torch.device) -> MxFp8Tensor:
        """A copy on ``device``, also where it is there already: what was read lies in the checkpoint's file."""
        return MxFp8Tensor(self.codes.to(device, copy=True), self.scale.to(device, copy=True))


def from_blocks(blocks: Fp8BlockTensor) -> MxFp8Tensor:
    """The same values [..., N, K] as MXFP8: each 32 columns of a row get the scale of their block of 128 × 128.

    Scales must be UE8M0; the weight is shared, not copied.

    Raises:
        OperandTypeError: the scales have another dtype.
    """
    n, k = blocks.shape[-2:]
    scale = ue8m0.as_bytes(blocks.scale).repeat_interleave(fp8_block.BLOCK, dim=-2)[..., :n, :]
    scale = scale.repeat_interleave(fp8_block.BLOCK // BLOCK, dim=-1)[..., : -(-k // BLOCK)]
    return MxFp8Tensor(blocks.weight, scale.contiguous())


def quantize_rows(x: Tensor) -> MxFp8Tensor:
    """Quantise activations, bf16 or fp32 [T, K]. T may be 0.

    In fp32: x = NaN → +0, then clamp to ±1.875·2^127 (:data:`.fp8_block.VALUE_MAX`); s = the least power of two from
    2^-127 on with amax/s ≤ 448; code = e4m3(x / s), to nearest, ties to even.

    The exponent is rounded up, so that nothing saturates; OCP's floor(log2 amax) − 8 would cut maxima with a
    significand above 1.75 to 448, by up to an eighth. A block of zeros has scale byte 0 and codes ±0. x / s is exact
    but where it leaves fp32's normal numbers, which E4M3 rounds to zero.
    """
    require_table("activations", x)
    require_dtype("activations", x, torch.float32, torch.bfloat16)
    k = x.shape[1]
    blocks = functional.pad(as_finite_fp32(x).clamp(-VALUE_MAX, VALUE_MAX), (0, -k % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = block_exponent(blocks.abs().amax(dim=-1))
    codes = round_to_e4m3(blocks * ue8m0.decode_reciprocal(scale)[..., None]).flatten(-2)[:, :k].contiguous()
    return MxFp8Tensor(codes, scale)


def block_exponent(amax: Tensor) -> Tensor:
    """uint8 UE8M0 byte of the least power of two s, from 2^-127 on, with amax/s ≤ 448; amax finite fp32, any shape."""
    exponent = (amax.contiguous().view(torch.int32) + BEYOND_TOP) >> 23
    return (exponent - TOP_EXPONENT).clamp(min=0).to(torch.uint8)
