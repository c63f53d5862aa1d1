"""Stream-K: the tiles that fill no wave are done first, each by several clusters, and whole tiles after them.

P clusters that take T tiles in turn leave T mod P of them, the rest, for a last wave in which most clusters have
nothing to do. Here the rest comes first: several clusters take a slice of a tile's K each (:class:`SharedSlice`), and
add up their sums through global memory while their tensor cores are at the first whole tile (:class:`PartialSums`).

No wait goes on for ever if every cluster gets to run: a warp waits only for warps of the same launch, these signal
after nothing but their own slice's main loop, and it has signalled itself by then. Every cluster does get to run: there
are no more than the GPU runs at a time, and a launch after this one, which may begin early, does so once each cluster
of this one has its place. But two launches side by side, of different streams, could keep places from each other, and
would write the same workspace: all launches of a workspace must be of one stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..common.fixed import Fixed
from ..common.fragment import EpilogueWarp
from ..common.gemm import Work
from ..common.schedule import BatchedSchedule
from ..common.shape import TEAM_WARPS, WARP_LANES
from ..common.split import VECTOR
from .fragment import make_fragment, read_fragment
from .shape import ADDED_SLICES, COUNTER_WORDS, KernelShape


@dataclass(frozen=True)
class SharedSlice(Work):
    """The work of a cluster: a number below 0 is its slice of a shared tile, others are whole tiles.

    Attributes:
        first: the number of what comes first. A slice's is a ``step`` before the first whole tile's.
        k_begin, k_end: the slice, in stages.
        stages: of a whole tile.
        whole: whole tiles of all clusters; the shared ones follow.
        rest: shared tiles. place: which of them this cluster's is.
        sharers: clusters that share a tile. index: which slice this cluster's is.
    """

    stages: Any
    whole: Any
    rest: Any
    place: Any
    sharers: Any
    index: Any

    @classmethod
    def of(cls, work: Work, tiles: Any) -> SharedSlice:
        """Make the slice of the cluster that would otherwise do ``work``; ``tiles`` is the launch's number of tiles."""
        cluster, clusters, stages = work.first, work.step, work.k_end
        rest = tiles % clusters
        divisor = cutlass.max(rest, Int32(1))
        longest = cute.ceil_div(stages, clusters // divisor)
        sharers = cute.ceil_div(stages, longest)
        # Neighbours have neighbouring tiles and the same slice of K: they read the same tokens.
        index = cluster // divisor
        begin, end = index * stages // sharers, (index + 1) * stages // sharers
        first = cutlass.select_(cluster < rest * sharers, cluster - clusters, cluster)
        return cls(
            first, clusters, begin, end, stages, tiles - rest, rest, cluster % divisor, sharers, index
        )  # fmt: skip

    def slice_of(self, tile: Any) -> tuple[Any, Any]:
        begin = cutlass.select_(tile < 0, self.k_begin, Int32(0))
        return begin, cutlass.select_(tile < 0, self.k_end, self.stages)


@dataclass(frozen=True)
class StreamKSchedule(Fixed):
    """The tiles of a :class:`BatchedSchedule` as a cluster's :class:`SharedSlice` numbers them."""

    batched: BatchedSchedule
    work: SharedSlice

    def total(self) -> Any:
        """Number of whole tiles."""
        return self.work.whole

    def locate(self, tile: Any) -> tuple[Any, Any, Any, Any, Any]:
        """As :meth:`BatchedSchedule.locate`."""
        return self.batched.locate(cutlass.select_(tile < 0, self.work.whole + self.work.place, tile))


@dataclass(frozen=True)
class PartialSums(Fixed):
    """One epilogue warp's view of the sums of a shared tile.

    The unit is what a warp holds of a chunk of tokens. Units are dealt out over the clusters that share the tile. A
    unit's owner reads the sums of the others and adds all in the order of K, so that the result does not depend on
    timing. A warp has the same rows and chunks in every cluster, and waits for its like alone.

    Attributes:
        sums: fp32 global pointer, [CTA of the grid, chunk, quarter, vector, lane, 4]: a warp accesses whole lines. Not
            read before it was written.
        counters: int32 global pointer, [place, CTA of a pair, warp]: how many warps have written their sums, then also
            how many have seen that all have. Zero between launches: the last to see it resets it.
        work: of this cluster. peer: this CTA's number in its pair.
        tensor_memory: pointer to the accumulator of the shared tile.
    """

    shape: KernelShape
    sums: Any
    counters: Any
    work: SharedSlice
    peer: Any
    warp: EpilogueWarp
    tensor_memory: Any

    @classmethod
    def of(
        cls, shape: KernelShape, workspace: Any, work: SharedSlice, peer: Any, warp: EpilogueWarp, tensor_memory: Any
    ) -> PartialSums:
        """From the launch's fp32 pointer to the workspace."""
        counters = cute.recast_ptr(workspace, dtype=Int32)
        return cls(shape, workspace + COUNTER_WORDS, counters, work, peer, warp, tensor_memory)

    def owns(self, chunk: Any) -> Any:
        """Whether this cluster adds up this warp's unit of a chunk; rotated, so that its warps own equally many."""
        unit = chunk * TEAM_WARPS + (self.warp.quarter + chunk) % TEAM_WARPS
        return unit % self.work.sharers == self.work.index

    def _vectors(self, index: Any, chunk: Any) -> cute.Tensor:
        """This thread's sums of a unit of slice ``index``: [4, vectors]."""
        shape, work = self.shape, self.work
        vectors = shape.chunk // VECTOR
        cta = (index * work.rest + work.place) * 2 + self.peer
        unit = (cta * shape.chunks + chunk) * TEAM_WARPS + self.warp.quarter
        place = (unit * vectors * WARP_LANES + self.warp.lane) * VECTOR
        layout = cute.make_layout((VECTOR, vectors), stride=(1, WARP_LANES * VECTOR))
        return cute.make_tensor((self.sums + place).align(4 * VECTOR), layout)

    def put(self, values: cute.Tensor, chunk: Any) -> None:
        """Write this warp's sums of a unit for its owner."""
        self._copy(values, self._vectors(self.work.index, chunk), into_memory=True)

    @staticmethod
    def _copy(values: cute.Tensor, memory: cute.Tensor, into_memory: bool) -> None:
        for vector in range(cute.size(values) // VECTOR):
            registers = cute.make_tensor(values.iterator + vector * VECTOR, cute.make_layout(VECTOR))
            there = memory[None, vector]
            source, target = (registers, there) if into_memory else (there, registers)
            cute.autovec_copy(source, target)

    @property
    def _counter(self) -> Any:
        warps = TEAM_WARPS * self.shape.teams
        return self.counters + (self.work.place * 2 + self.peer) * warps + self.warp.index

    @cute.jit
    def signal(self):
        """Signal, after the last ``put``, that all lanes' sums are written; one lane does."""
        cute.arch.sync_warp()
        if self.warp.lane == 0:
            cute.arch.atomic_add(self._counter, Int32(1), sem="release", scope="gpu")

    @cute.jit
    def wait(self):
        """Wait until the sums of all slices are there; every lane polls, for it reads what other clusters' lanes
        wrote."""
        written = Int32(0)
        while written < self.work.sharers:
            written = cute.arch.load(self._counter, Int32, sem="acquire", scope="gpu")
        cute.arch.sync_warp()

    @cute.jit
    def leave(self):
        """Reset the counter after ``wait``: the last warp does, when no other will read it again."""
        if self.warp.lane == 0:
            before = cute.arch.atomic_add(self._counter, Int32(1), sem="acq_rel", scope="gpu")
            if before == 2 * self.work.sharers - 1:
                cute.arch.store(self._counter, Int32(0), sem="relaxed", scope="gpu")

    @cute.jit
    def add(self, values: cute.Tensor, chunk: Int32, is_kept: Boolean):
        """The sums of an owned unit over all slices, in the order of K.

        Args:
            values: what is filled.
            is_kept: whether this cluster's own sums of it are still in tensor memory, and not with the others'.
        """
        for i in cutlass.range_constexpr(self.shape.chunk):
            values[i] = Float32(0.0)
        for first in cutlass.range(0, self.work.sharers, ADDED_SLICES, unroll=1):
            # All loads first, so that their latencies overlap.
            parts = [make_fragment(self.shape.chunk) for _ in range(ADDED_SLICES)]
            for i in cutlass.range_constexpr(ADDED_SLICES):
                self._read(parts[i], first + i, chunk, is_kept)
            for i in cutlass.range_constexpr(ADDED_SLICES):
                if first + i < self.work.sharers:
                    for j in cutlass.range_constexpr(self.shape.chunk):
                        values[j] += parts[i][j]

    @cute.jit
    def _read(self, part: cute.Tensor, index: Int32, chunk: Int32, is_kept: Boolean):
        """Slice ``index`` of a unit; nothing beyond the last."""
        if is_kept and index == self.work.index:
            read_fragment(self.tensor_memory, chunk * self.shape.chunk, self.warp, part)
            cute.arch.fence_view_async_tmem_load()
        elif index < self.work.sharers:
            self._copy(part, self._vectors(index, chunk), into_memory=False)
