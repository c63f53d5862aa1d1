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
    FENCED,
    INIT,
    NOTHING,
    ORDER,
    PROXY,
    STRONG,
    TENSOR,
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
    tensor: bool = False
    """Whether it is a tcgen05 operation."""

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
        if not self.asynchronous:
            return limits[ORDER]
        found = np.where(self.agents.generic, limits[PROXY], limits[ORDER])
        if self.tensor and not self.agents.strict:
            copies = list(self.agents.copies)
            found[copies] = limits[ORDER, copies]
        return found

    def finished(self) -> np.ndarray:
        """By agent: the limit of what happened before, however that is known."""
        return np.maximum(self.clock.limits[ORDER], self.clock.limits[TENSOR])

    def tensor_ordered(self) -> np.ndarray:
        """By agent: the limit of tcgen05 operations that are ordered before one of this actor."""
        return self.clock.limits[TENSOR] if self.agents.strict else self.finished()

    def knows_begun(self, warps: np.ndarray) -> bool:
        """Whether one of these warps, by number, is known to have begun."""
        return bool((self.clock.limits[INIT, warps] > NOTHING).any())

    def knows_barrier(self, epoch: int, asynchronous: bool) -> bool:
        """Whether an mbarrier initialised at ``epoch`` may be used, by an asynchronous operation if so."""
        needs_fence = self.agents.init_fence and (asynchronous or self.asynchronous)
        return self.clock.covers(epoch, PROXY if needs_fence else ORDER, INIT)

    def _tick(self) -> None:
        self.clock.limits[ORDER, self.number] += TICK

    def _advance(self) -> None:
        """Begin a tcgen05 operation of this agent: after its earlier ones."""
        self._tick()
        limits = self.clock.limits
        limits[TENSOR, self.number] = limits[ORDER, self.number]

    def _operate(self, issuer: Actor) -> Actor:
        """This agent's next tcgen05 operation, in its order, with what the issuer knows by now."""
        self.clock.follow(issuer.clock)
        self._advance()
        issuer._tick()
        return Actor(self.agents, self.number, self.clock.copy(), issuer.site, tensor=True)


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
    _tensor: dict[tuple[str, int], Actor] = field(default_factory=dict)
    """Agents of tcgen05 operations, each of which take effect in order: of mma and cp by lane, of ld and of st."""

    def __post_init__(self) -> None:
        self.fenced, self.acquirable = Clock(self.agents), Clock(self.agents)
        self._tick()
        # The time of no access yet: whoever has synchronised with this warp in any way knows that it has begun.
        self.fence_barrier_inits()

    @classmethod
    def create(cls, agents: Agents, name: str) -> WarpActor:
        number = agents.add(name, generic=True)
        return cls(agents, number, Clock(agents), name=name)

    def release(self, relaxed: bool = False) -> Clock:
        """What an arrival or a store hands on."""
        if relaxed:
            handed = self.fenced.copy()
            handed.join_relaxed(self.clock)
            return handed
        handed = self.clock.copy()
        self._tick()
        return handed

    def acquire(self, found: Clock, relaxed: bool = False) -> None:
        """Learn from a completed wait or a load."""
        if relaxed:
            self.acquirable.join(found)
            self.clock.join_relaxed(found)
        else:
            self.clock.join(found)

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
        """A new asynchronous operation that begins now; a generic one is a cp.async copy.

        Its agent is that of an earlier operation whose completion this warp knows, if there is one: what covers
        the new operation then covers the old one, too.
        """
        known, limits = self._operations[generic], self.clock.limits[ORDER]
        number = next((number for number, latest in known.items() if limits[number] >= latest), None)
        if number is None:
            number = self.agents.add(f"asynchronous operation of {self.name}", generic)
            if generic:
                self.agents.copies.add(number)
        known[number] = known.get(number, NOTHING) + TICK
        clock = self.clock.copy()
        clock.limits[ORDER, number] = known[number]
        self._tick()
        return Actor(self.agents, number, clock, self.site)

    def fence_tensor(self, before: bool) -> None:
        """tcgen05.fence: hand tcgen05 operations on with what follows, or order later ones after what was handed on."""
        limits = self.clock.limits
        known = self.tensor_ordered() if before else limits[FENCED]
        view = FENCED if before else TENSOR
        np.maximum(limits[view], known, out=limits[view])

    def issue_tensor(self, lane: int) -> Actor:
        """A new tcgen05.mma or cp of a lane: it comes after the earlier ones of that lane."""
        return self._agent("mma and cp", lane)._operate(self)

    def commit_tensor(self, lane: int) -> Clock:
        """What tcgen05.commit hands on: the lane's mma and cp so far, not its other accesses since the last of them.

        It has the effect of ``tcgen05.fence::before_thread_sync``.
        """
        operations = self._agent("mma and cp", lane)
        operations._advance()
        handed = operations.clock.copy()
        limits = handed.limits
        np.maximum(limits[FENCED], limits[TENSOR], out=limits[FENCED])
        return handed

    def transfer(self, kind: str) -> Actor:
        """A new tcgen05.ld or st of the warp, done once waited for.

        Unless strictness is asked for, ld counts as done at once: its registers are used, sooner or later.
        """
        operation = self._agent(kind, 0)._operate(self)
        if kind == "ld" and not self.agents.strict:
            self.wait_transfers(kind)
        return operation

    def wait_transfers(self, kind: str) -> None:
        """tcgen05.wait: the warp's loads or stores of tensor memory are done."""
        agent, limits = self._agent(kind, 0), self.clock.limits
        limits[[ORDER, TENSOR], agent.number] = agent.clock.limits[ORDER, agent.number]

    def _agent(self, kind: str, lane: int) -> Actor:
        if (kind, lane) not in self._tensor:
            number = self.agents.add(f"tcgen05 {kind} of {self.name}, lane {lane}", generic=False)
            self._tensor[kind, lane] = Actor(self.agents, number, Clock(self.agents))
        return self._tensor[kind, lane]
