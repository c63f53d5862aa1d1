"""Which tile a cluster works on next: static persistent schedules over a batch of products, or over experts.

Clusters take tiles round robin. Consecutive tiles differ in their features first, so that the clusters at work share
their tokens' operand in L2, and each weight tile is visited once for all tokens that fit a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .fixed import Fixed
from .shape import MAX_EXPERTS

EXPERTS_PER_LANE = MAX_EXPERTS // 32


@dataclass(frozen=True)
class BatchedSchedule(Fixed):
    """``groups`` products of one shape: every combination of feature tile, token tile and group."""

    feature_tiles: Any
    token_tiles: Any
    groups: Any

    def total(self) -> Any:
        """Number of tiles."""
        return self.feature_tiles * self.token_tiles * self.groups

    def locate(self, tile: Any) -> tuple[Any, Any, Any, Any]:
        """``(feature tile, token tile, group of the weights, group of the tokens)`` of a tile."""
        rest = tile // self.feature_tiles
        group = rest // self.token_tiles
        return tile % self.feature_tiles, rest % self.token_tiles, group, group


@dataclass(frozen=True)
class GroupedSchedule(Fixed):
    """Experts whose token counts only the device knows.

    Attributes:
        feature_tiles: tiles along the features, the same for each expert.
        token_tile: tokens of a tile.
        experts: number of experts, at most MAX_EXPERTS.
        offsets: int32 global tensor [experts]: first row of each expert, a multiple of ``token_tile``.
        counts: int32 global tensor [experts]: rows of each expert; zero is fine.
        ends: int32 shared tensor [MAX_EXPERTS]: tiles of all experts up to and with this one.
    """

    feature_tiles: Any
    token_tile: int
    experts: Any
    offsets: Any
    counts: Any
    ends: Any

    def total(self) -> Any:
        """Number of tiles; after ``prepare`` and a barrier."""
        return self.ends[MAX_EXPERTS - 1]

    @cute.jit
    def prepare(self, lane: Int32):
        """Fill ``ends``; one whole warp. Every lane sums a run of experts, then the runs are scanned."""
        mine = cute.make_rmem_tensor((EXPERTS_PER_LANE,), Int32)
        running = Int32(0)
        for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
            expert = lane * EXPERTS_PER_LANE + i
            if expert < self.experts:
                running += (self.counts[expert] + (self.token_tile - 1)) // self.token_tile * self.feature_tiles
            mine[i] = running
        before = running
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(before, 1 << step, mask_and_clamp=0)
            if lane >= (1 << step):
                before += other
        before -= running
        for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
            self.ends[lane * EXPERTS_PER_LANE + i] = before + mine[i]

    @cute.jit
    def locate(self, tile: Int32):
        """``(feature tile, token tile counted over all rows, expert, 0)`` of a tile: binary search in ``ends``."""
        low = Int32(0)
        for step in cutlass.range_constexpr(MAX_EXPERTS.bit_length() - 1):
            half = MAX_EXPERTS >> (step + 1)
            if self.ends[low + half - 1] <= tile:
                low += half
        begin = Int32(0)
        if low > 0:
            begin = self.ends[low - 1]
        within = tile - begin
        token_tile = self.offsets[low] // self.token_tile + within // self.feature_tiles
        return within % self.feature_tiles, token_tile, low, Int32(0)
