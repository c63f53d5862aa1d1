"""How long a Hopper kernel takes, by a model with figures measured on an H200; plain Python.

Measured (2026-11-22, graph replay, weights rotated through more than L2, one CTA an SM): what a tile costs beside its
stages, what splitting K costs, and a stage of 128 of K by token tile: 0.42 µs up to 16 tokens, scaled here by the
instructions that the main loop has lost since (220 to 173). Estimated from the count of instructions and from the
tensor core's rate: the time that a stage keeps an SM busy, which bounds CTAs that share it. The figures rank shapes;
they are not a promise.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.clusters import Clusters
from .layout import TILE_BYTES, TILE_K, TILE_ROWS
from .shape import KernelShape

STAGE_US = {8: 0.33, 16: 0.33, 32: 0.36, 64: 0.50, 128: 0.72, 256: 1.17}
"""A stage of a CTA that has its SM to itself."""
BUSY_US = {8: 0.20, 16: 0.20, 32: 0.25, 64: 0.40, 128: 0.60, 256: 1.17}
"""The part of a stage in which an SM's issue slots or its tensor core are taken; an estimate."""
TILE_US = {8: 0.3, 16: 0.3, 32: 0.5, 64: 0.8, 128: 2.0, 256: 4.5}
"""A tile's epilogue, which its warps do not overlap with the next tile's stages."""
LAUNCH_US = 1.0
"""A launch that overlaps its neighbours'."""
SPLIT_US = {1: 0.0, 2: 1.0, 4: 1.0, 8: 2.0}
"""Clusters, and the exchange of partial sums."""
BYTES_PER_US = 4.25e6
"""Bandwidth of a copy on an H200, bytes read and written."""


@dataclass(frozen=True)
class Problem:
    """A GEMM, or as many of one shape.

    Attributes:
        features: weight rows of one matrix. k: K.
        rows: token rows that every matrix takes; for experts token-expert pairs in all.
        matrices: groups, or experts.
        is_routed: whether rows are pairs, spread evenly over experts.
    """

    features: int
    k: int
    rows: int
    matrices: int = 1
    is_routed: bool = False

    @property
    def visited(self) -> float:
        """Matrices that have rows; of experts the mean for random pairs."""
        if not self.is_routed:
            return self.matrices
        return self.matrices * (1 - (1 - 1 / self.matrices) ** self.rows)

    def token_tiles(self, tile: int) -> float:
        """Token tiles of all matrices together."""
        if not self.is_routed:
            return -(-self.rows // tile) * self.matrices
        return self.visited * -(-(self.rows / self.visited) // tile)


def microseconds(shape: KernelShape, problem: Problem, clusters: Clusters) -> float:
    """The modelled time of a launch."""
    tile, stages = shape.token_tile, -(-problem.k // TILE_K)
    tiles = max(1, round(-(-problem.features // TILE_ROWS) * problem.token_tiles(tile)))
    running = min(tiles, clusters.of(shape.cluster) * shape.ctas_per_sm)
    sharing = min(shape.ctas_per_sm, -(-running * shape.cluster // clusters.multiprocessors))
    stage = max(STAGE_US[tile], sharing * BUSY_US[tile])
    turns = -(-tiles // running)
    multiplying = turns * (-(-stages // shape.split_k) * stage + TILE_US[tile])
    weight_bytes = problem.visited * -(-problem.features // TILE_ROWS) * stages * TILE_BYTES
    return LAUNCH_US + SPLIT_US[shape.split_k] + max(multiplying, weight_bytes / BYTES_PER_US)
