"""Local memory: arrays that each thread has for itself, such as register arrays with indices known at run time only.

Addresses are offsets; generic ones lie in a window of their own (``memory.py``).
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.errors import HazardError, MemoryFaultError
from tests.sm100.emulator.scalar_types import LANES

LOCAL_BASE = 64
"""Where offsets begin, so that a null pointer faults."""
POISON = 0xCD


def local_layout(arrays: dict[str, tuple[int, int]]) -> tuple[dict[str, int], int]:
    """The local address of each array of (alignment, bytes), and where they end."""
    offsets, end = {}, LOCAL_BASE
    for name, (align, size) in arrays.items():
        offsets[name] = -(-end // align) * align
        end = offsets[name] + size
    return offsets, end


class LocalMemory:
    """What the lanes of a warp have each for itself: bytes, and which of them were ever written."""

    def __init__(self, end: int) -> None:
        self.bytes = np.full((LANES, end), POISON, np.uint8)
        self.written = np.zeros((LANES, end), bool)

    def _cells(self, lanes: np.ndarray, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        if (addresses < LOCAL_BASE).any() or (addresses + np.uint64(size) > self.bytes.shape[1]).any():
            raise MemoryFaultError(f"local access of {size} B: valid is [{LOCAL_BASE}, {self.bytes.shape[1]})")
        return lanes[:, None], addresses.astype(np.int64)[:, None] + np.arange(size)

    def read(self, lanes: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        """u8 [lanes, size] at an address for each lane, all written before."""
        cells = self._cells(lanes, addresses, size)
        if not self.written[cells].all():
            raise HazardError(f"read of {size} B of local memory that were never written")
        return self.bytes[cells]

    def write(self, lanes: np.ndarray, addresses: np.ndarray, data: np.ndarray) -> None:
        """Store u8 [lanes, size]."""
        cells = self._cells(lanes, addresses, data.shape[1])
        self.bytes[cells] = data
        self.written[cells] = True
