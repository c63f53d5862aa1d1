"""What the choice of kernel shapes promises."""

from __future__ import annotations

import functools

import pytest

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels.common.clusters import Clusters
from nvfp4_sgl.cutedsl_kernels.common.shape import SHARED_CAPACITY, TOKEN_TILES, Output
from nvfp4_sgl.cutedsl_kernels.sm100.choose import (
    choose_experts,
    choose_gemm,
    expert_tile,
    planned_pairs,
    planned_tokens,
)
from nvfp4_sgl.cutedsl_kernels.sm100.cost import B200, Problem, cost, multiply_cycles, read_bytes
from nvfp4_sgl.cutedsl_kernels.sm100.shape import TENSOR_COLUMNS, KernelShape
from nvfp4_sgl.limits import MAX_GEMM_EXPERTS
from nvfp4_sgl.weights.gemms import GemmSpec, distinct_gemms
from tests.support.released import FLASH, PRO, config_json

TOKENS = (1, 5, 8, 17, 64, 65, 300, 1024, 8192)


@functools.cache
def model_products() -> list[GemmSpec]:
    """Products of Flash and Pro on 1, 2, 4 and 8 ranks.

    Listed by the first test that asks, which takes seconds: every worker of a run imports this file.
    """
    configs = [ModelConfig.from_dict(config_json(base)) for base in (FLASH, PRO)]
    found = [product for config in configs for ranks in (1, 2, 4, 8) for product in distinct_gemms(config, ranks)]
    return list(dict.fromkeys(found))


def chosen(product: GemmSpec, tokens: int) -> tuple[KernelShape, Problem]:
    """The shape for a product of the model, and the problem."""
    size = product.features, product.k
    if not product.experts_per_token:
        return choose_gemm(*size, tokens, product.groups), Problem(*size, tokens, product.groups)
    pairs = tokens * product.experts_per_token
    output: Output = "nvfp4" if product.gated else "bf16"
    shape = choose_experts(*size, pairs, product.groups, product.gated, output)
    shared = tokens if product.shared else 0
    return shape, Problem(*size, pairs, product.groups, product.gated, True, output, shared)


def test_no_choice_is_modelled_faster_than_the_floor() -> None:
    for product in model_products():
        for tokens in TOKENS:
            shape, problem = chosen(product, tokens)
            found = cost(shape, problem)
            assert found.seconds > problem.floor_seconds(), (product, tokens)
            assert found.memory_bytes >= problem.least_bytes
            assert 0 <= found.tail_waste < 1


def test_every_product_of_the_model_is_supported() -> None:
    assert len(model_products()) > 40
    for product in model_products():
        assert product.k % 64 == 0 and product.features % 32 == 0 and product.groups <= MAX_GEMM_EXPERTS, product
        for tokens in TOKENS:
            shape, _ = chosen(product, tokens)
            assert shape.stages >= 3
            assert shape.tensor_columns <= TENSOR_COLUMNS
            assert shape.shared_bytes <= SHARED_CAPACITY
            assert (shape.gated, shape.grouped) == (product.gated, product.experts_per_token > 0)


@pytest.mark.parametrize("tokens", range(1, 65))
def test_decode_takes_the_narrowest_tile(tokens: int) -> None:
    expected = min(tile for tile in TOKEN_TILES if tile >= tokens)
    for product in model_products():
        if not product.experts_per_token:
            assert choose_gemm(product.features, product.k, tokens, product.groups).token_tile == expected


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 64, 65, 128, 129, 8191, 8192])
def test_a_choice_goes_by_rounded_numbers(tokens: int) -> None:
    planned = planned_tokens(tokens)
    assert planned >= tokens and planned_tokens(planned) == planned
    assert planned in TOKEN_TILES if tokens <= 64 else planned % 128 == 0 and planned - tokens < 128
    for features, k in ((2560, 4096), (7168, 2048)):
        assert choose_gemm(features, k, tokens) == choose_gemm(features, k, planned)
    pairs = planned_pairs(tokens)
    assert tokens <= pairs <= tokens * 1.25 and pairs.bit_length() - (pairs & -pairs).bit_length() < 3
    for gated in (True, False):
        expected = choose_experts(2048, 4096, pairs, 257, gated)
        assert choose_experts(2048, 4096, tokens, 257, gated) == expected


