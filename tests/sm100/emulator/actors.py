"""Who accesses memory: a warp, or an asynchronous operation that it issued.

The rules are those of the PTX memory model at the grain of warps: lanes of a warp count as ordered among
themselves. An asynchronous operation begins with what its issuer knew and is known to others once they learn its
completion: by an mbarrier, or by the issuer's wait for its group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.sm100.emulator.ordering_clock import (
    AGENT_BITS,
    INIT,
    NOTHING,
    ORDER,
    PROXY,
    STRONG,
    TICK,
    Agents,
    Clock,
)


@dataclass
class Actor:
    """One agent at one point: ``site`` is the index of the instruction at work."""

    agents: Agents
    number: int
    clock: Clock
    site: int = 0

    def epoch(self, strong: bool = False) -> int:
        """The stamp of an access made now."""
        time = int(self.clock.limits[ORDER, self.number]) & ~NOTHING
        return time | (STRONG if strong else 0) | self.site << AGENT_BITS | self.number

    @property
    def asynchronous(self) -> bool:
        """Whether it acts in the asynchronous proxy."""
        return not self.agents.generic[self.number]

    def ordered(self) -> np.ndarray:
        """By agent: the limit of what happened before."""
        return self.clock.limits[ORDER]

    def visible(self) -> np.ndarray:
        """By agent: the limit of the writes that are ordered before and visible to the proxy of this actor."""
        limits = self.clock.limits
        if self.asynchronous:
            return np.where(self.agents.generic, limits[PROXY], limits[ORDER])
        return limits[ORDER]

    def knows_barrier(self, epoch: int, asynchronous: bool) -> bool:
        """Whether an mbarrier initialised at ``epoch`` may be used, by an asynchronous operation if so."""
        return self.clock.covers(epoch, PROXY if asynchronous or self.asynchronous else ORDER, INIT)

    def _tick(self) -> None:
        self.clock.limits[ORDER, self.number] += TICK


@dataclass
class WarpActor(Actor):
    """A warp, with what it has issued."""

    name: str = ""
    fenced: Clock = field(init=False)
    """What the last fence released: a relaxed operation hands on no more."""
    acquirable: Clock = field(init=False)
    """What relaxed operations found: the next fence acquires it."""
    _operations: dict[bool, dict[int, int]] = field(default_factory=lambda: {True: {}, False: {}})
    """By proxy (generic or not): the agents of issued operations, each with the limit of its latest one."""
    _pipes: dict[int, Actor] = field(default_factory=dict)
    """By lane: the tcgen05 operations that it issued, which take effect in order."""

    def __post_init__(self) -> None:
        self.fenced, self.acquirable = Clock(self.agents), Clock(self.agents)
        self._tick()

    @classmethod
    def create(cls, agents: Agents, name: str) -> WarpActor:
        number = agents.add(name, generic=True)
        return cls(agents, number, Clock(agents), name=name)

    def release(self, relaxed: bool = False) -> Clock:
        """What an arrival or a store hands on."""
        if relaxed:
            handed = self.fenced.copy()
            limits = handed.limits
            np.maximum(limits[INIT], self.clock.limits[INIT], out=limits[INIT])
            return handed
        handed = self.clock.copy()
        self._tick()
        return handed

    def acquire(self, found: Clock, relaxed: bool = False) -> None:
        """Learn from a completed wait or a load."""
        (self.acquirable if relaxed else self.clock).join(found)

    def fence(self) -> None:
        """fence.acq_rel, fence.sc, membar: relaxed operations before and after become ordering ones."""
        self.clock.join(self.acquirable)
        self.fenced = self.release()

    def fence_proxy(self) -> None:
        """fence.proxy.async: generic writes ordered before become visible to asynchronous operations after."""
        limits = self.clock.limits
        np.maximum(limits[PROXY], limits[ORDER], out=limits[PROXY])
        self._tick()

    def fence_barrier_inits(self) -> None:
        """fence.mbarrier_init: this warp's initialisations become known with any later synchronisation."""
        self.clock.limits[INIT, self.number] = self.clock.limits[ORDER, self.number]
        self._tick()

    def issue(self, generic: bool = False) -> Actor:
        """A new asynchronous operation that begins now.

        Its agent is that of an earlier operation whose completion this warp knows, if there is one: what covers
        the new operation then covers the old one, too.
        """
        known, limits = self._operations[generic], self.clock.limits[ORDER]
        number = next((number for number, latest in known.items() if limits[number] >= latest), None)
        if number is None:
            number = self.agents.add(f"asynchronous operation of {self.name}", generic)
        known[number] = known.get(number, NOTHING) + TICK
        clock = self.clock.copy()
        clock.limits[ORDER, number] = known[number]
        self._tick()
        return Actor(self.agents, number, clock, self.site)

    def issue_tensor(self, lane: int) -> Actor:
        """A new tcgen05.mma or cp of a lane: it comes after the earlier ones of that lane."""
        if lane not in self._pipes:
            number = self.agents.add(f"tensor core for lane {lane} of {self.name}", generic=False)
            self._pipes[lane] = Actor(self.agents, number, Clock(self.agents))
        pipe = self._pipes[lane]
        pipe.clock.join(self.clock)
        pipe._tick()
        self._tick()
        return Actor(self.agents, pipe.number, pipe.clock.copy(), self.site)

    def committed(self, lane: int) -> Clock:
        """What tcgen05.commit hands on: the lane's earlier operations, not its own accesses after them."""
        return self._pipes[lane].clock.copy() if lane in self._pipes else Clock(self.agents)
