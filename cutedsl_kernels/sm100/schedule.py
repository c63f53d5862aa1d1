"""Which tile a cluster works on next: static persistent schedules over a batch of products, or over experts.

Clusters take tiles, or blocks of tiles of neighbouring features and tokens, round robin. Consecutive ones differ in
their features first, so that the clusters at work share their tokens' operand in L2, and each weight tile is visited
once for all tokens that fit a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from .fixed import Fixed
from .shape import MAX_EXPERTS

EXPERTS_PER_LANE = MAX_EXPERTS // 32


@dataclass(frozen=True)
class Place(Fixed):
    """A tile's place in the block of tiles that a cluster works on: the block's size, and this CTA's tile in it."""

    features: int
    tokens: int
    feature: Any
    token: Any


@dataclass(frozen=True)
class BatchedSchedule(Fixed):
    """``groups`` products of one shape: every combination of feature tile, token tile and group."""

    place: Place
    feature_tiles: Any
    token_tiles: Any
    groups: Any

    def total(self) -> Any:
        """Number of blocks."""
        blocks = cute.ceil_div(self.feature_tiles, self.place.features) * self.groups
        return blocks * cute.ceil_div(self.token_tiles, self.place.tokens)

    def locate(self, block: Any) -> tuple[Any, Any, Any, Any, Any]:
        """``(feature tile, token tile, group of the weights, group of the tokens, whether to store)``.

        A tile beyond the last features or tokens is computed from zeros and clipped by the store.
        """
        across, down = cute.ceil_div(self.feature_tiles, self.place.features), self.place.tokens
        rest = block // across
        per_group = cute.ceil_div(self.token_tiles, down)
        group = rest // per_group
        feature_tile = block % across * self.place.features + self.place.feature
        return feature_tile, rest % per_group * down + self.place.token, group, group, Boolean(True)


@dataclass(frozen=True)
class GroupedSchedule(Fixed):
    """Experts whose token counts only the device knows.

    Attributes:
        feature_tiles: tiles along the features, the same for each expert.
        token_tile: tokens of a tile.
        experts: number of experts, at most MAX_EXPERTS.
        offsets: int32 global tensor [experts]: first row of each expert, a multiple of ``token_tile``.
        counts: int32 global tensor [experts]: rows of each expert; zero is fine.
        ends: int32 shared tensor [MAX_EXPERTS]: blocks of all experts up to and with this one.
    """

    place: Place
    feature_tiles: Any
    token_tile: int
    experts: Any
    offsets: Any
    counts: Any
    ends: Any

    def total(self) -> Any:
        """Number of blocks; after ``prepare`` and a barrier."""
        return self.ends[MAX_EXPERTS - 1]

    def _blocks_across(self) -> Any:
        return cute.ceil_div(self.feature_tiles, self.place.features)

    @cute.jit
    def prepare(self, lane: Int32):
        """Fill ``ends``; one whole warp. Every lane sums a run of experts, then the runs are scanned."""
        rows = self.token_tile * self.place.tokens
        across = self._blocks_across()
        mine = cute.make_rmem_tensor((EXPERTS_PER_LANE,), Int32)
        running = Int32(0)
        for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
            expert = lane * EXPERTS_PER_LANE + i
            if expert < self.experts:
                running += (self.counts[expert] + (rows - 1)) // rows * across
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
    def locate(self, block: Int32):
        """``(feature tile, token tile counted over all rows, expert, 0, whether to store)``: binary search in ``ends``.

        A block's token tile beyond its expert's rows would hold another expert's: it is computed and not stored.
        """
        low = Int32(0)
        for step in cutlass.range_constexpr(MAX_EXPERTS.bit_length() - 1):
            half = MAX_EXPERTS >> (step + 1)
            if self.ends[low + half - 1] <= block:
                low += half
        begin = Int32(0)
        if low > 0:
            begin = self.ends[low - 1]
        within = block - begin
        across = self._blocks_across()
        feature_tile = within % across * self.place.features + self.place.feature
        token_tile = within // across * self.place.tokens + self.place.token
        inside = token_tile * self.token_tile < self.counts[low]
        return feature_tile, self.offsets[low] // self.token_tile + token_tile, low, Int32(0), inside
