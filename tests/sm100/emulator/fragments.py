"""How the elements of a matrix are spread over the registers of a warp, for mma.sync and wgmma.

Source: PTX ISA, matrix fragments of ``mma.m16n8k16``, ``mma.m16n8k32`` and ``wgmma.mma_async``. Lane 4g + t holds two
rows, g and g + 8, of A and of the accumulators. Of wgmma's 64 rows each of the four warps holds 16.

Every table is i64 [32, elements]: by lane, the row or the column of each of its elements, first register first, low
bits first.
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.scalar_types import LANE_IDS, LANES

ROWS = 16
"""Rows of A and of the accumulators in one warp."""
_GROUP, _PLACE = np.divmod(LANE_IDS.astype(np.int64)[:, None], 4)


def operand_places(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of A, 16 × 32 bytes, in four registers; an element has ``size`` bytes."""
    held = 4 // size
    register, inside = np.divmod(np.arange(4 * held)[None], held)
    return _GROUP + register % 2 * 8, held * _PLACE + inside + register // 2 * 4 * held


def accumulator_places(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of an fp32 accumulator, 16 × ``columns``: two columns of each of the two rows at a time."""
    element = np.arange(columns // 2)[None]
    rows = _GROUP + element // 2 % 2 * 8
    return rows, 2 * _PLACE + element % 2 + element // 4 * 8


def column_places() -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of mma.sync's B, 16 × 8 elements of 16 bits, in two registers."""
    element = np.arange(4)[None]
    return 2 * _PLACE + element % 2 + element // 2 * 8, np.broadcast_to(_GROUP, (LANES, 4))
