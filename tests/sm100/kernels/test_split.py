"""The reduction of a split-K cluster, one tile after the other on the same cluster."""

from __future__ import annotations

import pytest

from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Options
from tests.sm100.support.products import ExpertCase, ProductCase
from tests.support.full import but_for, full

SHARED = [(tile, split, clusters) for tile, split in ((8, 4), (16, 8), (64, 2)) for clusters in (1, 2, 3)]


@pytest.mark.parametrize(
    ("token_tile", "split", "clusters"), but_for(SHARED, (8, 4, 1), (16, 8, 2), (16, 8, 3), (64, 2, 1), (64, 2, 3))
)
def test_clusters_take_tile_after_tile(token_tile: int, split: int, clusters: int) -> None:
    """The next tile's sums must not overwrite what an owner has still to add."""
    case = ProductCase(KernelShape(token_tile, split_k=split), 2 * token_tile, 264, 256 * split)
    case.check(Options("random", clusters, strict_tensor_waits=True), clusters)


@pytest.mark.parametrize("clusters", [*full(1), 3])
def test_experts_share_clusters(clusters: int) -> None:
    shape = KernelShape(8, gated=True, grouped=True, split_k=4, output="nvfp4")
    case = ExpertCase(shape, (3, 0, 9, 8), features=160, k=1024)
    case.check(Options("random", 4, strict_tensor_waits=True), clusters)
