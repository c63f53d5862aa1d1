"""What barriers and flags carry from those who arrive or store to those who wait or load.

Synchronisation orders what it is wide enough for. Within a CTA any scope is; between CTAs both sides need the scope of
the cluster or more, by themselves or by a fence (PTX ISA, memory consistency model: morally strong operations, release
and acquire patterns). So a message says one thing to the CTA that it comes from and another to the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.sm100.emulator.ordering_clock import Clock


@dataclass(frozen=True)
class Message:
    """What an agent of CTA ``rank`` hands on: to its own CTA, and to others (None: nothing)."""

    rank: int
    near: Clock
    far: Clock | None

    @classmethod
    def to_all(cls, rank: int, known: Clock) -> Message:
        """The same to everyone, as asynchronous operations do."""
        return cls(rank, known, known)

    def within(self) -> Message:
        """The same, for its own CTA only."""
        return Message(self.rank, self.near, None)


@dataclass
class Mailbox:
    """All that messages told so far: by the CTA that may learn it, and what every CTA may."""

    near: dict[int, Clock] = field(default_factory=dict)
    far: Clock | None = None

    def put(self, message: Message) -> None:
        known = self.near.get(message.rank)
        if known is None:
            self.near[message.rank] = message.near.copy()
        else:
            known.join(message.near)
        if message.far is None:
            return
        if self.far is None:
            self.far = message.far.copy()
        else:
            self.far.join(message.far)

    def copy(self) -> Mailbox:
        return Mailbox(
            {rank: known.copy() for rank, known in self.near.items()}, None if self.far is None else self.far.copy()
        )

    def open_to(self, rank: int) -> Iterator[Clock]:
        """What a CTA may learn."""
        if rank in self.near:
            yield self.near[rank]
        if self.far is not None:
            yield self.far


@dataclass
class Handover:
    """The messages of a barrier: of the open phase and before, and those that completed phases hand to who waits."""

    arriving: Mailbox = field(default_factory=Mailbox)
    released: Mailbox = field(default_factory=Mailbox)

    def complete(self) -> None:
        """The phase is over."""
        self.released = self.arriving.copy()
