"""NVFP4: E2M1 codes, an E4M3 scale for each 16 of a row, one fp32 scale above. Source: specification §9.1–9.3.

value = e2m1 · fp32(block_scale) · global. The first product is exact in fp32 (2 + 4 significant bits).

Two recipes are defined here, both in fp32 with IEEE round-to-nearest-even and no fused multiply-add anywhere
(every step is a single multiply, divide, maximum or comparison, so there is nothing to fuse):

* weights, :func:`quantize_weight`: modelopt's;
* activations, :func:`quantize_rows`: what every kernel of this project that writes NVFP4 must equal bit for bit.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats import e2m1
from nvfp4_sgl.formats.blocks import NVFP4
from nvfp4_sgl.formats.checks import require_dtype, require_matrix, require_multiple, require_shape, require_table
from nvfp4_sgl.formats.e2m1 import E2M1_MAX
from nvfp4_sgl.formats.e4m3 import E4M3_MAX, E4M3_MIN, round_to_e4m3
from nvfp4_sgl.formats.values import as_finite_fp32, divide, require_finite
from nvfp4_sgl.limits import MAX_SWIGLU_LIMIT, MIN_QUANTIZED_SWIGLU_LIMIT

BLOCK = NVFP4.columns
FULL_SCALE = E2M1_MAX * E4M3_MAX
"""2688: the largest |e2m1 · e4m3|, so a global scale of amax/2688 just fits."""

AMAX_FLOOR = 2.0**-100
"""Smallest amax a global or row scale is derived from. Keeps every reciprocal and product of the recipes normal in
fp32, so that hardware which flushes subnormals agrees with hardware which does not."""

SCALE_MIN, SCALE_MAX = 2.0**-117, 2.0**116
"""Range of a global or row scale given from outside: below it reciprocals or products would become subnormal, above
it the largest value, 2688 times the scale, would not be finite."""


def round_to_fp32(x: float) -> float:
    """The fp32 nearest to ``x``, as a Python float."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


INVERSE_FULL_SCALE = round_to_fp32(1.0 / FULL_SCALE)
"""fp32(1/2688), the constant the activation recipe multiplies by."""

INVERSE_E2M1_MAX = round_to_fp32(1.0 / E2M1_MAX)
"""fp32(1/6), likewise."""


