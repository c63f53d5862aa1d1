"""Tensor memory of an SM: 128 lanes of 512 columns of 32 bits, allocated by columns.

An address is ``lane << 16 | column``. Besides values it knows which cells were ever written and which columns an
issued but not yet executed tensor-core operation will write.
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.errors import HazardError, MemoryFaultError

TENSOR_LANES = 128
TENSOR_COLUMNS = 512
POISON = 0x7FC0DEAD
"""A quiet NaN."""


class TensorMemory:
    """One CTA's tensor memory."""

    def __init__(self) -> None:
        self.cells = np.full((TENSOR_LANES, TENSOR_COLUMNS), POISON, np.uint32)
        self.written = np.zeros((TENSOR_LANES, TENSOR_COLUMNS), bool)
        self.pending = np.zeros(TENSOR_COLUMNS, np.int32)
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

    def release(self, start: int, columns: int) -> None:
        """Give an allocation back.

        Raises:
            HazardError: it is not one, or an issued operation has yet to write it.
        """
        if self.allocations.get(start) != columns:
            raise HazardError(f"tcgen05.dealloc of {columns} columns at {start}: allocated are {self.allocations}")
        if self.pending[start : start + columns].any():
            raise HazardError(f"tcgen05.dealloc at column {start} before its tensor-core operations were waited for")
        del self.allocations[start]

    def check_released(self, owner: str) -> None:
        """Raise if something is still allocated at the end of a CTA."""
        if self.allocations:
            raise HazardError(f"{owner} ended with tensor memory allocated: {self.allocations}")

    def _check(self, lanes: slice, columns: slice) -> None:
        if not 0 <= lanes.start <= lanes.stop <= TENSOR_LANES:
            raise MemoryFaultError(f"tensor memory lanes {lanes.start} to {lanes.stop}")
        for start, count in self.allocations.items():
            if start <= columns.start and columns.stop <= start + count:
                return
        raise MemoryFaultError(
            f"tensor memory columns {columns.start} to {columns.stop}: allocated are {self.allocations}"
        )

    def read(self, lanes: slice, columns: slice) -> np.ndarray:
        """u32 cells, all written before."""
        self._check(lanes, columns)
        written = self.written[lanes, columns]
        if not written.all():
            lane, column = np.argwhere(~written)[0]
            raise HazardError(
                f"read of tensor memory never written: lane {lanes.start + lane}, column {columns.start + column}"
            )
        return self.cells[lanes, columns]

    def write(self, lanes: slice, columns: slice, values: np.ndarray) -> None:
        """Store u32 ``values``."""
        self._check(lanes, columns)
        self.cells[lanes, columns] = values
        self.written[lanes, columns] = True

    def check_settled(self, columns: slice, what: str) -> None:
        """Raise if an issued operation has yet to write one of the columns."""
        if self.pending[columns].any():
            raise HazardError(
                f"{what} of columns {columns.start} to {columns.stop}, which an issued tensor-core operation has "
                "yet to write: wait for its commit first"
            )

    def announce(self, columns: slice, change: int) -> None:
        """Count issued operations (+1) and executed ones (−1) that write the columns."""
        self._check(slice(0, 0), columns)
        self.pending[columns] += change
