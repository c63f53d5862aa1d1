"""The loads of a stage: a tile of weights by TMA, and its tokens, by TMA as a tile or some of one, or row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from ..common.fixed import Fixed
from ..common.ring import Ring
from ..common.schedule import GroupedSchedule
from ..common.shape import WARP_LANES
from .layout import TILE_K
from .shape import KernelShape
from .warp_sums import SWIZZLED_BYTES
from .weights import WeightLoad


@dataclass(frozen=True)
class StageLoads(Fixed):
    """Loads of weights and tokens.

    Attributes:
        slots: shared tensor (values, slot) of tokens, ``tiles``: global tensor (values, token tile, K tile, group).
        policy: L2 cache policy of the tokens, or None.
    """

    shape: KernelShape
    weights: WeightLoad
    atom: Any
    slots: Any
    tiles: Any
    policy: Any

    @classmethod
    def create(
        cls, shape: KernelShape, weights: WeightLoad, atom: Any, tokens: Any, shared: Any, policy: Any
    ) -> StageLoads:
        """Partition the global tensor ``tokens`` and the staged one, (token, k, stage)."""
        tiles = cute.local_tile(tokens, (shape.token_tile, TILE_K), (None, None, None))
        slots, tiles = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return cls(shape, weights, atom, slots, tiles, policy)

    @property
    def finds_early(self) -> bool:
        return False

    def load_weights(self, ring: Ring, position: Any, feature_tile: Any, k_tile: Any, group: Any) -> None:
        """Announce a stage's bytes and load its weights."""
        barrier = ring.full + position.index
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.shape.stage_bytes)
        self.weights.load(group, feature_tile, k_tile, position.index, barrier)

    def find(self, token_tile: Any, weight_group: Any) -> Any:
        return token_tile

    def load_tokens(self, ring: Ring, position: Any, token_rows: Any, k_tile: Any, group: Any) -> None:
        """Load a stage's tokens."""
        cute.copy(
            self.atom, self.tiles[None, token_rows, k_tile, group], self.slots[None, position.index],
            tma_bar_ptr=ring.full + position.index, cache_policy=self.policy,
        )  # fmt: skip

    def finish(self) -> None:
        """Nothing: the multiplying warps wait for every copy."""


@dataclass(frozen=True)
class TrimmedLoads(Fixed):
    """Loads of weights, and of as many tokens as are multiplied of a tile (``KernelShape.widths``).

    Attributes:
        schedule: the experts'.
        slots: shared tensor (values, load, slot) of tokens, ``tiles``: global tensor (values, load, K tile, group); a
            load is of ``KernelShape.load_tokens`` tokens.
    """

    shape: KernelShape
    weights: WeightLoad
    schedule: GroupedSchedule
    atom: Any
    slots: Any
    tiles: Any

    @classmethod
    def create(
        cls, shape: KernelShape, weights: WeightLoad, schedule: GroupedSchedule, atom: Any, tokens: Any, shared: Any
    ) -> TrimmedLoads:
        """Partition the global tensor ``tokens`` and the staged one, (token, k, stage)."""
        box = shape.load_tokens, TILE_K
        tiles, slots = (cute.local_tile(tensor, box, (None, None, None)) for tensor in (tokens, shared))
        slots, tiles = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(slots, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return cls(shape, weights, schedule, atom, slots, tiles)

    @property
    def finds_early(self) -> bool:
        return False

    def load_weights(self, ring: Ring, position: Any, feature_tile: Any, k_tile: Any, group: Any) -> None:
        """Announce the bytes of a stage's weights and load them."""
        barrier = ring.full + position.index
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(barrier, self.shape.tile_bytes)
        self.weights.load(group, feature_tile, k_tile, position.index, barrier)

    def find(self, token_tile: Any, weight_group: Any) -> tuple[Any, Any]:
        """A tile's first load, and how many there are."""
        width = trimmed_width(self.shape, self.schedule.rows(token_tile, weight_group))
        loads = self.shape.token_tile // self.shape.load_tokens
        return token_tile * loads, width // self.shape.load_tokens

    @cute.jit
    def load_tokens(self, ring: Ring, position: Any, token_rows: Any, k_tile: Any, group: Any):
        """Announce the bytes of a stage's tokens, which completes what is announced, and load them."""
        first, loads = token_rows
        barrier = ring.full + position.index
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, loads * (self.shape.load_tokens * TILE_K * 2))
        for load in cutlass.range(loads, unroll=1):
            cute.copy(
                self.atom, self.tiles[None, first + load, k_tile, group], self.slots[None, load, 0, position.index],
                tma_bar_ptr=barrier,
            )  # fmt: skip

    def finish(self) -> None:
        """Nothing: the multiplying warps wait for every copy."""


