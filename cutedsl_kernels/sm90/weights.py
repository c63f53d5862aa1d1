"""How weight tiles travel: one bulk copy to shared memory, then 16-byte loads of a lane's own codes and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ..common.cache_policy import EVICT_FIRST
from ..common.fixed import Fixed
from ..common.shape import WARP_LANES
from .layout import CODE_BYTES, TILE_BYTES

VECTOR = 16
"""Bytes of a lane's load."""
HALF_BYTES = WARP_LANES * VECTOR
"""Codes of a warp in half a tile."""
WARP_SCALE_BYTES = 8 * VECTOR


@dataclass(frozen=True)
class WeightLoad(Fixed):
    """Bulk copies of tiles.

    Attributes:
        tiles: global pointer to tiles [groups, feature tiles, K tiles, TILE_BYTES].
        slots: shared pointer to the stages' tiles.
        once: whether nobody reads a tile again: then it shall leave L2 first.
    """

    tiles: Any
    slots: Any
    feature_tiles: Any
    k_tiles: Any
    once: bool

    def load(self, group: Any, feature_tile: Any, k_tile: Any, slot: Any, barrier: Any) -> None:
        """Fill ``slot``; by one thread. ``barrier`` counts the bytes."""
        index = (Int64(group) * self.feature_tiles + feature_tile) * self.k_tiles + k_tile
        hint, policy = (".L2::cache_hint", ", {$r3}") if self.once else ("", "")
        cute.arch.inline_ptx(
            f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint}"
            f" [{{$r0}}], [{{$r1}}], {TILE_BYTES}, [{{$r2}}]{policy};",
            read_only_args=[
                Uint32((self.slots + Int32(slot) * TILE_BYTES).toint()),
                Int64(self.tiles.toint()) + index * TILE_BYTES,
                Uint32(barrier.toint()),
                *([Int64(EVICT_FIRST)] if self.once else []),
            ],
        )


def load_half(tile: Any, warp: Any, lane: Any, half: int) -> tuple[Any, Any]:
    """A lane's words of half a tile: four of codes; two of scales, one for each pair of steps."""
    codes = _load(tile + ((warp * 2 + half) * HALF_BYTES + lane * VECTOR), VECTOR)
    scales = tile + (CODE_BYTES + warp * WARP_SCALE_BYTES + lane // 4 * VECTOR + half * (VECTOR // 2))
    return codes, _load(scales, VECTOR // 2)


def _load(source: Any, count: int) -> cute.Tensor:
    """``count`` bytes, aligned to as many, as words."""
    words = cute.make_rmem_tensor((count // 4,), Uint32)
    # ``source.align`` would round the address up at run time.
    pointer = cute.make_ptr(Uint32, source.toint(), source.memspace, assumed_align=count)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count // 4)), words)
    return words
