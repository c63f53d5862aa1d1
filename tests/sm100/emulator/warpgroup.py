"""A warpgroup: four warps of a CTA that execute wgmma together.

All four must execute the same wgmma instructions in the same order, with the same operands. A multiplication begins
once the last of them has issued it, and is one operation of all: it knows what all four knew, so what one warp wrote
to shared memory takes a barrier; and a warp that has waited for it knows that the others' share is done, too.
The multiplications of a warpgroup take effect in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.sm100.emulator.actors import Actor
from tests.sm100.emulator.errors import HazardError
from tests.sm100.emulator.ordering_clock import NOTHING, ORDER, TICK, Clock

if TYPE_CHECKING:
    from tests.sm100.emulator.cluster import Cta
    from tests.sm100.emulator.warp import Warp

WARPS = 4


@dataclass
class Multiplication:
    """A wgmma.mma_async of a warpgroup, as one or more of its warps have issued it."""

    line: int
    registers: tuple[np.ndarray, np.ndarray] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    """The accumulators' numbers and those of A's registers, the same in each warp."""
    knowledge: list[Clock] = field(default_factory=list)
    """What each warp knew that has issued it."""
    known: Clock | None = None
    """What its end tells, once all have issued it."""
    done: bool = False

    def __str__(self) -> str:
        lacking = WARPS - len(self.knowledge)
        return f"wgmma of line {self.line} " + (f"to be issued by {lacking} more warps" if lacking else "to be done")


@dataclass
class _Step:
    """What the warps of the group must execute next, as the first of them did."""

    site: int
    values: Hashable
    multiplication: Multiplication


class Warpgroup:
    """Warps ``4 * number`` to ``4 * number + 3`` of a CTA."""

    def __init__(self, cta: Cta, number: int) -> None:
        self.cta, self.number = cta, number
        self.warps = cta.warps[WARPS * number : WARPS * (number + 1)]
        self.agent = cta.cluster.agents.add(f"wgmma of {self}", generic=False, rank=cta.rank)
        self._operations = 0
        self._steps: deque[_Step] = deque()
        self._left = 0
        """Steps that all warps have taken, and which are forgotten."""
        self._taken = [0] * len(self.warps)

    def follow(self, warp: Warp, values: Hashable = None) -> Multiplication:
        """The warp executes the instruction at its site, with these operands.

        Raises:
            HazardError: another warp of the group executed another instruction, or the same with other operands.
        """
        place, site = warp.index % WARPS, warp.actor.site
        index = self._taken[place] - self._left
        self._taken[place] += 1
        instructions = self.cta.launch.kernel.instructions
        if index == len(self._steps):
            self._steps.append(_Step(site, values, Multiplication(instructions[site].line)))
        step = self._steps[index]
        if step.site != site:
            there, here = instructions[step.site], instructions[site]
            raise HazardError(
                f"warps of {self} execute different instructions: line {there.line}: {there.text}, "
                f"and by warp {warp.index} line {here.line}: {here.text}"
            )
        if step.values != values:
            raise HazardError(f"warps of {self} give different operands: {step.values}, warp {warp.index} {values}")
        while self._steps and min(self._taken) > self._left:
            self._steps.popleft()
            self._left += 1
        return step.multiplication

    def join(self, warp: Warp, values: Hashable, multiply: Callable[[Actor], None]) -> Multiplication:
        """The warp issues a multiplication, which begins with the last of them: ``multiply`` executes it."""
        if len(self.warps) < WARPS or not all(one.exists.all() for one in self.warps):
            raise HazardError(f"wgmma by {self}, which has not four whole warps")
        joined = self.follow(warp, values)
        joined.knowledge.append(warp.actor.join_operation())
        if len(joined.knowledge) == WARPS:
            self._begin(joined, warp.actor.site, multiply)
        return joined

    def _begin(self, joined: Multiplication, site: int, multiply: Callable[[Actor], None]) -> None:
        self._operations += 1
        clock = joined.known = Clock.common(joined.knowledge)
        clock.limits[ORDER, self.agent] = NOTHING + self._operations * TICK
        actor = Actor(self.cta.cluster.agents, self.agent, clock.copy(), site)

        def run() -> None:
            multiply(actor)
            joined.done = True

        self.cta.cluster.engines.issue("warpgroup", (id(self.cta), self.number), [run])

    def check_finished(self) -> None:
        """Raise if the warps have executed different numbers of instructions of the group."""
        if len(set(self._taken)) > 1:
            raise HazardError(f"warps of {self} ended after {self._taken} instructions that all must execute")

    def __str__(self) -> str:
        return f"{self.cta}, warpgroup {self.number}"


class MultiplicationGroups:
    """A warp's wgmma-groups: the open one and the committed ones, oldest first."""

    def __init__(self) -> None:
        self.open: list[Multiplication] = []
        self.committed: list[list[Multiplication]] = []

    @property
    def pending(self) -> int:
        """Multiplications not yet waited for."""
        return len(self.open) + sum(map(len, self.committed))

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def all_but(self, keep: int) -> list[Multiplication]:
        """Instructions of all committed groups but the last ``keep``."""
        return [one for group in self.committed[: max(0, len(self.committed) - keep)] for one in group]

    def forget_all_but(self, keep: int) -> None:
        del self.committed[: max(0, len(self.committed) - keep)]
