"""The loads of a stage: a tile of weights by one bulk copy, its tokens by TMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
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

    def load_tokens(self, ring: Ring, position: Any, token_tile: Any, k_tile: Any, group: Any) -> None:
        """Load a stage's tokens."""
        cute.copy(
            self.atom, self.tiles[None, token_tile, k_tile, group], self.slots[None, position.index],
            tma_bar_ptr=ring.full + position.index, cache_policy=self.policy,
        )  # fmt: skip
