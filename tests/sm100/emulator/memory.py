"""Address spaces: global memory with declared ranges, the parameter block, a CTA's shared memory.

Addresses, all 64-bit values:

* global: the host's own addresses, checked against the ranges the caller declared;
* shared: ``rank << 24 | offset`` (fits 32 bits), in the shared::cluster window of the launching cluster;
  offsets begin at ``SHARED_BASE``, so that a null pointer faults;
* generic: global as is, shared plus ``SHARED_WINDOW``, parameters from ``PARAMETER_WINDOW`` on, local plus
  ``LOCAL_WINDOW``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tests.sm100.emulator.access_history import SHARED_RULE, AccessHistory
from tests.sm100.emulator.actors import Actor, Strength, WarpActor
from tests.sm100.emulator.errors import HazardError, MemoryFaultError

SHARED_BASE = 1024
SHARED_CAPACITY = 232448
"""Bytes of shared memory a block may have on sm_90 and sm_100 (227 KiB)."""
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
SHARED_WINDOW = 1 << 60
PARAMETER_WINDOW = 1 << 61
LOCAL_WINDOW = 1 << 62
WINDOWS_END = 1 << 63
POISON = 0xCD


@dataclass(frozen=True)
class Range:
    """A host buffer that a kernel may touch: [start, end)."""

    start: int
    end: int
    writable: bool
    name: str

    @cached_property
    def bytes(self) -> np.ndarray:
        """The buffer as a u8 array that aliases host memory."""
        size = self.end - self.start
        return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(self.start)), np.uint8)


@dataclass
class GlobalMemory:
    """Host memory seen through declared ranges; every access must lie within one of them."""

    ranges: list[Range] = field(default_factory=list)

    def view(self, address: int, size: int, write: bool) -> np.ndarray:
        """The bytes [address, address + size) as a u8 array that aliases host memory."""
        known = self.find(address, size, write)
        where = slice(address - known.start, address - known.start + size)
        self.touch(known, where, write)
        return known.bytes[where]

    def gather(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """u8 [n, size] at u64 addresses, a copy."""
        found = np.empty((len(addresses), size), np.uint8)
        for known, lanes, where in self._cells(addresses, size, write=False):
            self.touch(known, where, write=False)
            found[lanes] = known.bytes[where]
        return found

    def scatter(self, addresses: np.ndarray, data: np.ndarray) -> None:
        """Store u8 [n, size] at u64 addresses; of two at one address the later one stays."""
        for known, lanes, where in self._cells(addresses, data.shape[1], write=True):
            self.touch(known, where, write=True)
            known.bytes[where] = data[lanes]

    def _cells(
        self, addresses: np.ndarray, size: int, write: bool
    ) -> Iterator[tuple[Range, slice | np.ndarray, np.ndarray]]:
        """Each range with those of the addresses that lie in it, and the offsets [n, size] that they stand for."""
        listed = addresses.tolist()
        low, high = min(listed), max(listed) + size
        one = next((known for known in self.ranges if known.start <= low and high <= known.end), None)
        if one is not None and (one.writable or not write):
            yield one, slice(None), (addresses - np.uint64(one.start)).astype(np.int64)[:, None] + np.arange(size)
            return
        for lane, address in enumerate(listed):
            known = self.find(address, size, write)
            yield known, slice(lane, lane + 1), np.arange(size)[None] + (address - known.start)

    def touch(self, known: Range, where: slice | np.ndarray, write: bool) -> None:
        """Told of every access, before it happens."""

    def find(self, address: int, size: int, write: bool) -> Range:
        """The range that holds [address, address + size).

        Raises:
            MemoryFaultError: none does, or a write to a read-only one.
        """
        for known in self.ranges:
            if known.start <= address and address + size <= known.end:
                if write and not known.writable:
                    raise MemoryFaultError(f"write of {size} B at {known.name}+{address - known.start}: read-only")
                return known
        near = [f"{r.name} [{r.start:#x}, {r.end:#x})" for r in self.ranges]
        raise MemoryFaultError(f"global access at {address:#x}, {size} B: outside {', '.join(near) or 'every range'}")


class ParameterMemory:
    """The kernel's parameter block, read-only."""

    def __init__(self, block: bytes) -> None:
        self.bytes = np.frombuffer(block, np.uint8)

    def view(self, address: int, size: int) -> np.ndarray:
        offset = address - PARAMETER_WINDOW
        if offset < 0 or offset + size > len(self.bytes):
            raise MemoryFaultError(f"parameter access at offset {offset}, {size} B: block has {len(self.bytes)} B")
        return self.bytes[offset : offset + size]


