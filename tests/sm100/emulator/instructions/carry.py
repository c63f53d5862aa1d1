"""Integer arithmetic of several words: each lane has a carry that one instruction sets and the next takes in.

Source: PTX ISA, extended-precision integer arithmetic. ``sub.cc`` sets the carry where it borrows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, instruction
from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.emulator.scalar_types import DTYPES
from tests.sm100.emulator.warp import Mask, Warp

TYPES = ("u32", "s32", "u64", "s64")


def _with_carry(decoder: Decoder, operands: int, total: Callable[[list[int], int], int], takes: bool) -> Execute:
    """``total`` of a lane's operands, exact, of which the low bits are kept and the next one says what is carried.

    Args:
        decoder: behind its opcode; the flag cc and the type are yet to be taken.
        operands: how many sources there are.
        total: from the sources, not negative, and the bits of a word to the exact result.
        takes: whether the carry is added to the first operand; the caller's ``total`` sees it as a last source.
    """
    type_name = decoder.type()
    if type_name not in TYPES:
        raise UnsupportedError(f"carry of .{type_name}")
    sets = decoder.flag("cc")
    decoder.arity(1 + operands)
    dtype = DTYPES[f"u{type_name[1:]}"]
    bits = 8 * dtype.itemsize
    reads = [decoder.read(1 + i, f"u{bits}") for i in range(operands)]
    write = decoder.write(0)

    def execute(warp: Warp, mask: Mask) -> None:
        columns = [read(warp).tolist() for read in reads]
        columns.append(warp.carry.astype(int).tolist() if takes else [0] * len(warp.carry))
        exact = [total(list(lane), bits) for lane in zip(*columns, strict=True)]
        if sets:
            carried = np.array([bool(value >> bits & 1) for value in exact])
            np.copyto(warp.carry, carried, where=True if mask is None else mask)
        write(warp, np.array([value & (1 << bits) - 1 for value in exact], dtype), mask)

    return execute


@instruction("add.cc", "addc")
def build_add(decoder: Decoder) -> Execute:
    takes = _restore_cc(decoder, "addc")
    return _with_carry(decoder, 2, lambda values, bits: sum(values), takes)


@instruction("sub.cc", "subc")
def build_subtract(decoder: Decoder) -> Execute:
    takes = _restore_cc(decoder, "subc")
    return _with_carry(decoder, 2, lambda values, bits: values[0] - values[1] - values[2], takes)


@instruction("mad.lo.cc", "mad.hi.cc", "madc")
def build_multiply(decoder: Decoder) -> Execute:
    """Halves of an unsigned product; of signed ones the low half, which is the same."""
    takes = _restore_cc(decoder, "madc")
    half = decoder.instruction.opcode[1]
    if half not in ("lo", "hi") or (half == "hi" and decoder.modifiers[-1][0] == "s"):
        raise UnsupportedError(f"half {half} of .{decoder.modifiers[-1]}")
    decoder.flag(half)

    def total(values: list[int], bits: int) -> int:
        a, b, c, carry = values
        product = a * b
        return (product & (1 << bits) - 1 if half == "lo" else product >> bits) + c + carry

    return _with_carry(decoder, 3, total, takes)


def _restore_cc(decoder: Decoder, taking: str) -> bool:
    """Whether the opcode takes the carry in; where cc was part of its prefix, hand it back as a modifier."""
    if decoder.instruction.opcode[0] == taking:
        return True
    decoder.modifiers.insert(0, "cc")
    return False