@dataclass(frozen=True)
class NvFp4Tensor:
    """A matrix [..., N, K], or a stack of them, in NVFP4: weights as checkpoints store them, activations [T, K].

    packed: uint8 [..., N, K/2], low nibble = even k. block_scale: float8_e4m3fn [..., N, K/16].
    global_scale: fp32; one for each matrix, 0-d or broadcastable over the leading dimensions [...]; or one for each
    row, [..., N], as of activations and of weights merged of several.
    """

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor

    def __post_init__(self) -> None:
        require_dtype("NVFP4 packed", self.packed, torch.uint8)
        require_dtype("NVFP4 block_scale", self.block_scale, torch.float8_e4m3fn)
        require_dtype("NVFP4 global_scale", self.global_scale, torch.float32)
        require_matrix("NVFP4 packed", self.packed, BLOCK // 2)
        blocks = self.packed.shape[-1] * 2 // BLOCK
        require_shape("NVFP4 block_scale", self.block_scale, (*self.packed.shape[:-1], blocks))
        if self.global_scale.shape != self.packed.shape[:-1]:
            _require_broadcast("NVFP4 global_scale", self.global_scale, self.packed.shape[:-2])

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., N, K]."""
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * 2))

    def global_scale_of_rows(self) -> Tensor:
        """fp32 [..., N]: the global scale of each row, a view where it is the same for several."""
        one_each = self.global_scale.shape == self.packed.shape[:-1]
        return self.global_scale if one_each else self.global_scale[..., None].expand(self.packed.shape[:-1])

    def unscaled(self) -> Tensor:
        """fp32 [..., N, K]: e2m1 · block_scale, exact; the global scale is left to the caller (a GEMM's alpha)."""
        return _times_block_scale(self.packed, self.block_scale)

    def dequantize(self) -> Tensor:
        """fp32 [..., N, K]: (e2m1 · block_scale) · global_scale, one rounding."""
        return self.unscaled() * self.global_scale_of_rows()[..., None]

    def to(self, device: torch.device) -> NvFp4Tensor:
        """A copy on ``device``, also where it is there already: what was read lies in the checkpoint's file."""
        parts = (part.to(device, copy=True) for part in (self.packed, self.block_scale, self.global_scale))
        return NvFp4Tensor(*parts)


def quantize_weight(w: Tensor, global_scale: Tensor | None = None) -> NvFp4Tensor:
    """Quantise a weight matrix (or a stack) as modelopt does.

    w: bf16 or fp32 [..., N, K], finite, K a multiple of 16. global_scale: fp32, 0-d or broadcastable over [...],
    within [2^-117, 2^116]; None derives one for each matrix. Pass the same scale to tie matrices (gate and up).

    In fp32, in this order::

        g    = max(amax over N,K, 2^-100) / 2688
        s    = amax_block / (6·g);   s = 1 where s == 0;   clamp to [2^-9, 448];   s8 = e4m3(s)
        code = e2m1(w / (s8·g)), saturating

    The floor of 2^-100 is ours: it makes an all-zero matrix well defined (scale 1, codes ±0). A block maximum may
    land anywhere in [5.67, 6.37]·s8·g, so saturation of single elements is normal.
    """
    require_matrix("weight", w, BLOCK)
    require_dtype("weight", w, torch.float32, torch.bfloat16)
    require_finite("weight", w)
    w = w.float()
    if global_scale is None:
        g = w.abs().amax(dim=(-2, -1)).clamp_min(AMAX_FLOOR)
        g = divide(g, FULL_SCALE)
    else:
        g = global_scale
        require_dtype("global_scale", g, torch.float32)
        _require_broadcast("global_scale", g, w.shape[:-2])
        if not bool(((g >= SCALE_MIN) & (g <= SCALE_MAX)).all()):
            raise OperandValueError(f"global_scale: expected every value in [2^-117, 2^116], found {g.tolist()}")
    blocks = w.unflatten(-1, (-1, BLOCK))
    s = blocks.abs().amax(dim=-1) / (E2M1_MAX * g)[..., None, None]
    s = torch.where(s == 0, torch.ones_like(s), s).clamp(E4M3_MIN, E4M3_MAX)
    block_scale = round_to_e4m3(s)
    return NvFp4Tensor(encode_blocks(blocks, block_scale, g), block_scale, g)


def encode_blocks(blocks: Tensor, block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """uint8 [..., N, K/2]: the codes of weights under scales that are given, the last line of :func:`quantize_weight`.

    blocks: fp32 [..., N, K/16, 16], finite. block_scale: float8_e4m3fn [..., N, K/16], positive. global_scale: fp32,
    broadcastable over [...].
    """
    step = block_scale.float() * global_scale[..., None, None]
    return e2m1.pack(e2m1.encode(blocks / step[..., None]).flatten(-2))


def quantize_rows(x: Tensor, row_scale: float | None = None) -> NvFp4Tensor:
    """Quantise activations to NVFP4: the recipe every kernel must equal bit for bit.

    x: bf16 or fp32 [T, K], K a multiple of 16, T may be 0. row_scale: one constant for all rows, within
    [2^-117, 2^116]; None takes each row's own maximum, which needs no calibration and never saturates a block.
    The result's global_scale is g below, fp32 [T].

    All in fp32, each line one IEEE round-to-nearest-even operation. In particular the two divisions are
    correctly rounded: a kernel must not use an approximate reciprocal::

        x    = NaN → +0, then clamp to ±(largest finite bf16)
        g    = max(max|x| over the row, 2^-100) * fp32(1/2688)        or    g = fp32(row_scale)
        r    = 1 / g
        s    = e4m3((amax_block * r) * fp32(1/6)),  saturating at 448
        d    = fp32(s) * g
        inv  = 1 / d
        code = e2m1(x * inv), saturating, sign bit of x kept;  code = 0 in a block with s == 0

    A block whose scale underflows (amax_block ≤ 6·2^-10·g, amax_row/458752 with the dynamic scale) gets
    scale 0 and codes 0. No step can make a NaN, and no step whose result matters is subnormal.
    """
    require_table("activations", x)
    require_dtype("activations", x, torch.float32, torch.bfloat16)
    require_multiple("activations", "K", x.shape[1], BLOCK)
    x = as_finite_fp32(x)
    blocks = x.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(dim=-1)
    if row_scale is None:
        g = amax.amax(dim=-1).clamp_min(AMAX_FLOOR) * INVERSE_FULL_SCALE
    else:
        if not SCALE_MIN <= row_scale <= SCALE_MAX:
            raise OperandValueError(f"row_scale: expected a value in [2^-117, 2^116], found {row_scale!r}")
        g = torch.full((x.shape[0],), row_scale, dtype=torch.float32, device=x.device)
    r = 1.0 / g
    block_scale = round_to_e4m3((amax * r[:, None]) * INVERSE_E2M1_MAX)
    d = block_scale.float() * g[:, None]
    codes = e2m1.encode(blocks * (1.0 / d)[..., None])
    # Where s == 0 the line above made infinities and NaN; none of its codes is kept.
    codes = torch.where((block_scale.float() == 0)[..., None], 0, codes).to(torch.uint8).flatten(-2)
    return NvFp4Tensor(e2m1.pack(codes), block_scale, g)


def swiglu_row_scale(limit: float) -> float:
    """Constant row scale for clamped SwiGLU outputs: fp32(limit²/2688). ``limit`` is ``swiglu_limit``.

    gate ≤ limit and |up| ≤ limit bound |silu(gate)·up| by limit², since silu(x) < x for x > 0 and silu ≥ −0.2785
    everywhere; hence limit ≥ 0.2785 is required. No block scale derived with it is cut off at 448.

    Raises:
        OperandValueError: ``limit`` is not from MIN_QUANTIZED_SWIGLU_LIMIT to MAX_SWIGLU_LIMIT.
    """
    if not MIN_QUANTIZED_SWIGLU_LIMIT <= limit <= MAX_SWIGLU_LIMIT:
        raise OperandValueError(
            f"swiglu_limit: expected a value from {MIN_QUANTIZED_SWIGLU_LIMIT:.4f} to"
            f" 2^{math.log2(MAX_SWIGLU_LIMIT):g}, found {limit!r}"
        )
    return round_to_fp32(limit * limit / FULL_SCALE)


def _times_block_scale(packed: Tensor, block_scale: Tensor) -> Tensor:
    values = e2m1.decode_packed(packed).unflatten(-1, (-1, BLOCK))
    return (values * block_scale.float()[..., None]).flatten(-2)


def _require_broadcast(name: str, scale: Tensor, leading: torch.Size) -> None:
    try:
        fits = torch.broadcast_shapes(scale.shape, leading) == leading
    except RuntimeError:
        fits = False
    if not fits:
        raise OperandValueError(
            f"{name}: expected a 0-d tensor or one broadcastable over the leading dimensions {tuple(leading)},"
            f" found shape {tuple(scale.shape)}"
        )
