"""Model of a Hopper kernel's time, with constants measured on an H200; plain Python.

Up to 64 tokens a tile the constants are fitted to decode steps of Flash's first layers, measured for each kernel shape
of each GEMM (``launch/results/hopper_step_h200.json``). What a shape costs over the best one, up to 6 µs, the model
meets within 1.3 µs for half of the shapes. It ranks shapes; it does not predict the time of a launch alone. For wider
tiles the constants are those of ``launch/results/hopper_gemm_h200.md``. The constants of tiles of 8 and 16 tokens were
fitted with wgmma, which mma.sync replaced. The shapes that they choose are as fast in a step as the best
(``launch/results/hopper_step_mma_sync_h200.json``). Experts' tiles of 16 use wgmma again. All constants are NVFP4's.
FP8 weights are assumed to have the same, but for the bytes of a tile.

Clusters take tiles in waves. In a wave a CTA is bound by its own chain of stages, epilogue and exchange, or by its SM,
which expands weights and exchanges sums for all of its CTAs. Reading weights again for other token tiles costs no
measurable time: it hides behind their expansion.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.clusters import Clusters
from .layout import TILE_K, TILE_ROWS
from .shape import KernelShape

LAUNCH_US = 1.1
"""A launch that overlaps its neighbours'."""
STAGE_US = {8: 0.295, 16: 0.32, 32: 0.375, 64: 0.39, 128: 0.72, 256: 1.17}
"""A stage of 128 of K of a CTA that has its SM to itself, by token tile."""
BUSY_US = {8: 0.275, 16: 0.315, 32: 0.375, 64: 0.38, 128: 0.72, 256: 1.17}
"""The part of a stage that an SM cannot give to another CTA at the same time. CTAs of the two widest tiles do not share
an SM."""
TILE_US = {8: 0.06, 16: 0.05, 32: 0.7, 64: 1.8, 128: 2.0, 256: 4.5}
"""A tile's epilogue, which its warps do not overlap with the next tile's stages."""
EXCHANGE_US = {1: 0.0, 2: 0.8, 3: 1.03, 4: 1.28, 8: 0.7}
"""The exchange of a tile's partial sums in a cluster, by split of K."""
EXCHANGE_TOKEN_US = {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 8: 0.05}
"""What each token of the tile adds to that."""
PACKED = 0.9
"""How full a launch makes the SMs when one of them is full. CTAs do not spread evenly over SMs that hold those of other
launches, too: of kernels that put three CTAs on an SM, 64 took 1.3 to 2.3 times as long as 32."""
BYTES_PER_US = 4.24e6
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
    stages = -(-problem.k // TILE_K)
    feature_tiles = -(-problem.features // TILE_ROWS)
    tiles = max(1, round(feature_tiles * problem.token_tiles(shape.token_tile)))
    places = clusters.multiprocessors * shape.ctas_per_sm
    full_turns, rest = divmod(tiles, clusters.of(shape.cluster) * shape.ctas_per_sm)
    multiplying = full_turns * _turn(shape, stages, shape.ctas_per_sm)
    if rest:
        packed = min(1.0, rest * shape.cluster / places / PACKED)
        multiplying += _turn(shape, stages, 1 + (shape.ctas_per_sm - 1) * packed)
    weight_bytes = problem.visited * feature_tiles * stages * shape.tile_bytes
    return LAUNCH_US + max(multiplying, weight_bytes / BYTES_PER_US)


def _turn(shape: KernelShape, stages: int, sharing: float) -> float:
    """The time of a tile, of ``stages`` of K, where ``sharing`` CTAs share the fullest SM."""
    tile, split, own_stages = shape.token_tile, shape.split_k, -(-stages // shape.split_k)
    finishing = TILE_US[tile] + EXCHANGE_US[split] + EXCHANGE_TOKEN_US[split] * tile
    alone, busy = (own_stages * stage[tile] + finishing for stage in (STAGE_US, BUSY_US))
    return max(alone, sharing * busy)
