"""Conversions of fp32 to the narrow formats, on the bits: device functions shared by every kernel.

Each equals ``nvfp4_sgl.numerics`` bit for bit. They do without Triton's casts, which are not the same everywhere: the
interpreter truncates fp32 to bf16 and mangles fp32 to E4M3. Where a large constant is added to round, a minimum stands
before the addition, so that it cannot be fused with a product of the caller's.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNFUSED = {"enable_fp_fusion": False}
"""Launch option: a product is rounded before it is added to anything."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter."""

BF16_MAX = tl.constexpr(3.3895313892515355e38)
BF16_MAX_BITS = tl.constexpr(0x7F7F0000)
"""Largest finite bf16, and its bits as fp32."""


@triton.jit
def finite(x):
    """NaN → +0, magnitudes above the largest finite bf16 (infinities, too) → that; the sign of zero is kept."""
    return tl.minimum(tl.maximum(tl.where(x != x, 0.0, x), -BF16_MAX), BF16_MAX)


@triton.jit
def round_to_bf16(x):
    """fp32 → fp32 that bf16 holds exactly, nearest, ties to even; NaN stays NaN. Follow with ``.to`` bf16.

    The hardware's cast where there is any.
    """
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x != x, 0x7FC00000, rounded).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def round_for(x, pointer):
    """fp32 ``x`` in the type that ``pointer`` points to, bf16 or fp32."""
    if pointer.dtype.element_ty == tl.bfloat16:
        return round_to_bf16(x).to(tl.bfloat16)
    else:
        return x


@triton.jit
def encode_e4m3(x):
    """int32 E4M3 code (0..255) of fp32 ``x``, no NaN: nearest, ties to even, saturating at ±448; the sign is kept."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = (bits + ((bits >> 20) & 1) + (0x7FFFF - (120 << 23))) >> 20
    # Below 2^-6 codes count multiples of 2^-9, the spacing of fp32 at 2^14.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0.015625, subnormal, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def decode_e4m3(code):
    """fp32 value of a non-negative int32 E4M3 code (0..126), exact."""
    normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)  # 2^-9


@triton.jit
def encode_e2m1(x):
    """int32 E2M1 code (0..15) of fp32 ``x``, no NaN: nearest, ties to the even code, saturating at ±6; sign kept."""
    magnitude = tl.minimum(tl.abs(x), 6.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # From 1 on: round to one bit of mantissa, and count from code 2 = 1.0. The constants are one.
    large = (bits + ((bits >> 22) & 1) + (0x1FFFFF - (252 << 22))) >> 22
    # Below 1 codes count halves, the spacing of fp32 at 2^22.
    small = (magnitude + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    return tl.where(magnitude < 1.0, small, large) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def encode_e2m1_pair(even, odd):
    """int32 byte of two E2M1 codes, ``even`` in the low nibble; as :func:`encode_e2m1`, by one instruction on SM100."""
    if INTERPRETED:
        return encode_e2m1(even) | (encode_e2m1(odd) << 4)
    elif tl.target_info.cuda_capability_geq(10, 0):
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b8 pair;
            cvt.rn.satfinite.e2m1x2.f32 pair, $2, $1;
            cvt.u32.u8 $0, pair;
            }
            """,
            "=r,f,f",
            [even, odd],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return encode_e2m1(even) | (encode_e2m1(odd) << 4)


@triton.jit
def encode_ue8m0_ceil(x):
    """int32 UE8M0 byte of the smallest power of two not below fp32 ``x``; x must be normal and at most 2^127."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def reciprocal_ue8m0(byte):
    """fp32 2^(127 − byte) of an int32 UE8M0 byte, 0..253, exact."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)
