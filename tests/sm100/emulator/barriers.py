"""Barriers: mbarrier objects in shared memory, named barriers of a CTA, the barrier of a cluster.

Besides counting, each carries what those who arrive know to those who wait (``ordering_clock``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tests.sm100.emulator.actors import WarpActor
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.handover import Handover, Mailbox, Message

MAX_COUNT = (1 << 20) - 1
"""Largest arrival count and transaction count of an mbarrier."""
STATE_PENDING_BITS = 20
"""Low bits of a state that hold the arrivals pending."""


@dataclass
class MemoryBarrier:
    """An mbarrier: a phase completes when no arrival is pending and the transaction count is zero."""

    count: int
    pending: int
    created: int
    """The epoch of its initialisation."""
    handover: Handover = field(default_factory=Handover)
    transactions: int = 0
    phase: int = 0
    completed: int = 0
    """Phases completed so far."""
    told: deque[Mailbox] = field(default_factory=lambda: deque(maxlen=3))
    """What the last completed phases handed on."""
    seen: dict[int, int] = field(default_factory=dict)
    """By actor: the last phase that it has waited for, numbered from 0."""

    @classmethod
    def create(cls, count: int, created: int) -> MemoryBarrier:
        if not 1 <= count <= MAX_COUNT:
            raise HazardError(f"mbarrier.init with count {count}: expected 1 to {MAX_COUNT}")
        return cls(count, count, created)

    def expect(self, nbytes: int) -> None:
        """Raise the transaction count."""
        self.transactions += nbytes
        if abs(self.transactions) > MAX_COUNT:
            raise HazardError(f"mbarrier transaction count {self.transactions}: beyond ±{MAX_COUNT}")

    def complete(self, nbytes: int, message: Message) -> None:
        """Lower the transaction count: bytes have arrived (possibly before they were expected)."""
        self.expect(-nbytes)
        self.handover.arriving.put(message)
        self._check()

    def arrive(self, message: Message, count: int = 1) -> None:
        if count < 1 or count > self.pending:
            raise HazardError(f"mbarrier arrival of {count} where {self.pending} of {self.count} are pending")
        self.pending -= count
        self.handover.arriving.put(message)
        self._check()

    def raise_pending(self) -> None:
        """One more arrival is to come in this phase."""
        if self.pending == MAX_COUNT:
            raise HazardError(f"mbarrier with {self.pending} arrivals pending: no more fit")
        self.pending += 1

    @property
    def state(self) -> int:
        """The opaque state that an arrival returns: the phase's number and the arrivals pending in it."""
        return self.completed << STATE_PENDING_BITS | self.pending

    def has_left(self, state: int) -> bool:
        """Whether the phase of a state is over (``test_wait`` without ``parity``).

        Raises:
            HazardError: it is neither the current phase nor the one before.
        """
        number = state >> STATE_PENDING_BITS
        if number not in (self.completed, self.completed - 1):
            raise HazardError(f"wait for phase {number} of an mbarrier in phase {self.completed}")
        return number != self.completed

    def is_complete(self, parity: int) -> bool:
        """Whether the phase of that parity is over (``try_wait.parity``)."""
        return self.phase != parity & 1

    def wait(self, waiter: WarpActor, relaxed: bool, reaching: bool) -> None:
        """A wait has found its phase to be over; ``reaching`` as for ``WarpActor.acquire``.

        Raises:
            HazardError: the phase two before went by unnoticed: nothing keeps the barrier from running ahead of this
                waiter, who cannot tell phases of one parity apart.
        """
        last = self.completed - 1
        if last >= 2 and self.seen.get(waiter.number, -1) < last - 2 and not self._knows_first(waiter):
            raise HazardError(
                f"wait for phase {last} of an mbarrier whose phase {last - 2} was neither waited for nor known"
            )
        self.seen[waiter.number] = last
        waiter.acquire(self.handover.released, relaxed, reaching)

    def _knows_first(self, waiter: WarpActor) -> bool:
        """Whether the waiter knows what the phase two before told."""
        return all(waiter.clock.includes(known) for known in self.told[0].open_to(waiter.rank))

    def _check(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase ^= 1
            self.pending = self.count
            self.completed += 1
            self.handover.complete()
            self.told.append(self.handover.released)

    def __str__(self) -> str:
        return (
            f"phase parity {self.phase}, {self.pending} of {self.count} arrivals pending, "
            f"{self.transactions} B outstanding"
        )


@dataclass
class NamedBarrier:
    """One of a CTA's sixteen barriers (``bar.sync``, ``bar.arrive``): counts threads, whole warps at a time."""

    handover: Handover = field(default_factory=Handover)
    expected: int = 0
    arrived: int = 0
    generation: int = 0

    def arrive(self, threads: int, expected: int, message: Message) -> int:
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
        self.handover.arriving.put(message)
        if self.arrived == expected:
            self.arrived = 0
            self.generation += 1
            self.handover.complete()
        return generation


@dataclass
class NamedBarriers:
    """A CTA's barriers by number."""

    barriers: dict[int, NamedBarrier] = field(default_factory=dict)

    def get(self, number: int) -> NamedBarrier:
        if not 0 <= number < 16:
            raise UnsupportedError(f"named barrier {number}: a CTA has 16")
        if number not in self.barriers:
            self.barriers[number] = NamedBarrier()
        return self.barriers[number]


@dataclass
class ClusterBarrier:
    """``barrier.cluster``: every warp of every CTA of the cluster arrives once per generation."""

    warps: int
    handover: Handover = field(default_factory=Handover)
    arrived: int = 0
    generation: int = 0

    def arrive(self, message: Message) -> int:
        """Register a warp; returns the generation to wait for."""
        generation = self.generation
        self.arrived += 1
        self.handover.arriving.put(message)
        if self.arrived == self.warps:
            self.arrived = 0
            self.generation += 1
            self.handover.complete()
        return generation
