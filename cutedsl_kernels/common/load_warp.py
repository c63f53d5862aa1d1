"""The warp that loads: it keeps the ring of operand stages full."""

from __future__ import annotations

from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .gemm import Work
from .ring import Ring


class StageLoads(Protocol):
    """The loads of a stage's operands; the ring's barrier of the stage counts their bytes."""

    @property
    def finds_early(self) -> bool:
        """Whether ``find`` reads memory, so that it must begin before the first weight loads are issued.

        It is then called for a CTA without a tile, too.
        """

    def load_weights(self, ring: Ring, position: Any, feature_tile: Any, k_tile: Any, group: Any) -> None:
        """Announce the bytes of the stage, or those of its weights, and load its weights."""

    def find(self, token_tile: Any, weight_group: Any) -> Any:
        """Find a tile's tokens, for ``load_tokens``."""

    def load_tokens(self, ring: Ring, position: Any, token_rows: Any, k_tile: Any, group: Any) -> None:
        """Load the stage's tokens."""

    def finish(self) -> None:
        """Wait for outstanding copies after the last stage: a warp may not exit before they complete."""


@cute.jit
def load_stages(
    loads: StageLoads, ring: Ring, schedule: Any, total: Int32, work: Work, weights_first: cutlass.Constexpr,
    drains: cutlass.Constexpr = False,
):  # fmt: skip
    """Load the operands of all of a CTA's tiles; by one warp.

    Args:
        schedule: which tile each of ``total`` blocks is.
        weights_first: whether to issue the weight loads of all stages before any tokens, and before the previous kernel
            has ended (unless the caller has waited for it). False if weights of the first tile depend on that kernel.
        drains: whether to wait at the end until all stages are free. Needed where other CTAs free stages, too: they
            must not signal a CTA that has exited.
    """
    first = work.first
    k_begin, k_end = work.slice_of(first)
    sent = Int32(0)
    if cutlass.const_expr(weights_first):
        # A cluster without a tile must load nothing: it would end before the loads have.
        sent = cutlass.select_(first < total, cutlass.min(Int32(ring.stages), k_end - k_begin), Int32(0))
        first_feature_tile, first_token_tile, first_group, _, _ = schedule.locate(first)
        first_rows = loads.find(first_token_tile, first_group) if cutlass.const_expr(loads.finds_early) else None
        ahead = ring.producer()
        for k_tile in cutlass.range(k_begin, k_begin + sent, unroll=1):
            loads.load_weights(ring, ahead, first_feature_tile, k_tile, first_group)
            ahead.advance()
        cute.arch.griddepcontrol_wait()
    position = ring.producer()
    tile = first
    while tile < total:
        feature_tile, token_tile, weight_group, token_group, _ = schedule.locate(tile)
        token_rows: Any
        if cutlass.const_expr(weights_first and loads.finds_early):
            token_rows = first_rows
            if tile != first:
                token_rows = loads.find(token_tile, weight_group)
        else:
            token_rows = loads.find(token_tile, weight_group)
        begin, end = work.slice_of(tile)
        for k_tile in cutlass.range(begin, end, unroll=1):
            if tile != first or k_tile - begin >= sent:
                ring.wait_empty(position)
                loads.load_weights(ring, position, feature_tile, k_tile, weight_group)
            loads.load_tokens(ring, position, token_rows, k_tile, token_group)
            position.advance()
        tile += work.step
    loads.finish()
    if cutlass.const_expr(drains):
        for _ in cutlass.range_constexpr(ring.stages):
            ring.wait_empty(position)
            position.advance()
