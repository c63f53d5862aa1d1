"""NVFP4 to bf16 in registers: codes times their block scales, exact.

A code times its block scale has at most six significant bits, so bf16 holds it. Neither factor is formed at its own
magnitude: codes arrive as value * 2^-126 (twiddle.py), scales as value * 2^119. So expanded weights are too small by
2^VALUE_SHIFT, which the epilogue multiplies back in fp32.

For 16 codes of a lane: 16 masks, selections and rotations, 4 instructions for four scales, 8 multiplications.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Uint32

from .layout import SCALE_BIAS
from .twiddle import FIRST, FIRST_REST, JOINED, PAIR_MASK, SECOND, VALUE_EXPONENT

SCALE_BITS = 0x70007000
"""The high exponent bits of two bf16: with them a scale's byte, shifted by four, is a normal number. So the byte 0 is
no zero but 2^97; the codes of a block whose scale is 0 are zeros (layout.py)."""
SCALE_EXPONENT = (0x70 << 1) + SCALE_BIAS - 127
"""Expanded scales are their values times two to this power."""
VALUE_SHIFT = -(VALUE_EXPONENT + SCALE_EXPONENT)
"""Expanded weights are their values divided by two to this power."""


def expand_half(words: Sequence[Any]) -> Iterator[Any]:
    """Half a stage: the A fragments of four steps, register by register, of what ``weights.load_half`` loaded."""
    codes, scales = words[:4], words[4:]
    for pair in range(2):
        yield from expand_pair(codes[2 * pair], codes[2 * pair + 1], scales[pair])


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
            registers[register] = rotate(word, left) & Uint32(PAIR_MASK)
    factors = [expand_scales(scales, step) for step in range(2)]
    return [multiply(value, factors[i // 4], i % 2) for i, value in enumerate(registers)]


def expand_scales(scales: Any, step: int) -> Any:
    """A step's scales of rows g and g + 8, as the halves of a register: bf16, times 2^SCALE_EXPONENT."""
    zero_byte = 4
    selected = zero_byte << 12 | 2 * step + 1 << 8 | zero_byte << 4 | 2 * step
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 s; prmt.b32 s, {{$r0}}, 0, {selected:#x}; mad.lo.u32 {{$w0}}, s, 16, {SCALE_BITS}; }}",
        write_only_types=[Uint32],
        read_only_args=[scales],
    )


def _select(a: Any, b: Any, mask: int) -> Any:
    """Bits of a where the mask has ones, of b elsewhere."""
    return cute.arch.inline_ptx(
        f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {mask:#x}, 0xe4;", write_only_types=[Uint32], read_only_args=[a, b]
    )


def rotate(word: Any, left: int) -> Any:
    """A word rotated to the left, but for low bits that the masks of both formats drop."""
    if left == 0:
        return word
    if left <= 6:
        # The mask drops what a rotation brings in at the low end, and a shift may go to another pipe.
        return word << Uint32(left)
    return cute.arch.inline_ptx(
        f"shf.l.wrap.b32 {{$w0}}, {{$r0}}, {{$r0}}, {left};", write_only_types=[Uint32], read_only_args=[word]
    )


def multiply(values: Any, factors: Any, row: int) -> Any:
    """Two bf16 times one half of ``factors``, which the multiplication itself selects: no instruction repeats it."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 f<2>; .reg .b32 both; mov.b32 {f0, f1}, {$r1};"
        f" mov.b32 both, {{f{row}, f{row}}}; mul.rn.bf16x2 {{$w0}}, {{$r0}}, both; }}",
        write_only_types=[Uint32],
        read_only_args=[values, factors],
    )
