"""TMA loads from tiles of global memory to slots of shared memory: those of one operand, and those of a stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from ..common.fixed import Fixed
from ..common.ring import Ring


@dataclass(frozen=True)
class OperandLoad(Fixed):
    """Loads of one operand.

    Attributes:
        slots: shared tensor (values, slot), ``tiles``: global tensor (values, tile, K tile, matrix).
        mask: CTAs of the cluster that receive the data, or None.
        policy: L2 cache policy, or None.
    """

    atom: Any
    slots: Any
    tiles: Any
    mask: Any
    policy: Any

    @classmethod
    def create(
        cls,
        atom: Any,
        partition: Any,
        tensor: Any,
        tile: Any,
        shared: Any,
        ctas: Any,
        mode: int,
        rank: Any,
        policy: Any,
    ) -> OperandLoad:  # fmt: skip
        """Partition ``tensor`` by ``tile`` and MMA slice, for CTA ``rank`` of a cluster laid out as ``ctas``.

        ``mode`` is the cluster's dimension along which CTAs share this operand: 2 for A, 1 for B. A CTA of a pair
        loads its part and, where both need all of it (block scales of B), sends it to both.
        """
        coordinates = ctas.get_flat_coord(rank)
        sharing = [0, None, 0, 0] if mode == 1 else [0, 0, None, 0]
        pieces = cute.make_layout(cute.slice_(ctas, tuple(sharing)).shape)
        parts = partition(cute.local_tile(tensor, tile, (None, None, None)))
        slots, tiles = cpasync.tma_partition(
            atom, coordinates[mode], pieces, cute.group_modes(shared, 0, 3), cute.group_modes(parts, 0, 3)
        )
        mask = None
        if cute.size(ctas) > 1:
            mask = cpasync.create_tma_multicast_mask(ctas, coordinates, mcast_mode=mode)
        return cls(atom, cute.filter_zeros(slots), cute.filter_zeros(tiles), mask, policy)

    def load(self, tile: Any, k_tile: Any, matrix: Any, slot: Any, barrier: Any) -> None:
        """Fill ``slot``; ``barrier`` counts the bytes."""
        cute.copy(
            self.atom, self.tiles[None, tile, k_tile, matrix], self.slots[None, slot],
            tma_bar_ptr=barrier, mcast_mask=self.mask, cache_policy=self.policy,
        )  # fmt: skip


@dataclass(frozen=True)
class StageLoads(Fixed):
    """Loads of all operands of a stage.

    Attributes:
        weights, tokens: the loads of codes, and of their block scales.
        peer: this CTA's number in its pair; the first one announces the bytes of both.
        bytes: of the stage, in all CTAs that the first one's barrier stands for.
    """

    weights: tuple[OperandLoad, OperandLoad]
    tokens: tuple[OperandLoad, OperandLoad]
    peer: Any
    bytes: int

    @property
    def finds_early(self) -> bool:
        return False

    @cute.jit
    def load_weights(self, ring: Ring, position: Any, feature_tile: Any, k_tile: Any, group: Any):
        """Announce a stage's bytes and load its weights."""
        barrier = ring.full + position.index
        if self.peer == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.bytes)
        for load in self.weights:
            load.load(feature_tile, k_tile, group, position.index, barrier)

    def find(self, token_tile: Any, weight_group: Any) -> Any:
        return token_tile

    def load_tokens(self, ring: Ring, position: Any, token_rows: Any, k_tile: Any, group: Any) -> None:
        """Load a stage's tokens."""
        for load in self.tokens:
            load.load(token_rows, k_tile, group, position.index, ring.full + position.index)

    def finish(self) -> None:
        """Nothing: the multiplying warp waits for every copy."""