def test_few_kernels_serve_all_numbers_of_tokens() -> None:
    shapes = {choose_gemm(4096, 4096, tokens) for tokens in range(1, 20_000)}
    assert len(shapes) < 10
    shapes = {choose_experts(2048, 4096, pairs, 257, True, "nvfp4") for pairs in range(1, 100_000)}
    assert len(shapes) < 15


def test_k_is_split_where_tiles_are_few_and_not_where_they_are_many() -> None:
    assert choose_gemm(1536, 4096, 1).split_k >= 4
    assert choose_gemm(7168, 16384, 8).split_k == 2
    assert choose_gemm(65536, 1536, 1).split_k == 1
    assert choose_gemm(1536, 256, 1).split_k == 1  # no slice would have two stages
    # Experts: seven of one token on one rank of eight; hundreds of many tokens.
    assert choose_experts(256, 4096, 7, 257, True, "nvfp4").split_k == 4
    assert choose_experts(384, 7168, 7, 385, True, "nvfp4").split_k >= 2
    assert choose_experts(2048, 4096, 7 * 64, 257, True, "nvfp4").split_k == 1
    assert choose_experts(4096, 256, 7, 257, False).split_k == 1


def test_prefill_takes_pairs_that_l2_can_feed() -> None:
    for features, k in ((4096, 8192), (65536, 1536), (7168, 16384), (4608, 7168)):
        shape = choose_gemm(features, k, 8192)
        assert shape.pair
        assert read_bytes(shape) / B200.l2_bytes_per_cycle <= multiply_cycles(shape)
        # 34 clusters of four would leave 12 SMs without work.
        assert shape.cluster == 2
    # Where K is long the widest tile pays: it reads and copies the least for each product.
    assert choose_gemm(4096, 8192, 8192).token_tile == 256


def test_pairs_share_the_tiles_of_a_last_wave_that_leaves_half_of_them_idle() -> None:
    for features, k, groups in ((2560, 4096, 1), (3072, 7168, 1), (7168, 16384, 1), (1024, 4096, 2)):
        shape = choose_gemm(features, k, 8192, groups)
        assert shape.stream_k and shape == KernelShape(256, pair=True, stream_k=True)
    # 68 of 74 tiles are left over; whole waves; and no whole wave, in the time of which sums could travel.
    for features, tokens in ((4096, 8192), (4096, 9472), (4096, 512)):
        assert not choose_gemm(features, 8192, tokens).stream_k


@pytest.mark.parametrize("token_tile", [8, 64, 128])
def test_rows_quantised_for_another_tile_get_the_best_kernel_for_it(token_tile: int) -> None:
    for tokens in (1, 64, 300):
        shape = choose_gemm(4096, 8192, tokens, token_tile=token_tile)
        assert min(shape.token_tile, 128) == token_tile
        assert choose_experts(2048, 4096, tokens, 257, True, token_tile=token_tile).token_tile == token_tile


def test_the_layout_of_scales_follows_from_the_tokens_alone() -> None:
    for tokens in TOKENS:
        tiles = {chosen(product, tokens)[0].token_tile for product in model_products() if not product.experts_per_token}
        assert len(tiles) == 1 or min(tiles) >= 128


def test_both_expert_kernels_of_a_layer_get_the_same_tile() -> None:
    for pairs in (6, 48, 384, 3072, 49152):
        gate_up = choose_experts(2048, 4096, pairs, 256, True, "nvfp4")
        down = choose_experts(4096, 2048, pairs, 256, False)
        assert gate_up.token_tile == down.token_tile == expert_tile(pairs, 256)
    tiles = [expert_tile(pairs, 256) for pairs in range(64, 100_000, 1777)]
    assert tiles == sorted(tiles)
    assert tiles[0] == 8 and tiles[-1] == 128


def test_a_smaller_gpu_may_choose_otherwise() -> None:
    assert choose_gemm(4096, 8192, 1).split_k == 4
    assert choose_gemm(4096, 8192, 1, clusters=Clusters.in_gpcs((16, 16))).split_k == 1
