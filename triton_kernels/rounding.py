"""Conversions of fp32 to the narrow formats, on the bits: device functions shared by every kernel.

Each equals ``nvfp4_sgl.numerics`` bit for bit. They are integer arithmetic because Triton's own casts are not the same
everywhere: the interpreter truncates fp32 to bf16 and mangles fp32 to E4M3. Integer code also keeps what it is given
rounded: an addition of a large constant, the usual way to round, could be fused with the product before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNFUSED = {"enable_fp_fusion": False}
"""Launch option: a product is rounded before it is added to anything."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter."""

BF16_MAX = tl.constexpr(3.3895313892515355e38)
"""Largest finite bf16."""


@triton.jit
def finite(x):
    """NaN → +0, magnitudes above the largest finite bf16 (infinities, too) → that; the sign of zero is kept."""
    return tl.minimum(tl.maximum(tl.where(x != x, 0.0, x), -BF16_MAX), BF16_MAX)


@triton.jit
def round_to_bf16(x):
    """fp32 → fp32 that bf16 holds exactly, nearest, ties to even; NaN → the quiet NaN. Follow with ``.to`` bf16."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x != x, 0x7FC00000, rounded).to(tl.float32, bitcast=True)


@triton.jit
def round_for(x, pointer):
    """fp32 ``x`` in the type that ``pointer`` points to, bf16 or fp32; the hardware casts where there is any."""
    if pointer.dtype.element_ty == tl.bfloat16:
        if INTERPRETED:
            x = round_to_bf16(x)
        return x.to(tl.bfloat16)
    else:
        return x


@triton.jit
def encode_e4m3(x):
    """int32 E4M3 code (0..255) of fp32 ``x``, no NaN: nearest, ties to even, saturating at ±448; the sign is kept."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count multiples of 2^-9. Shifted by 25, every significand rounds to zero.
    significand = (magnitude & 0x7FFFFF) | 0x800000
    shift = tl.minimum(tl.maximum(141 - (magnitude >> 23), 21), 25)
    half = (shift * 0 + 1) << (shift - 1)
    subnormal = (significand + half - 1 + ((significand >> shift) & 1)) >> shift
    return tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)  # 2^-6


@triton.jit
def decode_e4m3(code):
    """fp32 value of a non-negative int32 E4M3 code (0..126), exact."""
    normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)  # 2^-9


@triton.jit
def encode_e2m1(x):
    """int32 E2M1 code (0..15) of fp32 ``x``, no NaN: nearest, ties to the even code, saturating at ±6; sign kept."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x40C00000)  # 6
    large = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - 252
    # Below 1 the neighbours are 0, 0.5 and 1: up beyond 0.25 and from 0.75 on.
    small = (magnitude > 0x3E800000).to(tl.int32) + (magnitude >= 0x3F400000).to(tl.int32)
    return tl.where(magnitude < 0x3F800000, small, large) | ((bits >> 28) & 8)


@triton.jit
def encode_ue8m0_ceil(x):
    """int32 UE8M0 byte of the smallest power of two not below fp32 ``x``; x must be normal and at most 2^127."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def reciprocal_ue8m0(byte):
    """fp32 2^(127 − byte) of an int32 UE8M0 byte, 0..253, exact."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)
