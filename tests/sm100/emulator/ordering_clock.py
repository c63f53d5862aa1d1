"""Vector clocks: which accesses are known to have happened before a point of the program.

An *agent* is a warp or one asynchronous operation. Each has a time of its own, which advances whenever it hands its
knowledge to another agent. An access is stamped with an *epoch* (time, lane, instruction, agent), one integer. A clock
holds for each agent the *limit* up to which its epochs are covered; several views differ in what covering means:

* ORDER: happened before (base causality order of the PTX memory model);
* PROXY: happened before, and a proxy fence on the way has made writes of the generic proxy visible to the
  asynchronous one;
* INIT: an mbarrier initialised before a ``fence.mbarrier_init`` that happened before;
* FENCED: tcgen05 operations before a ``tcgen05.fence::before_thread_sync`` (or a commit) that happened before;
* NEAR: happened before a fence of this agent's own, whatever its scope;
* WIDE: happened before a fence of this agent's own whose scope is the cluster or more;
* TENSOR: of those of FENCED, what a ``tcgen05.fence::after_thread_sync`` has ordered before tcgen05 operations from
  now on.

Synchronisation carries the first four; the others each agent's own fences make. Relaxed synchronisation carries INIT
and FENCED only, whose fences are made for it, and what NEAR or WIDE covers (``handover``). Clocks are joined by
maximum, so what a barrier carries is the union of what its participants knew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.emulator.ptx import Instruction

AGENT_BITS, SITE_BITS, LANE_BITS = 12, 19, 6
AGENTS = 1 << AGENT_BITS
AGENT_MASK = AGENTS - 1
SITE_MASK = (1 << SITE_BITS) - 1
STRONG = 1 << AGENT_BITS + SITE_BITS
"""Set in the epoch of an access that may race with others of its kind: atomics, relaxed, release, acquire."""
REACHING = STRONG << 1
"""Set besides STRONG if the access has a scope beyond the CTA."""
LANE_SHIFT = AGENT_BITS + SITE_BITS + 2
LANE_MASK = (1 << LANE_BITS) - 1
TICK = 1 << LANE_SHIFT + LANE_BITS
"""One unit of time in an epoch or a limit."""
NOTHING = TICK - 1
"""The limit that covers no access: times begin at 1, and 0 as an epoch stands for no access."""

ORDER, PROXY, INIT, FENCED, NEAR, WIDE, TENSOR = range(7)
VIEWS = 7
CARRIED = slice(ORDER, NEAR)
"""Views that synchronisation carries."""
RELAXED = [INIT, FENCED]
"""Views that relaxed synchronisation carries."""
ACCESSES = [ORDER, PROXY, NEAR, WIDE]
"""Views that say of accesses to memory that they happened before."""


@dataclass
class Agents:
    """The agents of a cluster, by number. Their instructions name the sites of accesses.

    ``ctas`` is the number of CTAs of the cluster. ``strict`` demands fences and waits that tcgen05 can do without,
    ``init_fence`` one after the initialisation of an mbarrier, ``strict_scopes`` wide scopes between CTAs; see
    ``Options``.
    """

    instructions: list[Instruction]
    ctas: int = 1
    strict: bool = False
    init_fence: bool = True
    strict_scopes: bool = False
    names: list[str] = field(default_factory=list)
    generic: np.ndarray = field(default_factory=lambda: np.ones(64, bool))
    """By agent: whether it accesses memory through the generic proxy."""
    remote: np.ndarray = field(default_factory=lambda: np.zeros(64, bool))
    """By agent: whether it stands for the writes of a warp to shared memory of other CTAs."""
    ranks: np.ndarray = field(default_factory=lambda: np.zeros(64, np.int64))
    """By agent: its CTA in the cluster."""
    copies: set[int] = field(default_factory=set)
    """Agents of cp.async copies."""

    def add(self, name: str, generic: bool, rank: int, remote: bool = False) -> int:
        """A new agent's number."""
        number = len(self.names)
        if number == AGENTS or len(self.instructions) > SITE_MASK:
            raise UnsupportedError(f"more than {AGENTS} operations at once, or {SITE_MASK} instructions")
        self.names.append(name)
        if number >= self.capacity:
            self.generic, self.remote, self.ranks = (
                np.concatenate((known, np.zeros_like(known))) for known in (self.generic, self.remote, self.ranks)
            )
        self.generic[number], self.remote[number], self.ranks[number] = generic, remote, rank
        return number

    @property
    def scoped(self) -> np.ndarray:
        """By agent: whether another CTA learns of its accesses by the cluster's scope alone."""
        return self.remote | self.strict_scopes

    @property
    def capacity(self) -> int:
        """Length of the clocks' views: at least the number of agents."""
        return len(self.generic)

    def describe(self, epoch: int) -> str:
        """Who made the access, and by which instruction."""
        instruction = self.instructions[epoch >> AGENT_BITS & SITE_MASK]
        return f"{self.names[epoch & AGENT_MASK]}, line {instruction.line}: {instruction.text}"


