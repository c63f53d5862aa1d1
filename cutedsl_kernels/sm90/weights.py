"""Loads of weight tiles: one copy by TMA to shared memory, then a lane's own codes and scales or factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int64, Uint32
from cutlass.cute.nvgpu import cpasync

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


WORD_BYTES, MAX_BOX = 4, 256
"""A word of a tile, and most of them along a dimension of a tensor copy."""


def tile_box(tile_bytes: int) -> tuple[int, int]:
    """A tile as rows of words, as few as a tensor copy may have: (rows, words of a row)."""
    words = next(words for words in (MAX_BOX, MAX_BOX // 2) if tile_bytes % (words * WORD_BYTES) == 0)
    return tile_bytes // (words * WORD_BYTES), words


def tile_layout(tile_bytes: int, count: Any) -> Any:
    """Layout of ``count`` tiles, one after the other, in words."""
    rows, words = tile_box(tile_bytes)
    return cute.make_layout((rows * count, words), stride=(words, 1))


@dataclass(frozen=True)
class WeightLoad(Fixed):
    """Copies of whole tiles by TMA.

    Uses a tensor map although a tile is contiguous: compute-sanitizer's racecheck does not follow copies by raw
    address.

    Attributes:
        slots: shared tensor (values, slot). tiles: global tensor (values, tile); tiles are numbered by group, feature
            tile and K tile.
        policy: L2 cache policy, or None.
    """

    atom: Any
    slots: Any
    tiles: Any
    feature_tiles: Any
    k_tiles: Any
    policy: Any

    @classmethod
    def create(
        cls, atom: Any, weights: Any, slots: Any, tile_bytes: int, stages: int, feature_tiles: Any, k_tiles: Any,
        once: bool,
    ) -> WeightLoad:  # fmt: skip
        """Partition the global tensor ``weights`` and the stages' tiles, which begin at ``slots``.

        Args:
            once: whether no CTA reads a tile again; L2 then evicts it first.
        """
        rows, words = tile_box(tile_bytes)
        words_in_all = cute.recast_ptr(slots, dtype=Uint32)
        staged = cute.make_tensor(
            words_in_all, cute.make_layout((rows, words, stages), stride=(words, 1, rows * words))
        )
        tiles = cute.local_tile(weights, (rows, words), (None, 0))
        parts, tiles = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return cls(atom, parts, tiles, feature_tiles, k_tiles, Int64(EVICT_FIRST) if once else None)

    def load(self, group: Any, feature_tile: Any, k_tile: Any, slot: Any, barrier: Any) -> None:
        """Fill ``slot``; by one warp. ``barrier`` counts the bytes."""
        index = (group * self.feature_tiles + feature_tile) * self.k_tiles + k_tile
        cute.copy(
            self.atom, self.tiles[None, index], self.slots[None, slot], tma_bar_ptr=barrier, cache_policy=self.policy
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