class SharedMemory:
    """One CTA's shared memory: bytes, which of them were ever written, and the accesses to them.

    Every access names its actor and raises HazardError if it is not ordered with earlier ones (``AccessHistory``); with
    ``equal_writes`` those that write the same need not be. Without ``strict_reads`` a lane may hand on that others of
    its warp have read.
    ``offset`` counts from 0 as in addresses, so the first ``SHARED_BASE`` bytes are never valid. ``rank`` is the CTA's.
    """

    def __init__(
        self, size: int, owner: str, rank: int = 0, *, equal_writes: bool = False, strict_reads: bool = True
    ) -> None:
        if size > SHARED_CAPACITY:
            raise MemoryFaultError(f"{size} B of shared memory: a block may have {SHARED_CAPACITY}")
        self.end, self.rank = SHARED_BASE + size, rank
        self.bytes = np.full(self.end, POISON, np.uint8)
        self.written = np.zeros(self.end, bool)
        self.equal_writes, self.strict_reads = equal_writes, strict_reads
        self.hosts = np.zeros(0, np.int64)
        """Numbers of the warps whose CTA this memory is of, as actors."""
        self._visitors: set[int] = set()
        self.history = AccessHistory((self.end,), f"shared memory of {owner}", SHARED_RULE)

    def _enter(self, by: Actor) -> None:
        if by.number in self._visitors:
            return
        if not by.knows_begun(self.hosts):
            raise HazardError(
                f"access to {self.history.name} before it is known to have begun: synchronise the cluster"
            )
        self._visitors.add(by.number)

    def _check(self, offset: int, size: int, by: Actor) -> slice:
        self._enter(by)
        if offset < SHARED_BASE or offset + size > self.end:
            raise MemoryFaultError(f"shared access at {offset}, {size} B: valid is [{SHARED_BASE}, {self.end})")
        return slice(offset, offset + size)

    def read(self, offset: int, size: int, by: Actor) -> np.ndarray:
        """A view of bytes that must all have been written before."""
        where = self._check(offset, size, by)
        if not self.written[where].all():
            first = offset + int(np.argmin(self.written[where]))
            raise HazardError(f"read of shared memory never written: byte {first} of [{offset}, {offset + size})")
        self.history.read(where, by)
        return self.bytes[where]

    def write(self, offset: int, data: np.ndarray, by: Actor) -> None:
        """Store u8 ``data``."""
        where = self._check(offset, len(data), by)
        self.history.write(where, by.author(self.rank), same=self._same(where, data))
        self.bytes[where] = data
        self.written[where] = True

    def _same(self, where: slice | np.ndarray, data: np.ndarray) -> np.ndarray | None:
        """Where data are what is there already, if that matters."""
        return self.written[where] & (self.bytes[where] == data) if self.equal_writes else None

    def _check_gather(self, offsets: np.ndarray, by: Actor) -> None:
        self._enter(by)
        least, most = (np.minimum.reduce, np.maximum.reduce)
        if offsets.size and (least(offsets, axis=None) < SHARED_BASE or most(offsets, axis=None) >= self.end):
            raise MemoryFaultError(
                f"shared access over [{int(offsets.min())}, {int(offsets.max())}]: valid is [{SHARED_BASE}, {self.end})"
            )

    def gather(
        self, offsets: np.ndarray, by: Actor, strength: Strength = "weak", lanes: np.ndarray | None = None
    ) -> np.ndarray:
        """u8 at each offset (any shape), all written before; ``lanes`` [n] of ``by`` make accesses [n, size]."""
        self._check_gather(offsets, by)
        written = self.written[offsets]
        if np.count_nonzero(written) < written.size:
            first = int(offsets.ravel()[int(np.argmin(written.ravel()))])
            raise HazardError(f"read of shared memory never written: byte {first}")
        self.history.read(offsets, by, strength, None if lanes is None else lanes[:, None])
        if self.strict_reads and lanes is not None and isinstance(by, WarpActor):
            by.accessed(lanes)
        return self.bytes[offsets]

    def scatter(
        self, offsets: np.ndarray, data: np.ndarray, by: Actor, strength: Strength = "weak",
        lanes: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Store u8 ``data`` at ``offsets``, of the same shape; ``lanes`` as for gather."""
        self._check_gather(offsets, by)
        lane_of = None if lanes is None else lanes[:, None]
        self.history.write(offsets, by.author(self.rank), strength, lane_of, self._same(offsets, data))
        if lanes is not None and isinstance(by, WarpActor):
            by.accessed(lanes)
        self.bytes[offsets] = data
        self.written[offsets] = True
