"""The timed mode: when things would happen on hardware, by rates and latencies (``TimingModel``).

The method is max-plus: every warp has a time, which its instructions advance (``timing_issue``); every engine is busy
until some time; what synchronises carries the time of its completion, as part of the clocks that it hands on
(``ordering_clock``), and who waits goes on at the later of its own time and that. So times depend on the program
alone, not on the order in which the emulator runs warps and engines, and any mode gives the same ones.

Left out: what warps take from one another when they issue (``Timeline.issue_bound`` tells whether that matters), other
than through shared memory; contention between
clusters, each of which begins at time 0; branches; the end of a store's write to global memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.sm100.emulator.ordering_clock import Clock
from tests.sm100.emulator.timing_model import TimingModel

BarrierPlace = tuple[int, int]
"""Rank of the CTA and offset of an mbarrier."""
SCHEDULERS = 4


@dataclass
class Port:
    """An engine that moves bytes, one request at a time.

    Requests of several warps come in the order in which the emulator runs them: one that is ready early takes the first
    gap that is long enough.
    """

    gaps: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, math.inf)])

    def take(self, ready: float, cycles: float) -> float:
        """Serve a request that is ready at some time; returns when its last byte has moved."""
        for index, (begin, end) in enumerate(self.gaps):
            start = max(begin, ready)
            if start + cycles <= end:
                rest = ((begin, start), (start + cycles, end))
                self.gaps[index : index + 1] = [gap for gap in rest if gap[0] < gap[1]]
                return start + cycles
        raise AssertionError("the last gap never ends")


@dataclass
class TensorPipe:
    """The tensor core of a CTA or a pair: copies and MMAs in order."""

    free: float = 0.0
    multiplying: float = 0.0
    copying: float = 0.0
    first: float | None = None
    last: float = 0.0
    """Start of the first MMA and end of the last."""
    idle: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Cycles between the first MMA and the last without an operation, by what the issuing warp waited for."""


@dataclass
class WarpTiming:
    """What is known of a warp besides its time, which is that of its clock."""

    ready: dict[tuple[str, int], float] = field(default_factory=dict)
    """When the results of loads are in their registers."""
    issued: float = 0.0
    """Cycles in which it kept its scheduler, or a unit behind it, to itself."""
    transferred: float = 0.0
    """When all tcgen05.ld so far are complete."""
    polling: bool = False
    """Between a try_wait that failed and one that succeeds: no time passes."""
    waits: list[tuple[str, float]] = field(default_factory=list)
    """Since the last tensor-core operation that it issued: what was waited for, and until when."""
    drains: list[list[float]] = field(default_factory=list)
    """Begin and end of its work on each accumulator."""
    reads_accumulators: bool = False


@dataclass(frozen=True)
class Timeline:
    """The times of one cluster, in cycles from its start.

    Attributes:
        end: when its last warp ends.
        span: from the first MMA to the end of the last, over all tensor cores of the cluster the longest.
        multiplying, copying: cycles in MMAs and in tcgen05.cp, of the same tensor core.
        idle: the rest of the span by cause: "operands" (a barrier that TMA completes), "accumulators" (any other
            barrier) or "issue".
        drains: cycles of each accumulator's epilogue, from the end of its wait to the next wait; the slowest warp's.
        load_bytes: bytes that TMA brought into all its CTAs.
        stages: begin and end of each group of TMA loads with one barrier phase.
        rings: CTAs that have barriers for such groups.
        issue_bound: cycles that the busiest of a CTA's four schedulers needs for what its warps issue: warps 4 apart
            share one. The cluster cannot end sooner, whatever ``end`` says.
    """

    end: float
    span: float
    multiplying: float
    copying: float
    idle: dict[str, float]
    drains: tuple[float, ...]
    load_bytes: int
    stages: tuple[tuple[float, float], ...]
    rings: int
    issue_bound: float

    @property
    def occupancy(self) -> float:
        """Share of the main loop in which MMAs execute."""
        return self.multiplying / self.span if self.span else 0.0

    @property
    def busy(self) -> float:
        """Share of the main loop in which the tensor core does anything, copies of block scales included."""
        return (self.multiplying + self.copying) / self.span if self.span else 0.0

    @property
    def stages_in_flight(self) -> float:
        """TMA stages of a ring under way, averaged over the time in which any is."""
        covered, until = 0.0, 0.0
        for begin, end in sorted(self.stages):
            covered += max(0.0, end - max(begin, until))
            until = max(until, end)
        return sum(end - begin for begin, end in self.stages) / covered / self.rings if covered else 0.0


