"""A cluster while it runs: turns of its warps, engines in between, deadlocks reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sm100.emulator.cluster import Cluster, Triple
from tests.sm100.emulator.errors import HazardError

if TYPE_CHECKING:
    from tests.sm100.emulator.launch import Launch

IDLE_BEFORE_FORCE = 4
"""Rounds without progress after which a pending engine must act (a starved one included)."""
IDLE_BEFORE_STUCK = 100
"""Rounds without progress and without pending engines after which nothing is expected: polling is allowed meanwhile."""
SHORTEST_TURN, LONGEST_TURN = 8, 60
"""Instructions of a shuffled turn: more than a polling loop, so that a turn of polling makes no progress."""
WHOLE_TURN = 10_000
"""Instructions of a turn that is not shuffled."""


class ClusterRun:
    """The cluster whose block indices begin at ``origin``."""

    def __init__(self, launch: Launch, origin: Triple) -> None:
        self.launch = launch
        self.cluster = Cluster(launch, origin)
        self.warps = [warp for cta in self.cluster.ctas for warp in cta.warps]
        self.idle = 0
        """Rounds without progress so far."""
        self.done = False

    @property
    def stuck(self) -> bool:
        """Whether it waits for something that does not come from within."""
        return self.idle > IDLE_BEFORE_STUCK

    @property
    def triggered(self) -> bool:
        """Whether each CTA has allowed dependent launches, or exited."""
        return all(cta.triggered or all(warp.done for warp in cta.warps) for cta in self.cluster.ctas)

    def advance(self) -> bool:
        """A turn of each warp; whether anything went on."""
        launch, engines = self.launch, self.cluster.engines
        shuffled = launch.options.mode != "immediate"
        before = launch.events, engines.performed
        live = [warp for warp in self.warps if not warp.done]
        if shuffled:
            launch.random.shuffle(live)
        for warp in live:
            launch.turn(warp, launch.random.randint(SHORTEST_TURN, LONGEST_TURN) if shuffled else WHOLE_TURN)
            if shuffled:
                engines.pump()
        if all(warp.done for warp in self.warps):
            self._finish()
            return True
        if (launch.events, engines.performed) != before:
            self.idle = 0
            return True
        self.idle += 1
        if self.idle > IDLE_BEFORE_FORCE and engines.force():
            self.idle = 0
            return True
        return False

    def _finish(self) -> None:
        engines = self.cluster.engines
        if any(engine == "tma_load" for engine, _ in engines.queues):
            raise HazardError(f"{self.cluster.ctas[0]} and its cluster ended with loads into shared memory under way")
        engines.drain()
        for cta in self.cluster.ctas:
            cta.check_finished()
        timing = self.cluster.timing
        if timing is not None:
            ends = [(timing.warp(warp.cta.rank, warp.index), warp.actor.clock) for warp in self.warps]
            self.launch.statistics.timelines.append(timing.timeline(ends))
        self.done = True

    def report(self) -> str:
        """Who waits for what."""
        lines = []
        for warp in self.warps:
            for counter, reason in warp.waits.items():
                instruction = self.launch.kernel.instructions[counter]
                lines.append(
                    f"  {warp.cta}, warp {warp.index}: {reason}\n    line {instruction.line}: {instruction.text}"
                )
            if not warp.waits and not warp.done:
                lines.append(f"  {warp.cta}, warp {warp.index}: at {warp.groups()}, polling")
        for (rank, offset), barrier in sorted(self.cluster.memory_barriers.items()):
            lines.append(f"  mbarrier at offset {offset} of rank {rank}: {barrier}")
        return "\n".join(lines)
