"""Schedules of a cluster's tiles: static and persistent, over a batch of GEMMs, or over experts.

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

from nvfp4_sgl.limits import MAX_GEMM_EXPERTS

from .fixed import Fixed
from .shape import WARP_LANES

EXPERTS_PER_LANE = MAX_GEMM_EXPERTS // WARP_LANES
OFFSETS = EXPERTS_PER_LANE * (WARP_LANES + 1)
"""Words between a table of all experts and the next."""


def _log2(size: int) -> int:
    """The logarithm of a power of two."""
    return size.bit_length() - 1


@dataclass(frozen=True)
class Place(Fixed):
    """A tile's place in the block of tiles that a cluster works on: the block's size, and this CTA's tile in it."""

    features: int
    tokens: int
    feature: Any
    token: Any


@dataclass(frozen=True)
class BatchedSchedule(Fixed):
    """``groups`` GEMMs of one shape: every combination of feature tile, token tile and group."""

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

    A lane's run is EXPERTS_PER_LANE experts in a row. Two ballots find a block's expert: which run, and which in it.
    Blocks of equal tokens are a row of blocks; all experts have rows of the same length, so that rows are counted.
    Sizes in tokens are powers of two and counts are not negative: shifts take one instruction where ``//`` takes nine.

    Attributes:
        feature_tiles: tiles along the features, the same for each expert.
        token_tile: tokens of a tile.
        experts: number of experts, at most MAX_GEMM_EXPERTS.
        offsets: int32 global tensor [experts]: first row of each expert, a multiple of ``token_tile``.
        counts: int32 global tensor [experts]: rows of each expert; may be 0.
        table: int32 shared tensor [``GemmShape.expert_words``]: rows of blocks before each run and in all; at
            ``_word``, those before each expert, and OFFSETS further its offset, unless ``offsets`` is read again.
        keeps_offsets: whether the table has offsets.
    """

    place: Place
    feature_tiles: Any
    token_tile: int
    experts: Any
    offsets: Any
    counts: Any
    table: Any
    keeps_offsets: bool = True

    def total(self) -> Any:
        """Number of blocks; after ``prepare`` and a barrier."""
        return self.table[WARP_LANES] * self._blocks_across()

    def _blocks_across(self) -> Any:
        return cute.ceil_div(self.feature_tiles, self.place.features)

    def _word(self, run: Any, index: Any) -> Any:
        """Word of an expert in the table: neither the lanes of a run nor the experts in it share a bank."""
        return WARP_LANES + 1 + index * (WARP_LANES + 1) + run

    @cute.jit
    def prepare(self, lane: Int32):
        """Fill the table; one whole warp. Every lane sums its run, then the runs are scanned."""
        tokens = self.token_tile * self.place.tokens
        # All loads first, so that their latencies overlap.
        experts = [lane * EXPERTS_PER_LANE + i for i in range(EXPERTS_PER_LANE)]
        known = [cutlass.min(expert, self.experts - 1) for expert in experts]
        counts = [self.counts[expert] for expert in known]
        offsets = [self.offsets[expert] for expert in known]
        befores = []
        running = Int32(0)
        for expert, count in zip(experts, counts, strict=True):
            befores.append(running)
            rows = (count + (tokens - 1)) >> _log2(tokens)
            running = running + cutlass.select_(expert < self.experts, rows, Int32(0))
        before = running
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(before, 1 << step, mask_and_clamp=0)
            if lane >= (1 << step):
                before += other
        if lane == WARP_LANES - 1:
            self.table[WARP_LANES] = before
        before -= running
        self.table[lane] = before
        for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
            self.table[self._word(lane, i)] = before + befores[i]
            if cutlass.const_expr(self.keeps_offsets):
                self.table[self._word(lane, i) + OFFSETS] = offsets[i]

    @cute.jit
    def locate(self, block: Int32):
        """``(feature tile, token tile counted over all rows, expert, 0, whether to store)``; by whole warps.

        Among experts with equally many rows of blocks before them only the last has tokens. A block's token tile beyond
        its expert's tokens would hold another expert's: it is computed and not stored.
        """
        lane = cute.arch.lane_idx()
        across = self._blocks_across()
        row = block // across
        run = cute.arch.popc(cute.arch.vote_ballot_sync(self.table[lane] <= row)) - 1
        of_run = self.table[self._word(run, lane % EXPERTS_PER_LANE)] <= row
        index = cute.arch.popc(cute.arch.vote_ballot_sync(of_run) & ((1 << EXPERTS_PER_LANE) - 1)) - 1
        word = self._word(run, index)
        feature_tile = (block - row * across) * self.place.features + self.place.feature
        token_tile = (row - self.table[word]) * self.place.tokens + self.place.token
        # Without any tokens the search ends at the last expert of the table.
        expert = cutlass.min(run * EXPERTS_PER_LANE + index, self.experts - 1)
        inside = Boolean(True)
        if cutlass.const_expr(self.place.tokens > 1):
            inside = token_tile * self.token_tile < self.counts[expert]
        if cutlass.const_expr(self.keeps_offsets):
            offset = self.table[word + OFFSETS]
        else:
            offset = self.offsets[expert]
        first_tile = offset >> _log2(self.token_tile)
        return feature_tile, first_tile + token_tile, expert, Int32(0), inside

    def rows(self, token_tile: Any, expert: Any) -> Any:
        """Number of rows of an expert in one of its token tiles, which is counted over all rows."""
        end = self.offsets[expert] + self.counts[expert]
        return cutlass.min(end - token_tile * self.token_tile, self.token_tile)
