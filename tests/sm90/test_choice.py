"""Which Hopper kernel serves which problem."""

from __future__ import annotations

import pytest

from nvfp4_sgl.cutedsl_kernels.common.shape import TOKEN_TILES
from nvfp4_sgl.cutedsl_kernels.plan import every_key
from nvfp4_sgl.cutedsl_kernels.sm90.choose import H200_CLUSTERS, choose_experts, choose_product, expert_tile
from nvfp4_sgl.cutedsl_kernels.sm90.cost import Problem, microseconds
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from nvfp4_sgl.cutedsl_kernels.warm_up import keys_for
from nvfp4_sgl.model.products import LayerProduct

FLASH = [(1536, 4096), (4096, 4096), (40960, 1024), (16384, 1024), (4096, 8192), (4096, 1024), (4096, 512)]


@pytest.mark.parametrize("features,k", FLASH)
def test_one_token_is_read_in_one_pass(features: int, k: int) -> None:
    shape = choose_product(features, k, 1, 1, "bf16", H200_CLUSTERS)
    assert shape.token_tile == 8


def test_few_tiles_split_k() -> None:
    """12 tiles of 128 features leave most SMs idle."""
    assert choose_product(1536, 4096, 1, 1, "fp32", H200_CLUSTERS).split_k == 8


def test_many_tokens_take_the_widest_tile() -> None:
    for features, k in FLASH[1:5]:
        assert choose_product(features, k, 8192, 1, "bf16", H200_CLUSTERS).token_tile == TOKEN_TILES[-1]


def test_bandwidth_bounds_the_time() -> None:
    """No shape is modelled to be faster than its weights arrive."""
    problem = Problem(40960, 1024, 1)
    floor = 40960 * 1024 * 9 / 16 / 4.25e6
    assert all(microseconds(KernelShape(tile), problem, H200_CLUSTERS) > floor for tile in TOKEN_TILES)


def test_experts_share_a_tile_for_both_products() -> None:
    for pairs in (7, 56, 448, 8192 * 7):
        tile = expert_tile(pairs, 257)
        for features, k, gated in ((2048, 4096, True), (4096, 2048, False)):
            shape = choose_experts(features, k, pairs, 257, gated, tile, "bf16", H200_CLUSTERS)
            assert (shape.token_tile, shape.gated, shape.grouped) == (tile, gated, True)
    assert expert_tile(7, 257) == 8 and expert_tile(8192 * 7, 257) == 128


def test_every_key_holds_what_a_model_needs() -> None:
    """A library of all kernels serves any numbers of tokens."""
    products = [
        LayerProduct("from x", 1536, 4096, output="fp32"),
        LayerProduct("o_a", 1024, 4096, 8),
        LayerProduct("experts.w1 + w3", 2048, 4096, 257, True, 7, shared=True, output="nvfp4"),
        LayerProduct("experts.w2", 4096, 2048, 257, False, 7, shared=True),
    ]
    needed = keys_for(products, 600, 10.0, "sm_90a", H200_CLUSTERS)
    assert len(needed) > 10
    assert set(needed) <= set(every_key("sm_90a", 10.0, ("bf16", "fp32")))
