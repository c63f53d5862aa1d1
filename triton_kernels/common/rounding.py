"""Conversions between fp32 and the narrow formats (bf16, E4M3, E2M1, UE8M0): device functions shared by every kernel.

Each equals ``nvfp4_sgl.formats`` bit for bit. They avoid Triton's casts, which differ between the GPU and the
interpreter: the interpreter truncates fp32 to bf16 and mangles fp32 to E4M3. Where adding a large constant does the
rounding, a minimum precedes the addition, so that the addition cannot be fused with a product in the caller.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNFUSED = {"enable_fp_fusion": False}
"""Launch option: the compiler does not fuse a product with an addition, so every product is rounded."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter."""

BF16_MAX = tl.constexpr(3.3895313892515355e38)
BF16_MAX_BITS = tl.constexpr(0x7F7F0000)
"""Bits, as fp32, of ``BF16_MAX``, the largest finite bf16."""


@triton.jit
def finite(x):
    """Replace NaN by +0 and clamp to ± the largest finite bf16, infinities included; the sign of zero is kept."""
    return tl.minimum(tl.maximum(tl.where(x != x, 0.0, x), -BF16_MAX), BF16_MAX)


@triton.jit
def round_to_bf16(x):
    """Round fp32 to fp32 values that bf16 holds exactly, nearest, ties to even; NaN stays NaN.

    Follow with ``.to(tl.bfloat16)``, which is then exact. On a GPU this is the hardware's conversion.
    """
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x != x, 0x7FC00000, rounded).to(tl.float32, bitcast=True)
    else:
        # In pairs: the compiler's own cast converts one value at a time, at a quarter of the rate.
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        ).to(tl.float32)


@triton.jit
def widen(x):
    """Convert bf16 to fp32, exactly.

    In pairs: for its own cast the compiler takes pairs apart, and joins them again to store.
    """
    if INTERPRETED:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def round_for(x, pointer):
    """Convert fp32 ``x`` to the type that ``pointer`` points to, bf16 (rounded to nearest even) or fp32."""
    if pointer.dtype.element_ty == tl.bfloat16:
        return round_to_bf16(x).to(tl.bfloat16)
    else:
        return x


