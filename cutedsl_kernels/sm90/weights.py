"""How weight tiles travel: one bulk copy to shared memory, then loads of a lane's own codes and scales or factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ..common.cache_policy import EVICT_FIRST
from ..common.fixed import Fixed
from ..common.shape import WARP_LANES
from .fp8_layout import FP8_CODE_BYTES
from .layout import CODE_BYTES

HALF_WORDS = {"nvfp4": 6, "fp8": 9}
"""Words of a lane's part of half a tile, by how weights are stored."""
VECTOR = 16
"""Bytes of a lane's load."""
HALF_BYTES = WARP_LANES * VECTOR
"""Codes of a warp in half a tile of NVFP4, or in a quarter of one of FP8."""
WARP_SCALE_BYTES = 8 * VECTOR
FP8_FACTOR_BYTES = 8 * 4
"""Factors of a warp in half a tile of FP8."""


@dataclass(frozen=True)
class WeightLoad(Fixed):
    """Bulk copies of tiles.

    Attributes:
        tiles: global pointer to tiles [groups, feature tiles, K tiles, tile_bytes].
        slots: shared pointer to the stages' tiles.
        tile_bytes: of a tile.
        once: whether nobody reads a tile again: then it shall leave L2 first.
    """

    tiles: Any
    slots: Any
    feature_tiles: Any
    k_tiles: Any
    tile_bytes: int
    once: bool

    def load(self, group: Any, feature_tile: Any, k_tile: Any, slot: Any, barrier: Any) -> None:
        """Fill ``slot``; by one thread. ``barrier`` counts the bytes."""
        index = (Int64(group) * self.feature_tiles + feature_tile) * self.k_tiles + k_tile
        hint, policy = (".L2::cache_hint", ", {$r3}") if self.once else ("", "")
        cute.arch.inline_ptx(
            f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint}"
            f" [{{$r0}}], [{{$r1}}], {self.tile_bytes}, [{{$r2}}]{policy};",
            read_only_args=[
                Uint32((self.slots + Int32(slot) * self.tile_bytes).toint()),
                Int64(self.tiles.toint()) + index * self.tile_bytes,
                Uint32(barrier.toint()),
                *([Int64(EVICT_FIRST)] if self.once else []),
            ],
        )


def load_half(tile: Any, warp: Any, lane: Any, half: int) -> list[Any]:
    """A lane's words of half a tile of NVFP4: four of codes; two of scales, one for each pair of steps."""
    codes = tile + ((warp * 2 + half) * HALF_BYTES + lane * VECTOR)
    scales = tile + (CODE_BYTES + warp * WARP_SCALE_BYTES + lane // 4 * VECTOR + half * (VECTOR // 2))
    return _load(codes, VECTOR) + _load(scales, VECTOR // 2)


def load_fp8_half(tile: Any, warp: Any, lane: Any, half: int) -> list[Any]:
    """A lane's words of half a tile of FP8: two times four of codes; the factors of its two rows in one word."""
    first = tile + (warp * 2 + half) * (2 * HALF_BYTES) + lane * VECTOR
    factors = tile + (FP8_CODE_BYTES + (warp * 2 + half) * FP8_FACTOR_BYTES + lane // 4 * 4)
    return _load(first, VECTOR) + _load(first + HALF_BYTES, VECTOR) + _load(factors, 4)


def _load(source: Any, count: int) -> list[Any]:
    """``count`` bytes, aligned to as many, as words."""
    words = cute.make_rmem_tensor((count // 4,), Uint32)
    # ``source.align`` would round the address up at run time.
    pointer = cute.make_ptr(Uint32, source.toint(), source.memspace, assumed_align=count)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count // 4)), words)
    return [words[i] for i in range(count // 4)]
