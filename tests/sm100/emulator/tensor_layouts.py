"""Which cells of tensor memory an instruction touches: loads and stores, copies, accumulators, scale factors.

Sources: PTX ISA, tcgen05 data-movement shapes, data-path layouts; CUTLASS's copy and MMA traits of SM100 state the
same maps. A cell is a lane and a column of 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.emulator.scalar_types import LANES
from tests.sm100.emulator.tensor_memory import BOTH_HALVES, HALF_LANES, TENSOR_LANES, Index


@dataclass(frozen=True)
class TransferShape:
    """A shape of tcgen05.ld and st; transfer_cells says what each register holds."""

    lanes: int
    """Lanes of tensor memory that one instruction reaches."""
    registers: int
    """Registers of each thread for ``.x1``."""
    largest: int
    """The largest repetition."""


TRANSFER_SHAPES = {
    "32x32b": TransferShape(32, 1, 128),
    "16x32bx2": TransferShape(16, 1, 128),
    "16x64b": TransferShape(16, 1, 128),
    "16x128b": TransferShape(16, 2, 64),
    "16x256b": TransferShape(16, 4, 32),
}


def transfer_cells(name: str, count: int, columns_per_register: int, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Lanes and first columns, each [32 threads, registers], from the instruction's address on.

    Args:
        name: the shape.
        count: the repetition.
        columns_per_register: 2 for ``.pack::16b`` and ``.unpack::16b``, whose registers hold the low halves of two
            neighbouring columns; else 1.
        split: for 16x32bx2, columns from the first half's begin to the second's.
    """
    thread, register = np.arange(LANES)[:, None], np.arange(count * TRANSFER_SHAPES[name].registers)[None]
    quad, place = thread // 4, thread % 4
    zero = np.zeros((LANES, register.size), np.int64)
    start = zero
    if name == "32x32b":
        lane, column = thread, register
    elif name == "16x32bx2":
        lane, column, start = thread % HALF_LANES, register, thread // HALF_LANES * split + zero
    elif name == "16x64b":
        lane, column = quad + thread % 2 * 8, place // 2 + register * 2
    elif name == "16x128b":
        lane, column = quad + register % 2 * 8, place + register // 2 * 4
    else:
        lane, column = quad + register // 2 % 2 * 8, place * 2 + register % 2 + register // 4 * 8
    return lane + zero, column * columns_per_register + start + zero


COPY_SHAPES = {
    "128x256b": (128, 32),
    "128x128b": (128, 16),
    "64x128b": (64, 16),
    "32x128b": (32, 16),
    "4x256b": (4, 32),
}
"""Rows and bytes of each row of tcgen05.cp."""
MULTICASTS = {"64x128b": ("warpx2::02_13", "warpx2::01_23"), "32x128b": ("warpx4",)}


def copy_lanes(shape: str, multicast: str) -> np.ndarray:
    """Lanes that row i of tcgen05.cp goes to, [rows, copies].

    ``4x256b`` serves one lane of each of the four quarters.
    """
    rows = np.arange(COPY_SHAPES[shape][0])
    if shape == "4x256b":
        return rows[:, None] * LANES
    if multicast == "warpx4":
        return rows[:, None] + np.arange(4)[None] * 32
    if multicast == "warpx2::02_13":
        return rows[:, None] + np.arange(2)[None] * 64
    if multicast == "warpx2::01_23":
        return (rows % 32 + rows // 32 * 64)[:, None] + np.arange(2)[None] * 32
    return rows[:, None]


@dataclass(frozen=True)
class Accumulator:
    """A CTA's part of an accumulator: its cells, to be indexed [rows, N], and which columns and halves they take."""

    lanes: Index
    columns: Index
    span: slice
    halves: slice

    @classmethod
    def at(cls, address: int, m: int, n: int, ctas: int) -> Accumulator:
        """The accumulator of an instruction over ``ctas`` CTAs.

        128 rows per CTA: a lane each. 64 rows of one CTA: sixteen lanes of each quarter, from lane 0 or 16 on. 64 rows
        per CTA of a pair: lanes 0–63 have the first half of N, lanes 64–127 the second.

        Raises:
            UnsupportedError: a begin in another lane.
        """
        lane, column = address >> 16, address & 0xFFFF
        rows = m // ctas
        if lane and (rows != 64 or ctas != 1 or lane != HALF_LANES):
            raise UnsupportedError(f"accumulator in lane {lane}")
        if rows == TENSOR_LANES:
            span = slice(column, column + n)
            return cls(slice(0, TENSOR_LANES), span, span, BOTH_HALVES)
        row, place = np.arange(rows)[:, None], np.arange(n)[None]
        if ctas == 1:
            half = lane // HALF_LANES
            lanes = lane + row // HALF_LANES * LANES + row % HALF_LANES
            return cls(lanes, column + place, slice(column, column + n), slice(half, half + 1))
        lanes = row + place // (n // 2) * 64
        return cls(lanes, column + place % (n // 2), slice(column, column + n // 2), BOTH_HALVES)
