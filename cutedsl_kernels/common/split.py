"""Reduction of a split-K tile inside a cluster, over distributed shared memory.

Each CTA of the cluster has summed a slice of K. The unit of the reduction is what a warp of the epilogue holds of a
chunk of tokens (32 weight rows on SM100, 16 on SM90). Units are dealt out over CTAs and, in each, over its warps. A
warp stores its sums of units that other CTAs own straight into their shared memory, where an mbarrier of the same warp
there counts the bytes, and waits for theirs. The owner adds the slices in order, so the result does not depend on
timing; nothing goes through global memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .fixed import Fixed
from .shape import WARP_LANES, GemmShape

VECTOR = 4
"""fp32 values of a 16-byte access."""


@dataclass(frozen=True)
class ClusterReduction(Fixed):
    """One epilogue warp's view of the reduction.

    Attributes:
        shape: the kernel's.
        rank: this CTA's slice.
        partials: fp32 shared pointer, [other slice, slot, vector, lane, 4]; slots are the units that this CTA owns.
        full, empty: mbarriers, one for each reducing warp. ``full`` completes when all that this warp adds up has come
            from the other CTAs, ``empty`` when those that this warp sent something have added it up.
        quarter, lane: of this warp among the reducing ones of the CTA, and of the thread in it.
    """

    shape: GemmShape
    rank: Any
    partials: Any
    full: Any
    empty: Any
    quarter: Any
    lane: Any

    def initialise(self) -> None:
        """Initialise the barriers; by one thread, with the kernel's other ones."""
        for quarter in range(self.shape.reducing_warps):
            owners = {self._unit(quarter, chunk) % self.shape.split_k for chunk in range(self.shape.chunks)}
            others = Int32(len(owners))
            for owner in sorted(owners):
                others -= cutlass.select_(self.rank == owner, Int32(1), Int32(0))
            cute.arch.mbarrier_init(self.full + quarter, 1)
            # Nobody waits for a warp that sends nothing, but a count must be positive.
            cute.arch.mbarrier_init(self.empty + quarter, cutlass.max(others, 1))

    def _unit(self, quarter: Any, chunk: Any) -> Any:
        """Number of a warp's unit of a chunk; rotated, so that a CTA's units are spread over its warps."""
        warps = self.shape.reducing_warps
        return chunk * warps + (quarter + chunk) % warps

    def _owned(self) -> Any:
        """Number of this warp's units that its own CTA adds up."""
        owned = Int32(0)
        for chunk in range(self.shape.chunks):
            owned += cutlass.select_(self.owner(chunk) == self.rank, Int32(1), Int32(0))
        return owned

    def owner(self, chunk: Any) -> Any:
        """The CTA that adds up this warp's unit of a chunk."""
        return self._unit(self.quarter, chunk) % self.shape.split_k

    def _place(self, other: Any, chunk: Any, vector: int) -> Any:
        slot = other * self.shape.owned_units + self._unit(self.quarter, chunk) // self.shape.split_k
        return self.partials + ((slot * self._vectors + vector) * WARP_LANES + self.lane) * VECTOR

    @property
    def _vectors(self) -> int:
        """16-byte vectors of a thread's values of a unit."""
        return self.shape.unit_values // VECTOR

    def expect(self) -> None:
        """Announce the bytes of a tile that other CTAs send; once a tile, before waiting for them."""
        unit_bytes = self.shape.unit_values * 4 * WARP_LANES
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                self.full + self.quarter, self._owned() * ((self.shape.split_k - 1) * unit_bytes)
            )

    def send(self, values: cute.Tensor, chunk: Any) -> None:
        """Send this warp's sums of a chunk to the CTA that owns them."""
        owner = self.owner(chunk)
        other = cutlass.select_(self.rank < owner, self.rank, self.rank - 1)
        for vector in range(self._vectors):
            place = self._place(other, chunk, vector).toint()
            cute.arch.inline_ptx(
                "{ .reg .b32 remote, barrier; mapa.shared::cluster.u32 remote, {$r0}, {$r1};"
                " mapa.shared::cluster.u32 barrier, {$r2}, {$r1};"
                " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
                " [remote], { {$r3}, {$r4}, {$r5}, {$r6} }, [barrier]; }",
                read_only_args=[
                    Uint32(place),
                    Int32(owner),
                    Uint32((self.full + self.quarter).toint()),
                    *(values[vector * VECTOR + i] for i in range(VECTOR)),
                ],
            )

    def signal_empty(self) -> None:
        """Signal the warps of this quarter in all other CTAs that their sums are added up; one lane signals one CTA.

        Called after the last ``add`` of a tile, if another tile follows.

        A warp that owns no unit signals nothing: it would run ahead of the warps that wait.
        """
        cute.arch.sync_warp()
        others = cutlass.select_(self._owned() > 0, Int32(self.shape.split_k), Int32(0))
        # Written out, since the compiler would map the address in lanes for which there is no CTA, too.
        cute.arch.inline_ptx(
            "{ .reg .pred p; .reg .b32 remote; setp.lt.s32 p, {$r1}, {$r2}; setp.ne.and.s32 p, {$r1}, {$r3}, p;"
            " @p mapa.shared::cluster.u32 remote, {$r0}, {$r1};"
            " @p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }",
            read_only_args=[
                Uint32((self.empty + self.quarter).toint()),
                Int32(self.lane),
                others,
                Int32(self.rank),
            ],
        )

    def wait_full(self, phase: Any) -> None:
        """Wait until the other CTAs' sums are here."""
        self._wait(self.full, phase)

    @cute.jit
    def wait_empty(self, phase: Any):
        """Wait until the other CTAs have added up the last tile's sums."""
        if self._owned() < self.shape.chunks:
            self._wait(self.empty, phase)

    def _wait(self, barrier: Any, phase: Any) -> None:
        """Wait for a signal of other CTAs, with cluster scope.

        Both sides need cluster scope to order the other CTAs' writes before the reads that follow here. CuTeDSL's own
        wait has CTA scope."""
        cute.arch.inline_ptx(
            "{ .reg .pred done; WAIT:"
            " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1}; @!done bra WAIT; }",
            read_only_args=[Uint32((barrier + self.quarter).toint()), Int32(phase)],
        )

    def add(self, values: cute.Tensor, chunk: Any) -> None:
        """Add the other slices to this warp's sums of an owned unit, in the order of the slices."""
        shape = self.shape
        parts = [cute.make_rmem_tensor((shape.unit_values,), Float32) for _ in range(shape.split_k)]
        # All loads first, so that their latencies overlap.
        for part in range(shape.split_k):
            # In place of its own slice a CTA reads a neighbour's, and drops it.
            other = cutlass.select_(self.rank < part, Int32(part - 1), Int32(min(part, shape.split_k - 2)))
            for vector in range(self._vectors):
                place = self._place(other, chunk, vector).align(16)
                source = cute.make_tensor(place, cute.make_layout(VECTOR))
                target = cute.make_tensor(parts[part].iterator + vector * VECTOR, cute.make_layout(VECTOR))
                cute.autovec_copy(source, target)
        for i in range(shape.unit_values):
            slices = [cutlass.select_(self.rank == part, values[i], parts[part][i]) for part in range(shape.split_k)]
            total = slices[0]
            for one in slices[1:]:
                total = total + one
            values[i] = total
