"""FP8 to bf16 in registers: E4M3 codes times powers of two, exact.

Codes arrive as value * 2^-120 (fp8_twiddle.py), factors as 2^(exponent + 120) (fp8_layout.py), so the products are the
weights themselves: four significant bits, and exponents that packing has checked to be a bf16's. Nothing is left for
the epilogue to take back.

For eight codes of a lane: 8 masks, selections and rotations, 4 multiplications.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Uint32

from .expand import multiply, rotate
from .fp8_twiddle import (
    BYTES_SELECTED,
    FIRST_LEFT,
    FIRST_REST,
    FP8_PAIR_MASK,
    SECOND_LEFT,
    SECOND_REST,
)

FP8_VALUE_SHIFT = 0
"""Expanded weights are their values divided by two to this power."""


def expand_fp8_half(words: Sequence[Any]) -> Iterator[Any]:
    """Half a stage: the A fragments of four steps, register by register, of what ``weights.load_fp8_half`` loaded."""
    for step in range(4):
        yield from expand_step(words[2 * step], words[2 * step + 1], words[8])


def expand_step(first: Any, second: Any, factors: Any) -> list[Any]:
    """Four registers of two bf16 each: the A fragment of a step of 16.

    Args:
        first, second: Uint32 words of codes.
        factors: Uint32, bf16 factors of rows g and g + 8.
    """
    mask = Uint32(FP8_PAIR_MASK)
    registers = [
        rotate(first, FIRST_LEFT) & mask,
        rotate(second, SECOND_LEFT) & mask,
        _gather_bytes(first, second) & mask,
        _or_masked(first & Uint32(FIRST_REST), second, SECOND_REST),
    ]
    return [multiply(value, factors, i % 2) for i, value in enumerate(registers)]


def _gather_bytes(first: Any, second: Any) -> Any:
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {BYTES_SELECTED:#x};",
        write_only_types=[Uint32],
        read_only_args=[first, second],
    )


def _or_masked(word: Any, other: Any, mask: int) -> Any:
    """``word | other & mask`` in one instruction."""
    return cute.arch.inline_ptx(
        f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {mask:#x}, 0xf8;",
        write_only_types=[Uint32],
        read_only_args=[word, other],
    )