class Clock:
    """Limits by view and agent; see the module."""

    def __init__(self, agents: Agents, limits: np.ndarray | None = None) -> None:
        self.agents = agents
        self._limits = np.full((VIEWS, agents.capacity), NOTHING, np.int64) if limits is None else limits
        self.time = 0.0
        """Cycle at which all of this is known, if time is modelled (``timing``)."""

    @property
    def limits(self) -> np.ndarray:
        """i64 [VIEWS, capacity], to be changed in place."""
        lacking = self.agents.capacity - self._limits.shape[1]
        if lacking:
            self._limits = np.pad(self._limits, ((0, 0), (0, lacking)), constant_values=NOTHING)
        return self._limits

    @classmethod
    def common(cls, clocks: Sequence[Clock]) -> Clock:
        """What all of them know, and of mbarriers' initialisation (and so of who has begun) what any of them knows."""
        found = clocks[0].copy()
        for clock in clocks[1:]:
            limits, other = found.limits, clock.limits
            begun = np.maximum(limits[INIT], other[INIT])
            np.minimum(limits, other, out=limits)
            limits[INIT] = begun
            found.time = max(found.time, clock.time)
        return found

    def join(self, other: Clock) -> None:
        """Learn what synchronisation carries."""
        limits = self.limits
        np.maximum(limits[CARRIED], other.limits[CARRIED], out=limits[CARRIED])
        self.time = max(self.time, other.time)

    def follow(self, other: Clock) -> None:
        """Learn all that the agent of ``other`` knows, as what it issues does."""
        limits = self.limits
        np.maximum(limits, other.limits, out=limits)
        self.time = max(self.time, other.time)

    def join_relaxed(self, other: Clock) -> None:
        """Learn what relaxed synchronisation carries."""
        limits = self.limits
        limits[RELAXED] = np.maximum(limits[RELAXED], other.limits[RELAXED])
        self.time = max(self.time, other.time)

    def copy(self) -> Clock:
        copied = Clock(self.agents, self.limits.copy())
        copied.time = self.time
        return copied

    def cut(self, most: np.ndarray) -> Clock:
        """A copy that covers no more accesses than ``most`` does, limits by agent."""
        cut = self.copy()
        limits = cut.limits
        limits[ACCESSES] = np.minimum(limits[ACCESSES], most)
        return cut

    def includes(self, other: Clock) -> bool:
        """Whether all that has happened before there has happened before here, writes to other CTAs left out."""
        return bool(((self.limits[ORDER] >= other.limits[ORDER]) | self.agents.remote).all())

    def covers(self, epoch: int, *views: int) -> bool:
        """Whether the access is covered in one of the views."""
        return any(int(self.limits[view, epoch & AGENT_MASK]) >= epoch for view in views)
