"""Which tokens go to which expert, in the tables that FlashInfer's MoE kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOP_K = 2


@dataclass(frozen=True)
class Routing:
    """Rows of all experts, each expert's padded to whole tiles.

    Attributes:
        counts: tokens of each expert.
        starts: each expert's first row.
        expanded: by row, token · TOP_K + the place of the expert among those of the token; −1 for padding.
        tile_expert: by tile of rows, the expert.
        tile_limit: by tile of rows, the end of its rows that are no padding.
    """

    tokens: int
    counts: tuple[int, ...]
    starts: np.ndarray
    expanded: np.ndarray
    tile_expert: np.ndarray
    tile_limit: np.ndarray

    @classmethod
    def random(cls, counts: Sequence[int], rows: int) -> Routing:
        """Random tokens for experts with ``counts`` of them, in tiles of ``rows``."""
        random = np.random.default_rng(5)
        tokens = max(counts) + 7
        tiles = [-(-count // rows) for count in counts]
        starts = np.concatenate(([0], np.cumsum(tiles)[:-1])) * rows
        expanded, limit = np.full(sum(tiles) * rows, -1, np.int32), np.zeros(sum(tiles), np.int32)
        for start, count, number in zip(starts, counts, tiles, strict=True):
            places = random.integers(0, TOP_K, count)
            expanded[start : start + count] = random.permutation(tokens)[:count] * TOP_K + places
            for step in range(number):
                limit[start // rows + step] = start + min(count, (step + 1) * rows)
        experts = np.repeat(np.arange(len(counts), dtype=np.int32), tiles)
        return cls(tokens, tuple(counts), starts, expanded, experts, limit)

    @property
    def tile_count(self) -> np.ndarray:
        """The number of tiles, as kernels take it."""
        return np.array([len(self.tile_expert)], np.int32)

    def rows(self, expert: int) -> slice:
        """An expert's rows without padding."""
        return slice(self.starts[expert], self.starts[expert] + self.counts[expert])


def aligned(buffer: np.ndarray, to: int = 32) -> np.ndarray:
    """A copy that begins at a multiple of ``to``."""
    room = np.zeros(buffer.nbytes + to, np.uint8)
    start = -room.ctypes.data % to
    copy = room[start : start + buffer.nbytes].view(buffer.dtype).reshape(buffer.shape)
    copy[...] = buffer
    return copy
