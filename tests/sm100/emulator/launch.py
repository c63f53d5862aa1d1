"""A kernel launch: its clusters, and the turns of their warps."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

import tests.sm100.emulator.instructions  # noqa: F401  registers the instruction families
from tests.sm100.emulator.cluster import Triple
from tests.sm100.emulator.cluster_run import ClusterRun
from tests.sm100.emulator.decoder import Execute, decode
from tests.sm100.emulator.engines import Options
from tests.sm100.emulator.errors import DeadlockError, EmulatorError, HazardError, UnsupportedError
from tests.sm100.emulator.global_order import GlobalOrder
from tests.sm100.emulator.global_scopes import GlobalScopes
from tests.sm100.emulator.local_memory import local_layout
from tests.sm100.emulator.memory import SHARED_BASE, GlobalMemory, ParameterMemory, Range
from tests.sm100.emulator.ptx import Instruction, Kernel, Register
from tests.sm100.emulator.register_watch import watched
from tests.sm100.emulator.scalar_types import LANES
from tests.sm100.emulator.statistics import Statistics
from tests.sm100.emulator.tensor_map_order import TensorMapOrder
from tests.sm100.emulator.timing_issue import timed
from tests.sm100.emulator.warp import EXITED, Blocked, BulkGroup, Mask, Warp

FLOW = (("bra",), ("bra", "uni"), ("brx", "idx"), ("brx", "idx", "uni"), ("ret",), ("exit",))
"""What moves lanes, rather than being executed."""


def _shared_layout(kernel: Kernel, dynamic_bytes: int) -> tuple[dict[str, int], int]:
    """Offset from the CTA's shared start of each symbol, and the bytes in all; dynamic memory comes last."""
    offsets, end = {}, 0
    for name, (align, size) in sorted(kernel.shared.items(), key=lambda item: item[1][1] == 0):
        end = -(-(SHARED_BASE + end) // align) * align - SHARED_BASE
        offsets[name] = end
        end += size
    return offsets, end + dynamic_bytes


def _program(kernel: Kernel, shared: dict[str, int]) -> list[Execute | None]:
    """A closure for each instruction, None for those that only move lanes; the same for each launch."""
    key = tuple(shared.items())
    if key not in kernel.decoded:
        program = [None if i.opcode in FLOW else decode(kernel, i, shared) for i in kernel.instructions]
        kernel.decoded[key] = watched(kernel, program)
    return kernel.decoded[key]


def _table_range(table: tuple[str, np.ndarray]) -> Range:
    name, contents = table
    return Range(contents.ctypes.data, contents.ctypes.data + contents.nbytes, False, name)


class Launch:
    """One kernel launch.

    Args:
        kernel: parsed PTX.
        grid, block, cluster: shapes, x first; the grid must be a multiple of the cluster.
        dynamic_shared: bytes of dynamic shared memory.
        parameters: the value of each parameter, in order.
        memory: what global memory the kernel may touch.
        options: engines' mode and limits.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: Triple,
        block: Triple,
        cluster: Triple,
        dynamic_shared: int,
        parameters: list[bytes],
        memory: GlobalMemory,
        options: Options,
    ) -> None:
        if any(extent % size for extent, size in zip(grid, cluster, strict=True)):
            raise UnsupportedError(f"grid {grid} is no multiple of the cluster {cluster}")
        if kernel.required_threads not in (None, block):
            raise HazardError(f"block {block}: the kernel requires {kernel.required_threads}")
        self.kernel, self.grid, self.block, self.cluster = kernel, grid, block, cluster
        self.memory, self.options = memory, options
        memory.ranges = [*memory.ranges, *map(_table_range, kernel.tables.items())]
        block_bytes = bytearray(kernel.parameter_bytes)
        for parameter, value in zip(kernel.parameters, parameters, strict=True):
            block_bytes[parameter.offset : parameter.offset + parameter.size] = value
        self.parameters = ParameterMemory(bytes(block_bytes))
        self.random = random.Random(options.seed)
        self.runs: list[ClusterRun] = []
        """Clusters that have begun."""
        self.pending: deque[Triple] = deque(self._origins)
        """First block indices of clusters that have not begun."""
        self.before: Launch | None = None
        """The launch that griddepcontrol.wait waits for."""
        self.map_order = TensorMapOrder()
        self.has_tensor_maps = any("tensor" in "".join(i.opcode) for i in kernel.instructions)
        """Whether stores to global memory may matter to copies that use tensor maps."""
        self.scopes = GlobalScopes()
        self.global_order = GlobalOrder() if len(self.pending) > 1 else None
        """Order of stores to global memory; None for one cluster, which orders its own."""
        self.statistics = Statistics()
        self.events = 0
        """Things that may let a waiting warp go on: progress, for the deadlock check."""
        self.executed = 0
        shared, self.shared_bytes = _shared_layout(kernel, dynamic_shared)
        self.program = _program(kernel, shared)
        if options.timing is not None:
            self.program = timed(kernel, self.program, shared, options.timing)
        self.guards = [i.guard for i in kernel.instructions]
        self.local_end = local_layout(kernel.local)[1]
        self.counts: dict[int, list[int]] = {}
        """By a warp's place in its CTA: how often each instruction was executed."""

    @property
    def _origins(self) -> Iterator[Triple]:
        """Where each cluster's block indices begin."""
        extents = [range(0, self.grid[axis], self.cluster[axis]) for axis in (2, 1, 0)]
        if self.options.backwards:
            extents = [extent[::-1] for extent in extents]
        for z, y, x in itertools.product(*extents):
            yield x, y, z

    def run(self) -> Statistics:
        """Run to the end, cluster after cluster; beside one that polls the next ones run, too.

        Raises:
            EmulatorError: with CTA, warp, lanes and the instruction's text.
        """
        with np.errstate(all="ignore"):
            while self.pending or self.runs:
                room = len(self.runs) < self.options.resident and any(run.cluster.polled for run in self.runs)
                if self.pending and (room or not self.runs):
                    for run in self.runs:
                        run.cluster.polled = False
                    self.runs.append(ClusterRun(self, self.pending.popleft()))
                for run in self.runs:
                    run.advance()
                if any(run.done for run in self.runs):
                    self.retry()  # what the others poll for may be the last thing that it did
                self.runs = [run for run in self.runs if not run.done]
                if self.runs and self.stuck and not (self.pending and room):
                    raise DeadlockError(self.report())
        self._count()
        return self.statistics

    def cancel(self) -> Triple | None:
        """Take the next cluster that has not begun from the launch: where its block indices begin, if there is one."""
        return self.pending.popleft() if self.pending else None

    def begin(self, on_waited: Callable[[Launch, Launch], None]) -> None:
        """Make all clusters ready for ``advance``; ``on_waited`` is told what this launch has waited for."""
        self.runs = [ClusterRun(self, origin) for origin in self.pending]
        self.pending.clear()
        self._on_waited = on_waited

    def advance(self) -> bool:
        """A turn of each warp of each cluster; whether anything went on."""
        with np.errstate(all="ignore"):
            went_on = [run.advance() for run in self.runs if not run.done]
        if went_on and self.done:
            self._count()
        return any(went_on)

    @property
    def done(self) -> bool:
        """Whether all clusters have ended, their stores included."""
        return all(run.done for run in self.runs)

    @property
    def triggered(self) -> bool:
        """Whether a dependent launch may begin."""
        return all(run.done or run.triggered for run in self.runs)

    @property
    def triggered_after_wait(self) -> bool:
        """Whether a dependent launch begins after the end of the launch before this one: every CTA saw to that."""
        return all(cta.triggered_after_wait for run in self.runs for cta in run.cluster.ctas)

    @property
    def stuck(self) -> bool:
        """Whether it cannot go on by itself."""
        return all(run.done or run.stuck for run in self.runs)

    def retry(self) -> None:
        """What it waited for may have come."""
        for run in self.runs:
            run.idle = 0

    def wait_for_launch_before(self) -> Blocked | None:
        """griddepcontrol.wait"""
        if self.before is None:
            return None
        if not self.before.done:
            return Blocked("the launch before to end")
        self._on_waited(self, self.before)
        return None

    def report(self) -> str:
        """Who waits for what."""
        return "\n".join(["deadlock; who waits for what:", *(run.report() for run in self.runs if not run.done)])

    def _count(self) -> None:
        for index, counts in self.counts.items():
            for instruction, count in zip(self.kernel.instructions, counts, strict=True):
                if count:
                    self.statistics.instructions[index, ".".join(instruction.opcode)] += count

    def turn(self, warp: Warp, budget: int) -> None:
        """Let a warp execute up to ``budget`` instructions, until it waits for something."""
        counts = self.counts.setdefault(warp.index, [0] * len(self.program))
        warp.waits.clear()
        held: np.ndarray | None = None
        while budget > 0 and not warp.done:
            if warp.counters is None:
                if held is not None:
                    return
                counter, mask = warp.counter, None
            else:
                ready = warp.counters != EXITED
                if held is not None:
                    ready &= ~held
                standing = warp.counters[ready].tolist()
                if not standing:
                    return
                counter = min(standing)
                here = ready & (warp.counters == counter)
                mask = None if np.count_nonzero(here) == LANES else here
            budget -= 1
            if not self._step(warp, counter, mask, counts):
                stopped = np.ones(32, bool) if mask is None else mask
                held = stopped if held is None else held | stopped
        if held is None:
            self.events += 1

    def _step(self, warp: Warp, counter: int, mask: Mask, counts: list[int]) -> bool:
        """Execute one instruction for a group of lanes; False if the group is to stop for this turn."""
        lanes = mask
        guarding = self.guards[counter]
        if guarding is not None:
            guard = warp.files["pred"][guarding.index]
            guard = ~guard if self.kernel.instructions[counter].guard_negated else guard
            lanes = guard.copy() if mask is None else guard & mask
            count = np.count_nonzero(lanes)
            if count == LANES:
                lanes = None
            elif not count:
                warp.go(mask, counter + 1)
                return True
        self.executed += 1
        if self.executed > self.options.max_instructions:
            raise DeadlockError(f"{self.options.max_instructions} instructions executed; endless loop?")
        execute = self.program[counter]
        warp.actor.site, warp.actor.executing = counter, lanes
        try:
            if execute is None:
                counts[counter] += 1
                self._flow(warp, counter, mask, lanes)
                return True
            blocked = execute(warp, lanes)
        except EmulatorError as error:
            raise type(error)(f"{error}\n  {self._where(warp, counter, lanes)}") from error
        if isinstance(blocked, Blocked):
            warp.waits[counter] = blocked.reason
            return False
        counts[counter] += 1
        warp.go(mask, counter + 1)
        if warp.spinning is not None:
            warp.waits[counter] = warp.spinning
            warp.spinning = None
            return False
        return True

    def _flow(self, warp: Warp, counter: int, mask: Mask, lanes: Mask) -> None:
        instruction = self.kernel.instructions[counter]
        if instruction.targets:
            if lanes is not None:
                warp.go(mask, counter + 1)
            if instruction.opcode[0] == "bra":
                warp.go(lanes, instruction.targets[0])
            else:
                self._branch_by_index(warp, instruction, lanes)
            return
        self.events += 1
        if lanes is not mask:
            warp.go(mask, counter + 1)
        warp.exit(lanes)
        if warp.done:
            if warp.multiplications.pending:
                raise HazardError(
                    f"exit with {warp.multiplications.pending} wgmma not waited for\n"
                    f"  {self._where(warp, counter, lanes)}"
                )
            if self._leaves_copies(warp):
                raise HazardError(
                    f"exit while copies still read or write shared memory\n  {self._where(warp, counter, lanes)}"
                )

    def _leaves_copies(self, warp: Warp) -> bool:
        """Whether a warp that ends has copies under way, which nobody else may have waited for."""

        def under_way(groups: tuple[BulkGroup, list[BulkGroup]]) -> int:
            return groups[0].unread + sum(group.unread for group in groups[1])

        if any(map(under_way, warp.bulk_groups.values())):
            return True
        left = {lane: under_way(groups) for lane, groups in warp.copy_groups.items()}
        # A lane's copies end in order, so those since it handed its copies to an mbarrier end last.
        return any(count and (self.options.strict_copies or warp.loose_copies[lane]) for lane, count in left.items())

    @staticmethod
    def _branch_by_index(warp: Warp, instruction: Instruction, lanes: Mask) -> None:
        index = instruction.operands[0]
        if not isinstance(index, Register) or index.kind != "32":
            raise UnsupportedError(f"operand {index} as the index of a branch")
        wanted = warp.files["32"][index.index].copy()
        executing = np.ones(len(wanted), bool) if lanes is None else lanes
        for which in np.unique(wanted[executing]).tolist():
            if which >= len(instruction.targets):
                raise HazardError(f"branch number {which} of {len(instruction.targets)}")
            going = executing & (wanted == which)
            warp.go(None if going.all() else going, instruction.targets[which])

    def _where(self, warp: Warp, counter: int, lanes: Mask) -> str:
        which = "all lanes" if lanes is None else f"lanes {np.flatnonzero(lanes).tolist()}"
        instruction = self.kernel.instructions[counter]
        return f"at {warp.cta}, warp {warp.index}, {which}, line {instruction.line}: {instruction.text}"
