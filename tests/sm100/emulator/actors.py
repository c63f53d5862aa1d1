"""Who accesses memory: a warp, or an asynchronous operation that it issued.

The rules are those of the PTX memory model at the grain of warps: what a lane learns, its warp knows. What lanes write
is another matter: it is handed on by those that execute the release, and by others only if they have synchronised
with them (``lane_order``). An asynchronous operation begins with what its issuer knew and is known to others once they
learn its completion: by an mbarrier, or by the issuer's wait for its group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tests.sm100.emulator.handover import Mailbox, Message
from tests.sm100.emulator.lane_order import UNTOLD, LaneOrder, LaneView
from tests.sm100.emulator.ordering_clock import (
    ACCESSES,
    AGENT_BITS,
    AGENT_MASK,
    FENCED,
    INIT,
    LANE_SHIFT,
    NEAR,
    NOTHING,
    ORDER,
    PROXY,
    REACHING,
    STRONG,
    TENSOR,
    TICK,
    WIDE,
    Agents,
    Clock,
)
from tests.sm100.emulator.scalar_types import LANES

Strength = Literal["weak", "cta", "reaching"]
"""Whether an access may race with others that are strong, and if so, whether its scope goes beyond the CTA."""
STRENGTHS: dict[Strength, int] = {"weak": 0, "cta": STRONG, "reaching": STRONG | REACHING}


@dataclass
class Actor:
    """One agent at one point: ``site`` is the index of the instruction at work."""

    agents: Agents
    number: int
    clock: Clock
    site: int = 0
    tensor: bool = False
    """Whether it is a tcgen05 operation."""
    lane_view: LaneView | None = None
    """What its issuer knew of its warp's accesses, where that is not the same as what the clock says."""

    def epoch(self, strength: Strength = "weak") -> int:
        """The stamp of an access made now, by no lane in particular."""
        time = int(self.clock.limits[ORDER, self.number]) & ~NOTHING
        return time | STRENGTHS[strength] | self.site << AGENT_BITS | self.number | UNTOLD << LANE_SHIFT

    def author(self, rank: int) -> Actor:
        """Who it is that writes to shared memory of a CTA."""
        return self

    def between_lanes(self, earlier: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """bool: which of earlier accesses are another lane's of this warp, without order before what lanes do now."""
        return np.zeros(1, bool)

    def excused(self, earlier: np.ndarray, writes: bool) -> np.ndarray:
        """bool: which of earlier accesses (writes or reads) the issuing lane knew though the clock does not say so."""
        if self.lane_view is None:
            return np.zeros(1, bool)
        return self.lane_view.covers(earlier, writes and self.asynchronous)

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

    def _operate(self, issuer: WarpActor, lane: int | None = None) -> Actor:
        """This agent's next tcgen05 operation, in its order, with what the issuer, or a lane of it, knows by now."""
        self.clock.follow(issuer.told(lane))
        self._advance()
        view = None if lane is None else issuer.view(lane)
        issuer._tick()
        return Actor(self.agents, self.number, self.clock.copy(), issuer.site, tensor=True, lane_view=view)


@dataclass
class WarpActor(Actor):
    """A warp, with what it has issued."""

    name: str = ""
    executing: np.ndarray | None = None
    """Lanes that execute the instruction at work; None for all."""
    lanes: LaneOrder = field(default_factory=LaneOrder)
    _found: dict[bool, Clock] = field(init=False)
    """What too weak or too narrow operations found, from other CTAs (True) and from the own: fences acquire it."""
    _remote: Actor | None = None
    """Who writes to shared memory of other CTAs in this warp's name: less carries that than the rest."""
    _operations: dict[bool, dict[int, int]] = field(default_factory=lambda: {True: {}, False: {}})
    """By proxy (generic or not): the agents of issued operations, each with the limit of its latest one."""
    _tensor: dict[tuple[str, int], Actor] = field(default_factory=dict)
    """Agents of tcgen05 operations, each of which take effect in order: of mma and cp by lane, of ld and of st."""

    def __post_init__(self) -> None:
        self._found = {beyond: Clock(self.agents) for beyond in (False, True)}
        self.rank = int(self.agents.ranks[self.number])
        self._tick()
        # The time of no access yet: whoever has synchronised with this warp in any way knows that it has begun.
        self.fence_barrier_inits()

    @classmethod
    def create(cls, agents: Agents, name: str, rank: int) -> WarpActor:
        number = agents.add(name, generic=True, rank=rank)
        return cls(agents, number, Clock(agents), name=name)

    def _tick(self) -> None:
        super()._tick()
        if self._remote is not None:
            self._remote._tick()

    def author(self, rank: int) -> Actor:
        if rank == self.rank:
            return self
        if self._remote is None:
            number = self.agents.add(f"{self.name}, in another CTA", generic=True, rank=self.rank, remote=True)
            limits = self.clock.limits
            limits[ORDER, number] = limits[ORDER, self.number]
            self._remote = RemoteWriter(self.agents, number, self.clock, warp=self)
        self._remote.site = self.site
        return self._remote

    def _own(self) -> list[int]:
        """The agents that its own accesses count as."""
        return [self.number] if self._remote is None else [self.number, self._remote.number]

    def between_lanes(self, earlier: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        own = earlier > self.lanes.floor
        if not np.count_nonzero(own):
            return own
        agents = earlier & AGENT_MASK
        mine = agents == self.number
        if self._remote is not None:
            mine |= agents == self._remote.number
        own &= mine
        return own & self.lanes.unordered(earlier, lanes) if np.count_nonzero(own) else own

    def accessed(self, lanes: np.ndarray) -> None:
        """These lanes access shared memory now."""
        self.lanes.access(lanes, int(self.clock.limits[ORDER, self.number]))

    def synchronise_lanes(self, members: np.ndarray) -> None:
        """What these lanes did is ordered before what any of them does from now on."""
        self.lanes.synchronise(members, int(self.clock.limits[ORDER, self.number]))
        self._tick()

    def _behind(self, lane: int | None) -> int | None:
        """Up to where a lane, or all lanes at work, know what others accessed, if that is not all of it."""
        members = self.executing
        if lane is not None:
            members = np.zeros(LANES, bool)
            members[lane] = True
        return None if members is None else self.lanes.limit(members)

    def view(self, lane: int) -> LaneView | None:
        """What a lane knows of its warp's accesses, if it does not know all of them."""
        if self._behind(lane) is None:
            return None
        limits = self.clock.limits[:, self.number]
        return self.lanes.view(lane, self._own(), int(limits[ORDER]), int(limits[PROXY]))

    def told(self, lane: int | None = None) -> Clock:
        """What a lane, or all lanes at work, may hand on: not what other lanes accessed since they last synchronised.

        Nor then what they accessed themselves since.
        """
        known, limit = self.clock.copy(), self._behind(lane)
        if limit is not None:
            places = np.ix_(ACCESSES, self._own())
            known.limits[places] = np.minimum(known.limits[places], limit)
        return known

    def release(self, relaxed: bool = False, reaching: bool = True) -> Message:
        """What an arrival or a store hands on.

        Args:
            relaxed: hand on what a fence covers, no more.
            reaching: whether the scope is said to go beyond the CTA. Without that another CTA learns what a wide fence
                covers. It learns more nevertheless, unless ``Options.strict_scopes`` is set: kernels proven on hardware
                leave the scope of arrivals out where they have read, copied or multiplied, though not where they have
                written to that CTA's memory.
        """
        known = self.told()
        self._tick()
        limits = known.limits
        near = known.cut(limits[NEAR]) if relaxed else known
        if self.agents.ctas == 1:
            return Message(self.rank, near, None)
        if relaxed:
            return Message(self.rank, near, known.cut(limits[WIDE]))
        if reaching:
            return Message(self.rank, near, known)
        return Message(self.rank, near, known.cut(np.where(self.agents.scoped, limits[WIDE], limits[ORDER])))

    def acquire(self, found: Mailbox, relaxed: bool = False, reaching: bool = True) -> None:
        """Learn from a completed wait or a load; ``reaching`` as for release."""
        self._take(found.near.get(self.rank), False, relaxed, True)
        self._take(found.far, True, relaxed, reaching)

    def _take(self, told: Clock | None, beyond: bool, relaxed: bool, reaching: bool) -> None:
        if told is None:
            return
        if relaxed or not reaching:
            self._found[beyond].join(told)
            self.clock.join_relaxed(told)
        if relaxed:
            return
        self.learn(told if reaching else told.cut(np.where(self.agents.scoped, NOTHING, told.limits[ORDER])))

    def learn(self, known: Clock) -> None:
        """Learn all that synchronisation carries."""
        self.clock.join(known)
        executing = slice(None) if self.executing is None else self.executing
        self.lanes.learn(executing, int(known.limits[ORDER, self.number]))

    def fence(self, wide: bool, acquires: bool = True, releases: bool = True) -> None:
        """fence, membar: relaxed operations before (it acquires) and after (it releases) become ordering ones.

        ``wide``: the scope is the cluster or more.
        """
        for beyond in (False, True) if wide else (False,):
            if acquires:
                self.learn(self._found[beyond])
        if not releases:
            return
        limits, ordered = self.clock.limits, self.told().limits[ORDER]
        views = [NEAR, WIDE] if wide else [NEAR]
        limits[views] = np.maximum(limits[views], ordered)
        self._tick()

    def fence_proxy(self) -> None:
        """fence.proxy.async: generic writes ordered before become visible to asynchronous operations after."""
        limits = self.clock.limits
        np.maximum(limits[PROXY], self.told().limits[ORDER], out=limits[PROXY])
        self._tick()

    def fence_barrier_inits(self) -> None:
        """fence.mbarrier_init: this warp's initialisations become known with any later synchronisation."""
        self.clock.limits[INIT, self.number] = self.clock.limits[ORDER, self.number]
        self._tick()

    def issue(self, lane: int | None = None, generic: bool = False) -> Actor:
        """A new asynchronous operation that begins now, of a lane if one is named; a generic one is a cp.async copy.

        Its agent is that of an earlier operation whose completion this warp knows, if there is one: what covers
        the new operation then covers the old one, too.
        """
        known, limits = self._operations[generic], self.clock.limits[ORDER]
        number = next((number for number, latest in known.items() if limits[number] >= latest), None)
        if number is None:
            number = self.agents.add(f"asynchronous operation of {self.name}", generic, self.rank)
            if generic:
                self.agents.copies.add(number)
        known[number] = known.get(number, NOTHING) + TICK
        clock, view = self.told(lane), None if lane is None else self.view(lane)
        clock.limits[ORDER, number] = known[number]
        self._tick()
        return Actor(self.agents, number, clock, self.site, lane_view=view)

    def join_operation(self) -> Clock:
        """What it knows as it joins an operation of its warpgroup, which begins after what it did so far."""
        known = self.told()
        self._tick()
        return known

    def fence_tensor(self, before: bool) -> None:
        """tcgen05.fence: hand tcgen05 operations on with what follows, or order later ones after what was handed on."""
        limits = self.clock.limits
        known = self.tensor_ordered() if before else limits[FENCED]
        view = FENCED if before else TENSOR
        np.maximum(limits[view], known, out=limits[view])

    def issue_tensor(self, lane: int) -> Actor:
        """A new tcgen05.mma or cp of a lane: it comes after the earlier ones of that lane."""
        return self._agent("mma and cp", lane)._operate(self, lane)

    def commit_tensor(self, lane: int) -> Message:
        """What tcgen05.commit hands on: the lane's mma and cp so far, not its other accesses since the last of them.

        It has the effect of ``tcgen05.fence::before_thread_sync``.
        """
        operations = self._agent("mma and cp", lane)
        operations._advance()
        handed = operations.clock.copy()
        limits = handed.limits
        np.maximum(limits[FENCED], limits[TENSOR], out=limits[FENCED])
        return Message.to_all(self.rank, handed)

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
            number = self.agents.add(f"tcgen05 {kind} of {self.name}, lane {lane}", False, self.rank)
            self._tensor[kind, lane] = Actor(self.agents, number, Clock(self.agents))
        return self._tensor[kind, lane]


@dataclass
class RemoteWriter(Actor):
    """Writes of a warp to shared memory of other CTAs."""

    warp: WarpActor = None  # type: ignore[assignment]

    def between_lanes(self, earlier: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        return self.warp.between_lanes(earlier, lanes)
