"""Vector clocks: which accesses are known to have happened before a point of the program.

An *agent* is a warp or one asynchronous operation. Each has a time of its own, which advances whenever it hands its
knowledge to another agent. An access is stamped with an *epoch* (time, instruction, agent), one integer. A clock
holds for each agent the *limit* up to which its epochs are covered; several views differ in what covering means:

* ORDER: happened before (base causality order of the PTX memory model);
* PROXY: happened before, and a proxy fence on the way has made writes of the generic proxy visible to the
  asynchronous one;
* INIT: an mbarrier initialised before a ``fence.mbarrier_init`` that happened before;
* FENCED: tcgen05 operations before a ``tcgen05.fence::before_thread_sync`` (or a commit) that happened before;
* TENSOR: of those, what a ``tcgen05.fence::after_thread_sync`` has ordered before tcgen05 operations from now on.

Relaxed synchronisation carries INIT and FENCED only, whose fences are made for it. Clocks are joined by maximum, so
what a barrier carries is the union of what its participants knew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.emulator.ptx import Instruction

AGENT_BITS, SITE_BITS = 12, 19
AGENTS = 1 << AGENT_BITS
AGENT_MASK = AGENTS - 1
SITE_MASK = (1 << SITE_BITS) - 1
STRONG = 1 << AGENT_BITS + SITE_BITS
"""Set in the epoch of an access that may race with others of its kind: atomics, relaxed, release, acquire."""
TICK = STRONG << 1
"""One unit of time in an epoch or a limit."""
NOTHING = TICK - 1
"""The limit that covers no access: times begin at 1, and 0 as an epoch stands for no access."""

ORDER, PROXY, INIT, FENCED, TENSOR = range(5)
VIEWS = 5
RELAXED = [INIT, FENCED]
"""Views that relaxed synchronisation carries."""


@dataclass
class Agents:
    """The agents of a cluster, by number. Their instructions name the sites of accesses.

    ``strict`` demands fences and waits that tcgen05 can do without, ``init_fence`` one after the initialisation of an
    mbarrier; see ``Options``.
    """

    instructions: list[Instruction]
    strict: bool = False
    init_fence: bool = True
    names: list[str] = field(default_factory=list)
    generic: np.ndarray = field(default_factory=lambda: np.ones(64, bool))
    """By agent: whether it accesses memory through the generic proxy."""
    copies: set[int] = field(default_factory=set)
    """Agents of cp.async copies."""

    def add(self, name: str, generic: bool) -> int:
        """A new agent's number."""
        number = len(self.names)
        if number == AGENTS or len(self.instructions) > SITE_MASK:
            raise UnsupportedError(f"more than {AGENTS} operations at once, or {SITE_MASK} instructions")
        self.names.append(name)
        if number >= self.capacity:
            self.generic = np.concatenate((self.generic, np.ones(self.capacity, bool)))
        self.generic[number] = generic
        return number

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

    def join(self, other: Clock) -> None:
        """Learn what synchronisation carries: all but TENSOR, which each agent's own fences make."""
        limits = self.limits
        np.maximum(limits[:TENSOR], other.limits[:TENSOR], out=limits[:TENSOR])
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

    def includes(self, other: Clock) -> bool:
        """Whether all that has happened before there has happened before here."""
        return bool((self.limits[ORDER] >= other.limits[ORDER]).all())

    def covers(self, epoch: int, *views: int) -> bool:
        """Whether the access is covered in one of the views."""
        return any(int(self.limits[view, epoch & AGENT_MASK]) >= epoch for view in views)


@dataclass
class Handover:
    """The clocks of a barrier: what arrived for the open phase, and what completed phases hand to those who wait."""

    arriving: Clock
    released: Clock

    @classmethod
    def create(cls, agents: Agents) -> Handover:
        return cls(Clock(agents), Clock(agents))

    def complete(self) -> None:
        """The phase is over."""
        self.released = self.arriving.copy()
