"""The loads of a stage by TMA: a tile of weights, and its tokens as a tile or row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ..common.fixed import Fixed
from ..common.ring import Ring
from .layout import TILE_K
from .shape import KernelShape
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

    def load_weights(self, ring: Ring, position: Any, feature_tile: Any, k_tile: Any, group: Any) -> None:
        """Announce a stage's bytes and load its weights."""
        barrier = ring.full + position.index
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.shape.stage_bytes)
        self.weights.load(group, feature_tile, k_tile, position.index, barrier)

    def find(self, token_tile: Any) -> Any:
        return token_tile

    def load_tokens(self, ring: Ring, position: Any, place: Any, k_tile: Any, group: Any) -> None:
        """Load a stage's tokens."""
        cute.copy(
            self.atom, self.tiles[None, place, k_tile, group], self.slots[None, position.index],
            tma_bar_ptr=ring.full + position.index, cache_policy=self.policy,
        )  # fmt: skip


ROW_K = 64
"""Elements of K of one copy: a row of the swizzled tile."""
ROW_LAYOUT = (1, ROW_K)


def row_layout() -> Any:
    """Layout of one copy in shared memory. Its place says how it is swizzled: by the row of 128 bytes that it is."""
    return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout(ROW_LAYOUT, stride=(ROW_K, 1)))


@dataclass(frozen=True)
class GatheredLoads(Fixed):
    """Loads of weights, and of tokens from the rows of an unsorted matrix, each by copies of its own.

    Rows of a tile that hold no token are not loaded: their results are nobody's.

    Attributes:
        place: shared pointer to the stages' tokens. slot: layout of a copy there.
        tiles: global tensor (values, row, K in steps of ROW_K, group).
        sources: int32 global tensor [rows]: the row of the matrix that is each row's token; negative for none.
        lane: of this thread.
    """

    shape: KernelShape
    weights: WeightLoad
    atom: Any
    place: Any
    slot: Any
    tiles: Any
    sources: Any
    lane: Any

    @classmethod
    def create(
        cls, shape: KernelShape, weights: WeightLoad, atom: Any, tokens: Any, place: Any, sources: Any, lane: Any
    ) -> GatheredLoads:
        """Partition the global tensor ``tokens``."""
        tiles = cute.local_tile(tokens, ROW_LAYOUT, (None, None, None))
        row = cute.make_tensor(place, cute.make_layout(ROW_LAYOUT, stride=(ROW_K, 1)))
        slot, tiles = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(row, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return cls(shape, weights, atom, place, slot.layout, tiles, sources, lane)

    def load_weights(self, ring: Ring, position: Any, feature_tile: Any, k_tile: Any, group: Any) -> None:
        """Announce the bytes of a stage's weights and load them."""
        barrier = ring.full + position.index
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(barrier, self.shape.tile_bytes)
        self.weights.load(group, feature_tile, k_tile, position.index, barrier)

    def find(self, token_tile: Any) -> tuple[Any, Any]:
        """This lane's source, and how many rows hold a token."""
        tile = self.shape.token_tile
        source = self.sources[token_tile * tile + cutlass.min(self.lane, tile - 1)]
        source = cutlass.select_(self.lane < tile, source, Int32(-1))
        return source, cute.arch.popc(cute.arch.vote_ballot_sync(source >= 0))

    @cute.jit
    def load_tokens(self, ring: Ring, position: Any, place: Any, k_tile: Any, group: Any):
        """Announce the bytes of a stage's tokens and load them."""
        source, count = place
        barrier = ring.full + position.index
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, count * (TILE_K * 2))
        staged = self.place + position.index * (self.shape.token_tile * TILE_K)
        for row in cutlass.range(self.shape.token_tile, unroll=1):
            taken = cute.arch.shuffle_sync(source, row)
            if taken >= 0:
                for half in cutlass.range_constexpr(TILE_K // ROW_K):
                    target = staged + (half * self.shape.token_tile + row) * ROW_K
                    cute.copy(
                        self.atom, self.tiles[None, taken, k_tile * (TILE_K // ROW_K) + half, 0],
                        cute.make_tensor(target, self.slot), tma_bar_ptr=barrier,
                    )  # fmt: skip
