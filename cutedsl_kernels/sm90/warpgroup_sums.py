"""Sums over K by wgmma: a warpgroup multiplies 64 rows with all tokens of a tile.

It expands half a stage into one of two sets of registers while the tensor core reads the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from ..common.fixed import Fixed
from ..common.fragment import EpilogueWarp
from ..common.ring import Ring
from .layout import TILE_K
from .shape import WARPGROUP_ROWS, KernelShape
from .stage import expanded, load_stage_half, release

HALF_STEPS = TILE_K // 16 // 2
"""Steps of 16 of half a stage: one group of wgmmas."""


@dataclass(frozen=True)
class WarpgroupSums(Fixed):
    """One warp's part of its warpgroup's sums.

    Attributes:
        mmas: the MMA of one warpgroup by how many tokens it multiplies, ``KernelShape.widths``; both warpgroups do the
            same to rows of their own.
        weights: shared pointer to the stages' tiles. tokens: shared tensor (token, k, stage).
    """

    shape: KernelShape
    ring: Ring
    weights: Any
    tokens: Any
    warp: EpilogueWarp
    mmas: tuple[Any, ...]

    @cute.jit
    def add_up(
        self, values: cute.Tensor, position: Any, k_begin: Int32, k_end: Int32, width: cutlass.Constexpr[int]
    ):  # fmt: skip
        """Set ``values`` to the sums over a tile's stages, of its first ``width`` tokens; returns the ring's position
        behind them."""
        shape, ring = self.shape, self.ring
        mma = self.mmas[shape.widths.index(width)]
        part = mma.get_slice(0)
        tokens = self.tokens
        if cutlass.const_expr(width < shape.token_tile):
            tokens = cute.make_tensor(tokens.iterator, cute.composition(tokens.layout, (width, TILE_K, shape.stages)))
        b = part.make_fragment_B(part.partition_B(tokens))
        sums = cute.make_tensor(values.iterator, mma.partition_shape_C((WARPGROUP_ROWS, width)))
        fragment = mma.partition_shape_A((WARPGROUP_ROWS, HALF_STEPS * 16))
        halves = [cute.make_rmem_tensor(fragment, BFloat16) for _ in range(2)]
        released = position.index
        for k_tile in cutlass.range(k_begin, k_end, unroll=1):
            ring.wait_full(position)
            if cutlass.const_expr(shape.gathers):
                # cp.async has written the tokens through the generic proxy; wgmma reads them through the other.
                cute.arch.fence_view_async_shared()
            staged = self.weights + position.index * shape.tile_bytes
            loaded = [load_stage_half(shape, staged, self.warp, half) for half in range(2)]
            for half in cutlass.range_constexpr(2):
                # Beside the other half's wgmmas. ptxas serialises all of them if any outlive the next fence.
                self._expand(loaded[half], halves[half])
                if cutlass.const_expr(half == 1):
                    if k_tile > k_begin:
                        release(ring, released)
                    released = position.index
                warpgroup.wait_group(0)
                self._issue(mma, sums, halves[half], b, half, position.index, k_tile != k_begin)
            position.advance()
        warpgroup.wait_group(0)
        release(ring, released)
        return position

    def _expand(self, loaded: Any, registers: cute.Tensor) -> None:
        """Half a stage's weights, as A fragments of four steps."""
        words = cute.recast_tensor(registers, Uint32)
        for i, value in enumerate(expanded(self.shape, loaded)):
            words[i] = value

    def _issue(self, mma: Any, values: Any, registers: Any, b: Any, half: int, stage: Any, is_later: Any) -> None:
        """A group of wgmmas: half a stage. A tile's first one sets the sums."""
        warpgroup.fence()
        # An atom of its own, since its state must not leave the loop.
        atom = cute.make_mma_atom(mma.op)
        for step in range(HALF_STEPS):
            atom.set(warpgroup.Field.ACCUMULATE, True if half or step else is_later)
            k = half * HALF_STEPS + step
            cute.gemm(atom, values, registers[None, None, step], b[None, None, k, stage], values)
        warpgroup.commit_group()
