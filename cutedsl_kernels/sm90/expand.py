"""NVFP4 to bf16 in registers: codes times their block scales, exact.

A code times its block scale has at most six significant bits, so bf16 holds it. Neither factor is formed at its own
magnitude: codes arrive as value * 2^-126 (twiddle.py), scales as value * 2^119, and the products are too large by
2^-VALUE_SHIFT, which the epilogue takes back in fp32.

For 16 codes of a lane: 16 masks, selections and rotations, 12 instructions for four scales, 8 multiplications.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Uint32

from .layout import SCALE_BIAS
from .twiddle import FIRST, FIRST_REST, JOINED, PAIR_MASK, SECOND, VALUE_EXPONENT

SCALE_BITS = 0x70007000
"""The high exponent bits of two bf16: with them a scale's byte, shifted by four, is a normal number."""
ZERO_SCALE = 0x7000
"""bf16 that the byte 0 becomes with ``SCALE_BITS``, 2^97, to be subtracted: exactly 0 is left, and every other scale is
so much larger (2^110 at least) that it is rounded back to itself."""
SCALE_EXPONENT = (0x70 << 1) + SCALE_BIAS - 127
"""Expanded scales are their values times two to this power."""
VALUE_SHIFT = -(VALUE_EXPONENT + SCALE_EXPONENT)
"""Expanded weights are their values divided by two to this power."""


def expand_pair(first: Any, second: Any, scales: Any) -> list[Any]:
    """Eight registers of two bf16 each: the A fragments of two steps of 16.

    Args:
        first, second: Uint32 words of codes.
        scales: Uint32, a byte for each (step, row g or g + 8).
    """
    joined = _select(first, second, FIRST_REST)
    registers: list[Any] = [None] * 8
    for word, taken in ((first, FIRST), (second, SECOND), (joined, JOINED)):
        for register, left in taken:
            registers[register] = _rotate(word, left) & Uint32(PAIR_MASK)
    factors = [expand_scale(scales, byte) for byte in range(4)]
    return [_multiply(value, factors[2 * (i // 4) + i % 2]) for i, value in enumerate(registers)]


def expand_scale(scales: Any, byte: int) -> Any:
    """A scale as two equal bf16, times 2^SCALE_EXPONENT."""
    zero = (ZERO_SCALE | 0x8000) * 0x10001
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 s, z; prmt.b32 s, {{$r0}}, 0, {0x4040 | byte << 8 | byte:#x};"
        f" mad.lo.u32 s, s, 16, {SCALE_BITS}; mov.b32 z, {zero}; add.rn.bf16x2 {{$w0}}, s, z; }}",
        write_only_types=[Uint32],
        read_only_args=[scales],
    )


def _select(a: Any, b: Any, mask: int) -> Any:
    """Bits of a where the mask has ones, of b elsewhere."""
    return (a & Uint32(mask)) | (b & Uint32(~mask & 0xFFFFFFFF))


def _rotate(word: Any, left: int) -> Any:
    if left == 0:
        return word
    if left <= 6:
        # The mask drops what a rotation brings in at the low end, and a shift may go to another pipe.
        return word << Uint32(left)
    return cute.arch.inline_ptx(
        f"shf.l.wrap.b32 {{$w0}}, {{$r0}}, {{$r0}}, {left};", write_only_types=[Uint32], read_only_args=[word]
    )


def _multiply(values: Any, factors: Any) -> Any:
    """Two products of bf16."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[values, factors]
    )