def trimmed_width(shape: KernelShape, rows: Any) -> Any:
    """Tokens of a tile that are loaded and multiplied: the least width that holds ``rows`` of them."""
    width = Int32(shape.token_tile)
    for narrower in reversed(shape.widths[:-1]):
        width = cutlass.select_(rows <= narrower, Int32(narrower), width)
    return width


VECTOR_BYTES = 16
"""Bytes of one cp.async."""
ROW_VECTORS = TILE_K * 2 // VECTOR_BYTES
"""Vectors of a token in a stage: half as many as a warp has lanes."""
ROWS_AT_ONCE = WARP_LANES // ROW_VECTORS
SWIZZLED_UNITS = SWIZZLED_BYTES // VECTOR_BYTES


@dataclass(frozen=True)
class GatheredLoads(Fixed):
    """Loads of weights by TMA, and by cp.async of tokens from the rows of an unsorted matrix, two rows at a time.

    Rows of a tile that hold no token are not loaded: nobody reads their results. The barrier of a stage expects an
    arrival of each lane, made when its copies are done, and one for the weights. TMA row by row takes twice as long for
    gate and up of one token: each copy of 128 bytes is an instruction of the whole warp.

    Attributes:
        tokens: shared address of the stages' tokens. source: global address of the matrix; row_bytes: of its rows, from
            one to the next. k: its columns.
        sources: int32 global tensor [rows]: the row of the matrix that is each row's token; negative for none.
        lane: of this thread.
    """

    shape: KernelShape
    weights: WeightLoad
    tokens: Any
    source: Any
    row_bytes: Any
    k: Any
    sources: Any
    lane: Any

    @property
    def finds_early(self) -> bool:
        return True

    def load_weights(self, ring: Ring, position: Any, feature_tile: Any, k_tile: Any, group: Any) -> None:
        """Announce the bytes of a stage's weights and load them."""
        barrier = ring.full + position.index
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.shape.tile_bytes)
        self.weights.load(group, feature_tile, k_tile, position.index, barrier)

    def find(self, token_tile: Any, weight_group: Any) -> tuple[Any, ...]:
        """The rows whose vectors this lane loads, negative for none."""
        # A CTA without a tile asks for whatever it takes for its first.
        last = cute.size(self.sources) // self.shape.token_tile - 1
        tile = cutlass.max(cutlass.min(token_tile, last), 0)
        first = tile * self.shape.token_tile + self.lane // ROW_VECTORS
        return tuple(self.sources[first + row] for row in range(0, self.shape.token_tile, ROWS_AT_ONCE))

    def load_tokens(self, ring: Ring, position: Any, token_rows: Any, k_tile: Any, group: Any) -> None:
        """Load a stage's tokens."""
        vector, first = self.lane % ROW_VECTORS, self.lane // ROW_VECTORS
        column = k_tile * TILE_K + vector * (VECTOR_BYTES // 2)
        begin = self.source + Int64(column) * 2
        valid = cutlass.min(cutlass.max((self.k - column) * 2, 0), VECTOR_BYTES)
        half, unit = vector // SWIZZLED_UNITS, vector % SWIZZLED_UNITS
        staged = self.tokens + position.index * self.shape.token_bytes
        for i, taken in enumerate(token_rows):
            row = first + i * ROWS_AT_ONCE
            offset = (half * self.shape.token_tile + row) * SWIZZLED_BYTES
            offset += (unit ^ (row % SWIZZLED_UNITS)) * VECTOR_BYTES
            cute.arch.inline_ptx(
                "{ .reg .pred p; setp.ge.s32 p, {$r3}, 0;"
                " @p cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2}; }",
                read_only_args=[
                    Uint32(staged + offset), begin + Int64(taken) * self.row_bytes, Uint32(valid), Int32(taken)
                ],
            )  # fmt: skip
        cute.arch.inline_ptx(
            "cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];",
            read_only_args=[Uint32((ring.full + position.index).toint())],
        )

    def finish(self) -> None:
        """Wait for the copies of this lane."""
        cute.arch.inline_ptx("cp.async.wait_all;")
