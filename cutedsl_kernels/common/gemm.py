"""Base of the GEMM kernels of every architecture: launches persistent clusters and divides the work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from .fixed import Fixed
from .shape import GemmShape

WHOLE_CARVEOUT = 100
"""Per cent of an SM's L1 and shared memory that may be shared memory."""


@dataclass(frozen=True)
class Work(Fixed):
    """The share of the work that one CTA does.

    Attributes:
        first, step: its cluster takes every ``step``-th block of tiles, from ``first`` on.
        k_begin, k_end: its part of K, in stages.
    """

    first: Any
    step: Any
    k_begin: Any
    k_end: Any

    def slice_of(self, tile: Any) -> tuple[Any, Any]:
        """First and last stage (exclusive) of the CTA's share of a tile."""
        return self.k_begin, self.k_end


class Gemm(ABC):
    """A kernel of one :class:`.shape.GemmShape`."""

    shape: GemmShape
    epilogue: Any
    """The epilogue of a tile: the architecture's ``epilogue.Epilogue``."""

    def __init__(self, shape: GemmShape, epilogue: Any) -> None:
        self.shape, self.epilogue = shape, epilogue

    @property
    @abstractmethod
    def operand_types(self) -> tuple[Any, Any, Any, Any]:
        """CuTeDSL's types of (weights, weight_scales, tokens, token_scales)."""

    # Host side, traced once per compilation.

    @abstractmethod
    def launch(self, arguments: Any, stream: Any, use_pdl: bool) -> None:
        """Launch with traced :class:`.arguments.Arguments`."""

    def _launch(self, kernel: Any, storage: Any, clusters: Any, stream: Any, use_pdl: bool) -> None:
        """Launch a called ``cute.kernel`` on persistent clusters, ``storage`` being a CTA's shared memory."""
        cluster = self.shape.cluster
        kernel.launch(
            grid=(clusters * cluster, 1, 1),
            block=(self.shape.threads, 1, 1),
            cluster=(cluster, 1, 1),
            smem=storage.size_in_bytes(),
            # ptxas would spill to fit more CTAs by its own count, which rounds warps up to whole warpgroups.
            min_blocks_per_mp=1,
            preferred_smem_carveout=WHOLE_CARVEOUT if self.shape.ctas_per_sm > 1 else None,
            stream=stream,
            use_pdl=use_pdl,
        )

    # Device side.

    def _rank(self) -> Any:
        """This CTA's number in its cluster."""
        if self.shape.cluster == 1:
            return Int32(0)
        return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    def _work(self, rank: Any, k_tiles: Any) -> Work:
        """The work of the CTA of that rank; ``k_tiles`` are the stages of all of K."""
        shape = self.shape
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        first, step = block // shape.cluster, grid // shape.cluster
        if shape.split_k == 1:
            return Work(first, step, Int32(0), k_tiles)
        return Work(first, step, rank * k_tiles // shape.split_k, (rank + 1) * k_tiles // shape.split_k)

    def _meet_prepared(self) -> None:
        """Synchronise all threads of the cluster once mbarriers are initialised and fenced (``mbarrier_init_fence``).

        That fence publishes the mbarriers. A release of everything to the cluster would wait for a GPU-wide fence.
        """
        if self.shape.cluster > 1:
            cute.arch.cluster_arrive_relaxed(aligned=True)
        cute.arch.sync_threads()
        if self.shape.cluster > 1:
            cute.arch.cluster_wait()
