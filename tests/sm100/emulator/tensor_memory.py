"""Tensor memory of an SM: 128 lanes of 512 columns of 32 bits, allocated by columns.

An address is ``lane << 16 | column``. A warp reaches a quarter of the lanes: 32; some operations use one half of each
quarter only. Besides values it knows which cells were ever written, which columns an issued but not yet executed
tensor-core operation will write, and the accesses: every one must be ordered with earlier ones (``AccessHistory``).
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.access_history import TENSOR_RULE, AccessHistory
from tests.sm100.emulator.actors import Actor
from tests.sm100.emulator.errors import HazardError, MemoryFaultError

TENSOR_LANES = 128
TENSOR_COLUMNS = 512
POISON = 0x7FC0DEAD
"""A quiet NaN."""
HALF_LANES = 16
BOTH_HALVES = slice(0, 2)
LANES_PER_CELL = 4
"""Lanes whose accesses are told apart no further."""
Index = slice | np.ndarray
"""Lanes or columns; arrays of lanes and of columns broadcast to one shape."""


def _extent(index: Index) -> tuple[int, int]:
    """First and one past the last."""
    if isinstance(index, slice):
        return index.start, index.stop
    return int(index.min()), int(index.max()) + 1


def _array(index: Index) -> np.ndarray:
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index


def _cells(lanes: Index, columns: Index) -> tuple[Index, Index]:
    """The cells of the history that hold these."""
    if isinstance(lanes, slice):
        return slice(lanes.start // LANES_PER_CELL, -(-lanes.stop // LANES_PER_CELL)), columns
    return lanes // LANES_PER_CELL, columns


class TensorMemory:
    """One CTA's tensor memory."""

    def __init__(self, owner: str) -> None:
        self.cells = np.full((TENSOR_LANES, TENSOR_COLUMNS), POISON, np.uint32)
        self.written = np.zeros((TENSOR_LANES, TENSOR_COLUMNS), bool)
        self.pending = np.zeros((2, TENSOR_COLUMNS), np.int32)
        """Issued operations that write a column, for lanes 0–15 and 16–31 of each quarter."""
        self.history = AccessHistory(
            (TENSOR_LANES // LANES_PER_CELL, TENSOR_COLUMNS),
            f"tensor memory of {owner} (lane, column)",
            TENSOR_RULE,
            (LANES_PER_CELL, 1),
        )
        self.allocations: dict[int, int] = {}
        self.permit = True

    def allocate(self, columns: int) -> int | None:
        """First column of a new allocation, or None while there is no room.

        Raises:
            HazardError: the permit was relinquished, or a count that is no power of two from 32 to 512.
        """
        if not self.permit:
            raise HazardError("tcgen05.alloc after relinquish_alloc_permit")
        if columns not in (32, 64, 128, 256, 512):
            raise HazardError(f"tcgen05.alloc of {columns} columns: expected a power of two from 32 to 512")
        start = 0
        for first, count in sorted(self.allocations.items()):
            if first - start >= columns:
                break
            start = first + count
        if start + columns > TENSOR_COLUMNS:
            return None
        self.allocations[start] = columns
        self.written[:, start : start + columns] = False
        self.cells[:, start : start + columns] = POISON
        return start

    def release(self, start: int, columns: int, by: Actor) -> None:
        """Give an allocation back.

        Raises:
            HazardError: it is not one, an issued operation has yet to write it, or accesses are not ordered before.
        """
        if self.allocations.get(start) != columns:
            raise HazardError(f"tcgen05.dealloc of {columns} columns at {start}: allocated are {self.allocations}")
        if self.pending[:, start : start + columns].any():
            raise HazardError(f"tcgen05.dealloc at column {start} before its tensor-core operations were waited for")
        self.history.retire((slice(0, TENSOR_LANES), slice(start, start + columns)), by)
        del self.allocations[start]

    def check_released(self, owner: str) -> None:
        """Raise if something is still allocated at the end of a CTA."""
        if self.allocations:
            raise HazardError(f"{owner} ended with tensor memory allocated: {self.allocations}")

    def _check(self, lanes: Index, columns: Index) -> None:
        (low, high), (first, end) = _extent(lanes), _extent(columns)
        if not 0 <= low <= high <= TENSOR_LANES:
            raise MemoryFaultError(f"tensor memory lanes {low} to {high}")
        for start, count in self.allocations.items():
            if start <= first and end <= start + count:
                return
        raise MemoryFaultError(f"tensor memory columns {first} to {end}: allocated are {self.allocations}")

    def read(self, lanes: Index, columns: Index, by: Actor) -> np.ndarray:
        """u32 cells, all written before."""
        self._check(lanes, columns)
        written = self.written[lanes, columns]
        if not written.all():
            if isinstance(lanes, slice) or isinstance(columns, slice):
                lanes, columns = _array(lanes)[:, None], _array(columns)[None]
            where = tuple(np.argwhere(~written)[0])
            lane, column = (np.broadcast_to(index, written.shape)[where] for index in (lanes, columns))
            raise HazardError(f"read of tensor memory never written: lane {lane}, column {column}")
        self.history.read(_cells(lanes, columns), by)
        return self.cells[lanes, columns]

    def write(self, lanes: Index, columns: Index, values: np.ndarray, by: Actor) -> None:
        """Store u32 ``values``."""
        self._check(lanes, columns)
        self.history.write(_cells(lanes, columns), by)
        self.cells[lanes, columns] = values
        self.written[lanes, columns] = True

    def check_settled(self, halves: slice, columns: slice, what: str) -> None:
        """Raise if an issued operation has yet to write one of the columns, in these halves of the quarters."""
        if self.pending[halves, columns].any():
            raise HazardError(
                f"{what} of columns {columns.start} to {columns.stop}, which an issued tensor-core operation has "
                "yet to write: wait for its commit first"
            )

    def announce(self, halves: slice, columns: slice, change: int) -> None:
        """Count issued operations (+1) and executed ones (−1) that write the columns."""
        self._check(slice(0, 0), columns)
        self.pending[halves, columns] += change
