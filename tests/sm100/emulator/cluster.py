"""A cluster of CTAs that run together, each with its shared memory, tensor memory, barriers and warps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.sm100.emulator.actors import Actor
from tests.sm100.emulator.barriers import ClusterBarrier, MemoryBarrier, NamedBarriers
from tests.sm100.emulator.engines import Engines
from tests.sm100.emulator.errors import HazardError, MemoryFaultError
from tests.sm100.emulator.handover import Mailbox
from tests.sm100.emulator.memory import OFFSET_MASK, RANK_SHIFT, SHARED_BASE, SharedMemory
from tests.sm100.emulator.ordering_clock import ORDER, Agents, Clock
from tests.sm100.emulator.scalar_types import LANES
from tests.sm100.emulator.tensor_memory import TensorMemory
from tests.sm100.emulator.timing import ClusterTiming
from tests.sm100.emulator.warp import Warp
from tests.sm100.emulator.warpgroup import WARPS, Warpgroup

if TYPE_CHECKING:
    from tests.sm100.emulator.launch import Launch

Triple = tuple[int, int, int]
BARRIER_BYTES = 8


class Cta:
    """A thread block. ``rank`` is its number in the cluster, x fastest."""

    def __init__(self, cluster: Cluster, rank: int, index: Triple) -> None:
        self.cluster = cluster
        self.launch = cluster.launch
        self.rank = rank
        self.index = index
        self.threads = self.launch.block[0] * self.launch.block[1] * self.launch.block[2]
        options = self.launch.options
        self.shared = SharedMemory(
            self.launch.shared_bytes,
            str(self),
            rank,
            equal_writes=options.equal_writes,
            strict_reads=options.strict_reads,
        )
        self.shared_start = rank << RANK_SHIFT | SHARED_BASE
        self.tensor_memory = TensorMemory(str(self))
        self.named_barriers = NamedBarriers()
        self.triggered = False
        """Whether it has executed griddepcontrol.launch_dependents."""
        self.triggered_after_wait = False
        """Whether the warp that executed it first had executed griddepcontrol.wait."""
        self.refused = False
        """Whether it has seen that a request for another cluster's work failed."""
        self.special: dict[str, int] = self._special()
        count = -(-self.threads // LANES)
        self.warps = [Warp(self, number, self.launch.kernel.registers) for number in range(count)]
        self.register_counts: dict[int, int] = {}
        """What each warp's last setmaxnreg said."""
        self.warpgroups: dict[int, Warpgroup] = {}
        self.shared.hosts = np.array([warp.actor.number for warp in self.warps])

    def _special(self) -> dict[str, int]:
        size = self.cluster.size
        grid = self.launch.grid
        values = {"%cluster_ctarank": self.rank, "%cluster_nctarank": size[0] * size[1] * size[2]}
        for axis, letter in enumerate("xyz"):
            values |= {
                f"%ctaid.{letter}": self.index[axis],
                f"%nctaid.{letter}": grid[axis],
                f"%ntid.{letter}": self.launch.block[axis],
                f"%cluster_ctaid.{letter}": self.index[axis] % size[axis],
                f"%cluster_nctaid.{letter}": size[axis],
                f"%clusterid.{letter}": self.index[axis] // size[axis],
                f"%nclusterid.{letter}": grid[axis] // size[axis],
            }
        return values

    def shared_address(self, offset: int) -> int:
        """The shared::cluster address of an offset in this CTA."""
        return self.rank << RANK_SHIFT | offset

    def warpgroup(self, warp: int) -> Warpgroup:
        """The warpgroup of a warp, by its index."""
        number = warp // WARPS
        if number not in self.warpgroups:
            self.warpgroups[number] = Warpgroup(self, number)
        return self.warpgroups[number]

    def check_finished(self) -> None:
        """The CTA has ended, and with it its memory.

        Raises:
            HazardError: tensor memory is still allocated, warps of a warpgroup have not executed the same, or the CTA's
                warps ended without knowing that an access to its shared memory had happened, or
                (``Options.strict_exit``) an arrival on one of its mbarriers.
        """
        self.tensor_memory.check_released(str(self))
        for group in self.warpgroups.values():
            group.check_finished()
        agents = self.cluster.agents
        number = agents.add(f"the end of {self}", True, self.rank)
        end = Actor(agents, number, Clock(agents), len(agents.instructions) - 1)
        for warp in self.warps:
            end.clock.follow(warp.actor.clock)
        self.shared.history.retire(slice(SHARED_BASE, self.shared.end), end)
        if not self.launch.options.strict_exit:
            return
        for (rank, offset), barrier in self.cluster.memory_barriers.items():
            for known in barrier.handover.arriving.open_to(rank) if rank == self.rank else ():
                if not end.clock.includes(known):
                    who = agents.names[int(np.argmax((known.limits[ORDER] > end.ordered()) & ~agents.remote))]
                    raise HazardError(
                        f"{self} ended without waiting for an arrival of {who} on its mbarrier at {offset}"
                    )

    def __str__(self) -> str:
        return f"CTA {self.index}" + (f" (rank {self.rank})" if self.cluster.size != (1, 1, 1) else "")


class Cluster:
    """CTAs whose block indices begin at ``origin``; also holds their mbarriers by (rank, offset)."""

    def __init__(self, launch: Launch, origin: Triple) -> None:
        self.launch = launch
        self.size = launch.cluster
        self.engines = Engines(launch.options, launch.random)
        width, height, depth = self.size
        count, options = width * height * depth, launch.options
        self.agents = Agents(
            launch.kernel.instructions, count, options.strict_tensor_waits, options.init_fence, options.strict_scopes
        )
        self.ctas: list[Cta] = []
        for rank in range(count):
            x, y, z = rank % width, rank // width % height, rank // (width * height)
            self.ctas.append(Cta(self, rank, (origin[0] + x, origin[1] + y, origin[2] + z)))
        self.memory_barriers: dict[tuple[int, int], MemoryBarrier] = {}
        self.barrier = ClusterBarrier(sum(len(cta.warps) for cta in self.ctas))
        self.flags: dict[int, Mailbox] = {}
        """What strong operations on a word tell those that acquire from it."""
        self.polled = False
        """Whether it looked at global memory, and may go on looking until another cluster has changed it."""
        model = launch.options.timing
        self.timing = None if model is None else ClusterTiming(model)

    def locate(self, address: int) -> tuple[Cta, int]:
        """The CTA and the offset of a shared-memory address."""
        rank, offset = address >> RANK_SHIFT, address & OFFSET_MASK
        if rank >= len(self.ctas):
            raise MemoryFaultError(f"shared address {address:#x}: rank {rank} of {len(self.ctas)} CTAs")
        return self.ctas[rank], offset

    def memory_barrier(self, address: int, user: Actor, asynchronous: bool = False) -> MemoryBarrier:
        """The mbarrier at a shared address, for an actor or (``asynchronous``) for an operation that it issues.

        Raises:
            HazardError: there is none, or its initialisation is not ordered before or visible to that use.
        """
        cta, offset = self.locate(address)
        barrier = self.memory_barriers.get((cta.rank, offset))
        if barrier is None:
            raise HazardError(f"no mbarrier was initialised at shared offset {offset} of {cta}")
        if not user.knows_barrier(barrier.created, asynchronous):
            need = "fence.mbarrier_init or fence.proxy.async, and " if asynchronous or user.asynchronous else ""
            raise HazardError(
                f"mbarrier at shared offset {offset} of {cta} used before its initialisation is known: "
                f"that takes {need}synchronisation\n  initialised by {self.agents.describe(barrier.created)}"
            )
        return barrier
