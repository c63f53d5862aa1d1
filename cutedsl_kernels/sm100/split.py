"""Reduction of a split-K tile inside a cluster, over distributed shared memory.

Each CTA of the cluster has summed a slice of K. Chunk c of the tile's tokens is finished by CTA ``c mod split_k``; the
others write their sums of it straight into that CTA's shared memory and signal. The owner adds the slices in order,
so the result does not depend on timing, and nothing goes through global memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .barriers import WARPS_OF_EPILOGUE
from .fixed import Fixed
from .shape import LANES, KernelShape

VECTOR = 4
"""fp32 values of a 16-byte access."""


@dataclass(frozen=True)
class ClusterReduction(Fixed):
    """One CTA's view of the reduction.

    Attributes:
        rank: this CTA's slice.
        partials: fp32 shared pointer, [other slice, owned chunk, chunk / 4, feature, 4].
        full: mbarrier, completes when every other CTA has written all its partials.
        thread: this thread's feature.
    """

    shape: KernelShape
    rank: Any
    partials: Any
    full: Any
    thread: Any

    def initialise(self) -> None:
        """By one thread, with the other barriers."""
        cute.arch.mbarrier_init(self.full, (self.shape.split_k - 1) * WARPS_OF_EPILOGUE)

    def _place(self, other: Any, owned: Any, vector: Any) -> Any:
        index = (other * self.shape.owned_chunks + owned) * (self.shape.chunk // VECTOR) + vector
        return self.partials + (index * LANES + self.thread) * VECTOR

    def send(self, values: cute.Tensor, chunk: Any) -> None:
        """Give this CTA's sums of a chunk to the CTA that owns it."""
        owner = chunk % self.shape.split_k
        other = cutlass.select_(self.rank < owner, self.rank, self.rank - 1)
        for vector in range(self.shape.chunk // VECTOR):
            place = self._place(other, chunk // self.shape.split_k, vector).toint()
            cute.arch.inline_ptx(
                "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {$r0}, {$r1};"
                " st.shared::cluster.v4.f32 [remote], { {$r2}, {$r3}, {$r4}, {$r5} }; }",
                read_only_args=[Uint32(place), Int32(owner), *(values[vector * VECTOR + i] for i in range(VECTOR))],
            )

    @cute.jit
    def signal(self):
        """After the last ``send``: tell every other CTA."""
        cute.arch.fence_acq_rel_cluster()
        cute.arch.sync_warp()
        for other in cutlass.range_constexpr(self.shape.split_k):
            if other != self.rank:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(self.full, other)

    def wait(self) -> None:
        """Until the other CTAs' sums are here."""
        cute.arch.mbarrier_wait(self.full, 0)
        cute.arch.fence_acq_rel_cluster()

    def add(self, values: cute.Tensor, owned: Any) -> None:
        """Add the other slices to this CTA's sums of an owned chunk, in the order of the slices."""
        shape = self.shape
        for vector in range(shape.chunk // VECTOR):
            sums: list[Any] = [None] * VECTOR
            for part in range(shape.split_k):
                # In place of its own slice a CTA reads a neighbour's, and drops it.
                other = cutlass.select_(self.rank < part, Int32(part - 1), Int32(min(part, shape.split_k - 2)))
                registers = cute.make_rmem_tensor((VECTOR,), Float32)
                place = self._place(other, owned, vector).align(16)
                cute.autovec_copy(cute.make_tensor(place, cute.make_layout(VECTOR)), registers)
                for i in range(VECTOR):
                    own = values[vector * VECTOR + i]
                    value = cutlass.select_(self.rank == part, own, registers[i])
                    sums[i] = value if part == 0 else sums[i] + value
            for i in range(VECTOR):
                values[vector * VECTOR + i] = sums[i]
