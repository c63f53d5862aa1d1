"""Barriers: mbarrier objects in shared memory, named barriers of a CTA, the barrier of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.sm100.emulator.errors import HazardError, UnsupportedError

MAX_COUNT = (1 << 20) - 1
"""Largest arrival count and transaction count of an mbarrier."""


@dataclass
class MemoryBarrier:
    """An mbarrier: a phase completes when no arrival is pending and the transaction count is zero."""

    count: int
    pending: int
    transactions: int = 0
    phase: int = 0
    completed: int = 0
    """Phases completed so far: progress, for the deadlock check."""

    @classmethod
    def create(cls, count: int) -> MemoryBarrier:
        if not 1 <= count <= MAX_COUNT:
            raise HazardError(f"mbarrier.init with count {count}: expected 1 to {MAX_COUNT}")
        return cls(count, count)

    def expect(self, nbytes: int) -> None:
        """Raise the transaction count."""
        self.transactions += nbytes
        if abs(self.transactions) > MAX_COUNT:
            raise HazardError(f"mbarrier transaction count {self.transactions}: beyond ±{MAX_COUNT}")

    def complete(self, nbytes: int) -> None:
        """Lower the transaction count: bytes have arrived (possibly before they were expected)."""
        self.expect(-nbytes)
        self._check()

    def arrive(self, count: int = 1) -> None:
        if count < 1 or count > self.pending:
            raise HazardError(f"mbarrier arrival of {count} where {self.pending} of {self.count} are pending")
        self.pending -= count
        self._check()

    def is_complete(self, parity: int) -> bool:
        """Whether the phase of that parity is over (``try_wait.parity``)."""
        return self.phase != parity & 1

    def _check(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase ^= 1
            self.pending = self.count
            self.completed += 1

    def __str__(self) -> str:
        return (
            f"phase parity {self.phase}, {self.pending} of {self.count} arrivals pending, "
            f"{self.transactions} B outstanding"
        )


@dataclass
class NamedBarrier:
    """One of a CTA's sixteen barriers (``bar.sync``, ``bar.arrive``): counts threads, whole warps at a time."""

    expected: int = 0
    arrived: int = 0
    generation: int = 0

    def arrive(self, threads: int, expected: int) -> int:
        """Register a warp; returns the generation to wait for.

        Raises:
            HazardError: two warps give different thread counts, or one not a multiple of 32.
        """
        if expected % 32:
            raise HazardError(f"named barrier for {expected} threads: expected a multiple of 32")
        if self.arrived and self.expected != expected:
            raise HazardError(f"named barrier joined for {expected} threads while open for {self.expected}")
        generation = self.generation
        self.expected = expected
        self.arrived += threads
        if self.arrived > expected:
            raise HazardError(f"named barrier: {self.arrived} threads arrived where {expected} are expected")
        if self.arrived == expected:
            self.arrived = 0
            self.generation += 1
        return generation


@dataclass
class NamedBarriers:
    """A CTA's barriers by number."""

    barriers: dict[int, NamedBarrier] = field(default_factory=dict)

    def get(self, number: int) -> NamedBarrier:
        if not 0 <= number < 16:
            raise UnsupportedError(f"named barrier {number}: a CTA has 16")
        return self.barriers.setdefault(number, NamedBarrier())


@dataclass
class ClusterBarrier:
    """``barrier.cluster``: every warp of every CTA of the cluster arrives once per generation."""

    warps: int
    arrived: int = 0
    generation: int = 0

    def arrive(self) -> int:
        """Register a warp; returns the generation to wait for."""
        generation = self.generation
        self.arrived += 1
        if self.arrived == self.warps:
            self.arrived = 0
            self.generation += 1
        return generation