@dataclass
class ClusterTiming:
    """The engines of one cluster. Warps are named by (rank, index)."""

    model: TimingModel
    pipes: dict[int, TensorPipe] = field(default_factory=dict)
    loads: dict[int, Port] = field(default_factory=dict)
    stores: dict[int, Port] = field(default_factory=dict)
    warps: dict[tuple[int, int], WarpTiming] = field(default_factory=dict)
    load_bytes: int = 0
    _loaded: set[BarrierPlace] = field(default_factory=set)
    _committed: set[BarrierPlace] = field(default_factory=set)
    _stages: dict[tuple[BarrierPlace, int], list[float]] = field(default_factory=dict)

    def warp(self, rank: int, index: int) -> WarpTiming:
        return self.warps.setdefault((rank, index), WarpTiming())

    def load(
        self, rank: int, issued: float, nbytes: int, copies: int, barriers: Iterable[tuple[BarrierPlace, int]]
    ) -> float:
        """A TMA load of ``nbytes`` to ``copies`` CTAs; returns when it is complete.

        The issuing CTA's port stands for the others', too: in a cluster whose CTAs share operands, each loads its part
        for all, so what a CTA sends equals what it receives.

        Args:
            barriers: those that it reports to, with their current phases.
        """
        self.load_bytes += nbytes * copies
        model = self.model
        cycles = max(nbytes / model.load_bytes_per_cycle, nbytes * copies / model.receive_bytes_per_cycle)
        end = self.loads.setdefault(rank, Port()).take(issued, cycles) + model.load_latency
        for barrier, phase in barriers:
            self._loaded.add(barrier)
            stage = self._stages.setdefault((barrier, phase), [issued, end])
            stage[:] = min(stage[0], issued), max(stage[1], end)
        return end

    def store(self, rank: int, issued: float, nbytes: int) -> float:
        """A TMA store; returns when its source has been read."""
        return self.stores.setdefault(rank, Port()).take(issued, nbytes / self.model.store_bytes_per_cycle)

    def copy(self, leader: int, issuer: WarpTiming, issued: float, nbytes: int) -> None:
        """A tcgen05.cp that reads ``nbytes`` in each CTA."""
        cycles = nbytes / self.model.shared_bytes_per_cycle
        pipe = self._start(leader, issuer, issued)
        pipe.copying += cycles if pipe.first is not None else 0.0
        pipe.free += cycles

    def multiply(self, leader: int, issuer: WarpTiming, issued: float, m: int, n: int, ctas: int, depth: int) -> None:
        """An MMA: as long as its products take, or its operands out of shared memory (32 bytes of each row).

        ``depth`` is K: 64 of FP4, 32 of the kinds for 8 bits or less, 16 of half precision.
        """
        model = self.model
        rates = {64: model.fp4_per_cycle, 32: model.fp8_per_cycle, 16: model.half_per_cycle}
        products = m * n * depth / ctas / rates[depth]
        operands = (m + n) / ctas * 32 / model.shared_bytes_per_cycle
        cycles = max(products, operands)
        pipe = self._start(leader, issuer, issued)
        if pipe.first is None:
            pipe.first = pipe.free
            pipe.idle.clear()
        pipe.multiplying += cycles
        pipe.free += cycles
        pipe.last = pipe.free

    def _start(self, leader: int, issuer: WarpTiming, issued: float) -> TensorPipe:
        """Bring the pipe to the start of an operation; idle time goes to what the issuer waited for."""
        pipe = self.pipes.setdefault(leader, TensorPipe())
        if issued > pipe.free:
            reached = pipe.free
            for cause, until in issuer.waits:
                pipe.idle[cause] += max(0.0, until - reached)
                reached = max(reached, until)
            pipe.idle["issue"] += issued - reached
            pipe.free = issued
        issuer.waits.clear()
        return pipe

    def commit(self, leader: int, issued: float, barriers: Iterable[BarrierPlace]) -> float:
        """A tcgen05.commit; returns when it arrives."""
        self._committed.update(barriers)
        return max(issued, self.pipes.setdefault(leader, TensorPipe()).free) + self.model.tensor_latency

    def waited(self, warp: WarpTiming, barrier: BarrierPlace, begin: float, end: float) -> None:
        """A warp's wait on an mbarrier."""
        if end > begin:
            warp.waits.append(("operands" if barrier in self._loaded else "accumulators", end))
        if barrier in self._committed:
            if warp.drains:
                warp.drains[-1][1] = begin
            warp.drains.append([end, end])

    def timeline(self, ends: Sequence[tuple[WarpTiming, Clock]]) -> Timeline:
        """The summary, from the final clock of each warp."""
        for warp, clock in ends:
            if warp.drains:
                warp.drains[-1][1] = clock.time
        drains = [[end - begin for begin, end in warp.drains] for warp, _ in ends if warp.reads_accumulators]
        issued: defaultdict[tuple[int, int], float] = defaultdict(float)
        for (rank, index), warp in self.warps.items():
            issued[rank, index % SCHEDULERS] += warp.issued
        pipe = max(self.pipes.values(), key=lambda pipe: pipe.last - (pipe.first or 0.0), default=TensorPipe())
        return Timeline(
            end=max((clock.time for _, clock in ends), default=0.0),
            span=pipe.last - (pipe.first or 0.0),
            multiplying=pipe.multiplying,
            copying=pipe.copying,
            idle=dict(pipe.idle),
            drains=tuple(max(cycles) for cycles in zip(*drains, strict=False)),
            load_bytes=self.load_bytes,
            stages=tuple((begin, end) for begin, end in self._stages.values()),
            rings=len({rank for (rank, _), _ in self._stages}),
            issue_bound=max(issued.values(), default=0.0),
        )
