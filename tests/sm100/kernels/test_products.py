"""Plain and batched products on the SM100 kernel, executed in the emulator, against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Options
from tests.sm100.support.products import ProductCase
from tests.support.full import full

STRICT = Options(strict_tensor_waits=True)

DENSE = [
    # Decode: one token to a full narrow tile, features and K that fill no tile.
    ProductCase(KernelShape(8), tokens=1, features=200, k=576),
    ProductCase(KernelShape(8, output="fp32"), tokens=8, features=136, k=64),
    ProductCase(KernelShape(16), tokens=9, features=264, k=320),
    ProductCase(KernelShape(32), tokens=31, features=128, k=832),
    ProductCase(KernelShape(64), tokens=33, features=72, k=256),
    # Several token tiles.
    ProductCase(KernelShape(128), tokens=131, features=264, k=576),
    ProductCase(KernelShape(128, pair=True), tokens=140, features=392, k=320),
    ProductCase(KernelShape(256), tokens=300, features=136, k=320),
    ProductCase(KernelShape(256, pair=True), tokens=270, features=264, k=320),
    # Pairs that share operands by multicast; blocks of tiles that reach beyond the output.
    ProductCase(KernelShape(128, pair=True, shared_tokens=2), tokens=131, features=600, k=192),
    ProductCase(KernelShape(128, pair=True, shared_weights=2), tokens=131, features=264, k=320),
    ProductCase(KernelShape(256, pair=True, shared_tokens=2, shared_weights=2), tokens=300, features=264, k=64),
    ProductCase(KernelShape(128, pair=True, shared_tokens=4), tokens=128, features=1032, k=64),
]
SPLIT = [
    ProductCase(KernelShape(8, split_k=2), tokens=3, features=136, k=576),
    ProductCase(KernelShape(16, split_k=4), tokens=16, features=256, k=1088),
    ProductCase(KernelShape(32, split_k=8, output="fp32"), tokens=7, features=72, k=2112),
    ProductCase(KernelShape(64, split_k=2), tokens=64, features=136, k=512),
]
BATCHED = [
    ProductCase(KernelShape(8), tokens=5, features=136, k=320, groups=3),
    ProductCase(KernelShape(128, pair=True), tokens=130, features=256, k=128, groups=2),
    ProductCase(KernelShape(16, split_k=2), tokens=10, features=128, k=512, groups=2),
]
LARGER = [
    ProductCase(KernelShape(256, pair=True, output="fp32"), tokens=257, features=520, k=256),
    ProductCase(KernelShape(256, pair=True, shared_tokens=2, shared_weights=2), tokens=300, features=520, k=128),
    ProductCase(KernelShape(32, split_k=8), tokens=20, features=128, k=2112),
    ProductCase(KernelShape(64, split_k=4, output="fp32"), tokens=50, features=200, k=1024),
]


def name(case: ProductCase) -> str:
    kind = f"{case.shape.shared_tokens}x{case.shape.shared_weights} pairs " * case.shape.pair
    kind += f"split {case.shape.split_k} " * (case.shape.split_k > 1)
    groups = f" x{case.groups}" * (case.groups > 1)
    return f"{kind}{case.shape.token_tile} {case.shape.output} {case.tokens}x{case.features}x{case.k}{groups}"


@pytest.mark.parametrize("case", [*DENSE, *SPLIT, *BATCHED, *full(*LARGER)], ids=name)
def test_equals_fp64_after_rounding(case: ProductCase) -> None:
    case.check(STRICT)


@pytest.mark.parametrize("k", [64, 128, 192, 256, 320, 448])
def test_any_tail_of_k(k: int) -> None:
    ProductCase(KernelShape(8), tokens=2, features=128, k=k).check(STRICT)


@pytest.mark.parametrize("tokens", [1, 7, 8])
@pytest.mark.parametrize("features", [8, 64, 120, 128, 136])
def test_any_tail_of_tokens_and_features(tokens: int, features: int) -> None:
    ProductCase(KernelShape(8), tokens=tokens, features=features, k=128).check(STRICT)


@pytest.mark.parametrize("clusters", [1, 2, 5, 7])
def test_persistent_clusters_share_the_tiles(clusters: int) -> None:
    """Six tiles of two groups on one to seven clusters: some begin in the second group, the last has no tile.

    It loads nothing: the bytes of operands and scales are those of six tiles.
    """
    case = ProductCase(KernelShape(8), tokens=8, features=3 * 128, k=256, groups=2)
    statistics = case.check(replace(STRICT, overlap=True), clusters)
    tile = 128 * 256 // 2 + 128 * 256 // 16 + 8 * 256 // 2 + 128 * 256 // 16
    assert statistics.engine_bytes["tma_load"] == 6 * tile


def test_bytes_loaded_are_the_operands_once() -> None:
    """Decode: weights, tokens and their scales travel once per feature tile, and nothing else does."""
    case = ProductCase(KernelShape(8), tokens=8, features=256, k=512)
    statistics = case.check(STRICT)
    weights = 256 * 512 // 2 + 256 * 512 // 16
    tokens = 2 * (8 * 512 // 2 + 128 * 512 // 16)
    assert statistics.engine_bytes["tma_load"] == weights + tokens
    assert statistics.engine_bytes["tma_store"] == 8 * 256 * 2


def test_a_slice_of_k_needs_a_stage() -> None:
    with pytest.raises(ValueError, match="split_k 4: K = 704 has only 3 stages"):
        ProductCase(KernelShape(8, split_k=4), tokens=8, features=128, k=704).build()
