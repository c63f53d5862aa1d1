"""w4a16 products on the Hopper kernel, executed in the emulator, against fp64."""

from __future__ import annotations

import pytest

from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from tests.sm90.support.products import ProductCase
from tests.sm100.emulator import Options

CASES = [
    # Decode: one token to a full tile; features and K that fill no tile.
    ProductCase(KernelShape(8), tokens=1, features=200, k=576),
    ProductCase(KernelShape(8), tokens=7, features=136, k=64, wider=24),
    ProductCase(KernelShape(32, output="fp32"), tokens=17, features=68, k=64, wider=8),
    # Several token tiles.
    ProductCase(KernelShape(64), tokens=70, features=72, k=64),
    ProductCase(KernelShape(256), tokens=256, features=16, k=64),
    # Groups, K split over a cluster.
    ProductCase(KernelShape(8), tokens=5, features=136, k=192, groups=2),
    ProductCase(KernelShape(8, split_k=2), tokens=8, features=72, k=320),
    ProductCase(KernelShape(16, split_k=4, output="fp32"), tokens=10, features=68, k=576),
    ProductCase(KernelShape(8, split_k=3, max_ctas=1), tokens=5, features=136, k=640),
    ProductCase(KernelShape(32, split_k=3, output="fp32"), tokens=30, features=68, k=512, groups=2),
]


def name(case: ProductCase) -> str:
    split = f"split {case.shape.split_k} " * (case.shape.split_k > 1)
    groups = f" x{case.groups}" * (case.groups > 1)
    return f"{split}{case.shape.token_tile} {case.shape.output} {case.tokens}x{case.features}x{case.k}{groups}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_equals_fp64_after_rounding(case: ProductCase) -> None:
    case.check()


@pytest.mark.parametrize("clusters", [1, 3, 5])
def test_persistent_clusters_share_the_tiles(clusters: int) -> None:
    """Some begin in the second group, and one has no tile: it loads nothing, not even before the previous kernel ends.

    Nine bytes for sixteen weights, and the tokens, are loaded once for each of the four tiles.
    """
    case = ProductCase(KernelShape(8), tokens=8, features=2 * 128, k=128, groups=2)
    statistics = case.check(Options(overlap=True), clusters=clusters)
    assert statistics.engine_bytes["tma_load"] == 4 * (128 * 128 * 9 // 16 + 8 * 128 * 2)


def test_a_split_cluster_works_on_several_tiles() -> None:
    """Partial sums of the next tile wait until those of the last are added up."""
    ProductCase(KernelShape(8, split_k=2), tokens=8, features=3 * 128, k=256).check(Options("random", 4))


def test_bytes_loaded_are_the_operands_once() -> None:
    """Nine bytes for sixteen weights; tokens once for each tile of features."""
    statistics = ProductCase(KernelShape(8), tokens=8, features=256, k=384).check()
    assert statistics.engine_bytes["tma_load"] == 256 * 384 * 9 // 16 + 2 * 8 * 384 * 2
    assert statistics.engine_bytes["tma_store"] == 8 * 256 * 2


def test_a_slice_of_k_needs_a_stage() -> None:
    with pytest.raises(ValueError, match="split_k 4: K = 384 has only 3 stages"):
        ProductCase(KernelShape(8, split_k=4), tokens=8, features=128, k=384).build()


def test_impossible_shapes_are_refused() -> None:
    for token_tile, split_k in ((24, 1), (8, 5), (128, 2)):
        with pytest.raises(ValueError, match="expected|is for"):
            KernelShape(token_tile, split_k=split_k)
    with pytest.raises(ValueError, match="expected"):
        KernelShape(8, output="nvfp4")