@triton.jit
def product(x, y):
    """Multiply fp32 ``x · y`` and round, never fused with an addition, whether or not the launch is ``UNFUSED``."""
    if INTERPRETED:
        return x * y
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def signed_sum(x, sign, y):
    """Compute fp32 ``x · sign + y`` for a sign of 1 or -1: the sum or difference, rounded once, in one instruction.

    It uses ``mad``, not ``fma``, the name that the compiler gives to the multiply-adds that it fuses: tests refuse
    those.
    """
    if INTERPRETED:
        return x * sign + y
    else:
        return tl.inline_asm_elementwise(
            "mad.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, sign, y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def reciprocal(x):
    """Compute ``1 / x`` of fp32, correctly rounded: the result of ``div_rn`` for half the instructions."""
    if INTERPRETED:
        return tl.div_rn(1.0, x)
    else:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def encode_e4m3(x):
    """Encode fp32 ``x``, not NaN, as int32 E4M3 codes (0..255).

    Nearest, ties to even, saturating at ±448; the sign is kept, of zero too.
    """
    if INTERPRETED:
        magnitude = tl.minimum(tl.abs(x), 448.0)
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = (bits + ((bits >> 20) & 1) + (0x7FFFF - (120 << 23))) >> 20
        # Below 2^-6 a code counts multiples of 2^-9, which is the spacing of fp32 at 2^14.
        subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        return tl.where(magnitude < 0.015625, subnormal, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 pair;
            cvt.rn.satfinite.e4m3x2.f32 pair, 0f00000000, $1;
            cvt.u32.u16 $0, pair;
            }
            """,
            "=r,f",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def encode_e4m3_bytes(x):
    """Encode fp32 ``x`` as uint8 E4M3 codes; NaN gives 0, all else is as in :func:`encode_e4m3`.

    On a GPU four values at a time: two conversions rather than four, and one word to store. NaN is recognised by its
    code, 0x7F, which no number has after saturation.
    """
    if INTERPRETED:
        return encode_e4m3(tl.where(x != x, 0.0, x)).to(tl.uint8)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            .reg .b32 codes, nan;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 codes, {low, high};
            and.b32 nan, codes, 0x7F7F7F7F;
            add.u32 nan, nan, 0x01010101;
            prmt.b32 nan, nan, nan, 0xBA98;
            not.b32 nan, nan;
            and.b32 $0, codes, nan;
            }
            """,
            "=r,f,f,f,f",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def decode_e4m3(code):
    """Decode a non-negative int32 E4M3 code (0..126) to fp32, exactly."""
    # Shift exponent and mantissa to their place in fp32, where subnormal codes become subnormal numbers; the exponent
    # biases differ by 120.
    return (code << 20).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def decode_e2m1(code):
    """Decode an int32 E2M1 code (0..15) to fp32, exactly; the sign of zero is kept."""
    # As in decode_e4m3; the exponent biases differ by 126.
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def encode_e2m1(x):
    """Encode fp32 ``x``, not NaN, as int32 E2M1 codes (0..15).

    Nearest, ties to the even code, saturating at ±6; the sign is kept, of zero too.
    """
    magnitude = tl.minimum(tl.abs(x), 6.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # From 1 on: round to one bit of mantissa, and count from code 2 = 1.0. One constant does both.
    large = (bits + ((bits >> 22) & 1) + (0x1FFFFF - (252 << 22))) >> 22
    # Below 1 a code counts halves, which is the spacing of fp32 at 2^22.
    small = (magnitude + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    return tl.where(magnitude < 1.0, small, large) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _e2m1_magnitude(x):
    """Encode ``|x|`` as E2M1, 0..7, in the low byte of an int32, with multiplications and additions alone.

    Comparisons would run at half their rate. The code is ``4 sat(y) + 2 sat(y - 1) + sat(y - 2)`` of ``y = |x| / 2``,
    rounded to an integer, where sat clamps to [0, 1]; each term reaches its maximum, an even code, before the next term
    begins. The terms are exact where they matter. They are added to 2^23, where fp32 counts integers, so each addition
    rounds to nearest, ties to even.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 magnitude, part, sum;
        abs.f32 magnitude, $1;
        mul.rn.ftz.sat.f32 part, magnitude, 0f3F000000;
        fma.rn.ftz.f32 sum, part, 0f40800000, 0f4B000000;
        fma.rn.ftz.sat.f32 part, magnitude, 0f3F000000, 0fBF800000;
        fma.rn.ftz.f32 sum, part, 0f40000000, sum;
        fma.rn.ftz.sat.f32 part, magnitude, 0f3F000000, 0fC0000000;
        add.rn.ftz.f32 sum, sum, part;
        mov.b32 $0, sum;
        }
        """,
        "=r,f",
        [x],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _joined_nibbles(x0, x1, x2, x3, x4, x5, x6, x7):
    """Encode eight fp32 as E2M1 codes in one int32: magnitudes by :func:`_e2m1_magnitude`, signs from the values."""
    b0 = _e2m1_magnitude(x1) * 16 + _e2m1_magnitude(x0)
    b1 = _e2m1_magnitude(x3) * 16 + _e2m1_magnitude(x2)
    b2 = _e2m1_magnitude(x5) * 16 + _e2m1_magnitude(x4)
    b3 = _e2m1_magnitude(x7) * 16 + _e2m1_magnitude(x6)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, codes, even, odd;
        prmt.b32 low, $1, $2, 0x0040;
        prmt.b32 high, $3, $4, 0x0040;
        prmt.b32 codes, low, high, 0x5410;
        prmt.b32 low, $5, $7, 0x0073;
        prmt.b32 high, $9, $11, 0x0073;
        prmt.b32 even, low, high, 0x5410;
        prmt.b32 low, $6, $8, 0x0073;
        prmt.b32 high, $10, $12, 0x0073;
        prmt.b32 odd, low, high, 0x5410;
        shr.u32 even, even, 4;
        lop3.b32 codes, codes, even, 0x08080808, 0xF8;
        lop3.b32 $0, codes, odd, 0x80808080, 0xF8;
        }
        """,
        "=r,r,r,r,r,f,f,f,f,f,f,f,f",
        [b0, b1, b2, b3, x0, x1, x2, x3, x4, x5, x6, x7],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def encode_e2m1_word(x0, x1, x2, x3, x4, x5, x6, x7):
    """Encode eight fp32 as E2M1 codes in one int32, the first in the lowest nibble, each as in :func:`encode_e2m1`."""
    if INTERPRETED:
        low = encode_e2m1(x0) | (encode_e2m1(x1) << 4) | (encode_e2m1(x2) << 8) | (encode_e2m1(x3) << 12)
        high = encode_e2m1(x4) | (encode_e2m1(x5) << 4) | (encode_e2m1(x6) << 8) | (encode_e2m1(x7) << 12)
        return low | (high << 16)
    elif tl.target_info.cuda_capability_geq(10, 0):
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b8 b0, b1, b2, b3;
            cvt.rn.satfinite.e2m1x2.f32 b0, $2, $1;
            cvt.rn.satfinite.e2m1x2.f32 b1, $4, $3;
            cvt.rn.satfinite.e2m1x2.f32 b2, $6, $5;
            cvt.rn.satfinite.e2m1x2.f32 b3, $8, $7;
            mov.b32 $0, {b0, b1, b2, b3};
            }
            """,
            "=r,f,f,f,f,f,f,f,f",
            [x0, x1, x2, x3, x4, x5, x6, x7],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return _joined_nibbles(x0, x1, x2, x3, x4, x5, x6, x7)


@triton.jit
def encode_ue8m0_ceil(x):
    """Encode fp32 ``x`` as the int32 UE8M0 byte of the smallest power of two not below it.

    ``x`` must be normal and at most 2^127.
    """
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def reciprocal_ue8m0(byte):
    """Compute fp32 2^(127 − byte) of an int32 UE8M0 byte, 0..253, exactly."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)
