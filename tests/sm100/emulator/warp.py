"""A warp: registers of 32 lanes, a program counter for each lane, what it waits for.

Lanes that share a program counter run together, the lowest counter first, which makes diverged lanes meet again
where the compiler lays out code in order. A group that cannot go on lets the other groups of its warp run
(independent thread scheduling).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.sm100.emulator.actors import WarpActor
from tests.sm100.emulator.local_memory import LocalMemory
from tests.sm100.emulator.ordering_clock import Clock
from tests.sm100.emulator.ptx import Register
from tests.sm100.emulator.scalar_types import LANE_IDS, LANES
from tests.sm100.emulator.warpgroup import MultiplicationGroups
from tests.sm100.emulator.warpgroup_registers import WarpgroupRegisters

if TYPE_CHECKING:
    from tests.sm100.emulator.cluster import Cta

EXITED = -1
REGISTER_DTYPES = {
    "pred": np.dtype(bool),
    "8": np.dtype("u1"),
    "16": np.dtype("u2"),
    "32": np.dtype("u4"),
    "64": np.dtype("u8"),
    "128": np.dtype("V16"),
}
Mask = np.ndarray | None
"""Lanes that execute: a bool array, or None for all 32."""


@dataclass(frozen=True)
class Blocked:
    """Returned by an instruction that cannot go on now and is to be tried again; says what it waits for."""

    reason: str


@dataclass
class BulkGroup:
    """A thread's group of copies: how many have yet to read their source, and to finish; what their end tells."""

    unread: int = 0
    unfinished: int = 0
    known: list[Clock] = field(default_factory=list)

    def add(self, known: Clock) -> None:
        """One more copy, with what is known once it is done."""
        self.unread += 1
        self.unfinished += 1
        self.known.append(known)


class Warp:
    """State of one warp; ``index`` is its place in the CTA."""

    def __init__(self, cta: Cta, index: int, registers: Counter[str]) -> None:
        self.cta = cta
        self.index = index
        self.actor = WarpActor.create(cta.cluster.agents, f"{cta}, warp {index}", cta.rank)
        self.files = {kind: np.zeros((registers[kind], LANES), dtype) for kind, dtype in REGISTER_DTYPES.items()}
        for kind, poison in (("8", 0xAD), ("16", 0xDEAD), ("32", 0xDEADDEAD), ("64", 0xDEADDEADDEADDEAD)):
            self.files[kind].fill(poison)
        width, height, _ = cta.launch.block
        thread = LANE_IDS + np.uint32(LANES * index)
        self.views: dict[int, np.ndarray] = {}
        """Registers as what instructions read or write them as, by ``view_key``."""
        self.special = {
            "%tid.x": thread % width,
            "%tid.y": thread // width % height,
            "%tid.z": thread // (width * height),
            "%laneid": LANE_IDS,
            **{name: np.full(LANES, value, np.uint32) for name, value in cta.special.items()},
            "%warpid": np.full(LANES, index, np.uint32),
        }
        self.special = {name: np.asarray(value, np.uint32) for name, value in self.special.items()}
        self.exists = thread < cta.threads
        self.local = LocalMemory(cta.launch.local_end)
        self.counter = 0
        self.counters: np.ndarray | None = None
        if not self.exists.all():
            self.counters = np.where(self.exists, 0, EXITED)
        self.done = False
        self.carry = np.zeros(LANES, bool)
        """What ``cc`` instructions leave to those that take it in."""
        self.waits: dict[int, str] = {}
        """What a group of lanes waits for, by its program counter."""
        self.spinning: str | None = None
        """Set by a failed ``try_wait``: the group gives up its turn."""
        self.arrived: dict[tuple[int, str], int] = {}
        """Barrier generations this warp has arrived for and waits on, by program counter and barrier."""
        self.cluster_generation: int | None = None
        self.waited_for_launch = False
        """Whether it has executed griddepcontrol.wait."""
        self.bulk_groups: dict[int, tuple[BulkGroup, list[BulkGroup]]] = {}
        """Each lane's open group of bulk copies and its committed ones."""
        self.copy_groups: dict[int, tuple[BulkGroup, list[BulkGroup]]] = {}
        """The same for cp.async of single elements."""
        self.multiplications = MultiplicationGroups()
        self.multiplied = WarpgroupRegisters(registers)
        self.loose_copies: Counter[int] = Counter()
        """cp.async copies of each lane since it last handed its copies to an mbarrier."""
        self.copies = Clock(cta.cluster.agents)
        """What is known once all cp.async copies issued so far are done."""

    def view(self, key: int, register: Register, dtype: np.dtype) -> np.ndarray:
        """A register's lanes as another type of its width; kept, for making an array that aliases takes long."""
        self.views[key] = found = self.files[register.kind][register.index].view(dtype)
        return found

    @property
    def present(self) -> np.ndarray:
        """Lanes that have not exited."""
        return self.exists if self.counters is None else self.counters != EXITED

    def groups(self) -> list[int]:
        """Program counters at which lanes stand, lowest first."""
        if self.counters is None:
            return [self.counter]
        return sorted({int(counter) for counter in self.counters if counter != EXITED})

    def lanes_at(self, counter: int) -> Mask:
        """Lanes at ``counter``; converges the warp when that is all of them."""
        if self.counters is None:
            return None
        mask = self.counters == counter
        if mask.all():
            self.counters, self.counter = None, counter
            return None
        return mask

    def go(self, mask: Mask, counter: int) -> None:
        """Move the lanes of ``mask`` to ``counter``."""
        if mask is None:
            self.counters, self.counter = None, counter
            return
        if self.counters is None:
            self.counters = np.full(LANES, self.counter)
        self.counters[mask] = counter
        if counter == EXITED and (self.counters == EXITED).all():
            self.done = True

    def exit(self, mask: Mask) -> None:
        """End the lanes of ``mask``."""
        self.actor.lanes.leave(slice(None) if mask is None else mask)
        if mask is None:
            self.done = True
        else:
            self.go(mask, EXITED)


def active(mask: Mask) -> np.ndarray:
    """Lane numbers of a mask."""
    return LANE_IDS if mask is None else mask.nonzero()[0]


def view_key(register: Register, dtype: np.dtype) -> int:
    """What tells a register as a type from all others: types of one width share a file."""
    return register.index << 5 | dtype.num


def leader(mask: Mask) -> int:
    """The lowest lane of a mask."""
    return 0 if mask is None else int(np.argmax(mask))
