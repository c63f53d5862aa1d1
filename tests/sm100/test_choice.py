"""The cost model against arithmetic by hand, and what the choice of kernel shapes promises."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels.sm100.choose import choose_experts, choose_product, expert_tile
from nvfp4_sgl.cutedsl_kernels.sm100.cost import B200, Problem, cost, epilogue_cycles, multiply_cycles, read_bytes
from nvfp4_sgl.cutedsl_kernels.sm100.shape import (
    MAX_EXPERTS,
    MMA_K,
    SHARED_CAPACITY,
    TENSOR_COLUMNS,
    TOKEN_TILES,
    KernelShape,
    Output,
)
from nvfp4_sgl.model.products import LayerProduct, layer_products
from tests.support.released import FLASH, PRO, config_json

PAIR = KernelShape(256, pair=True)
TOKENS = (1, 5, 8, 17, 64, 65, 300, 1024, 8192)


def model_products() -> list[LayerProduct]:
    """Of Flash and Pro on 1, 2, 4 and 8 ranks."""
    configs = [ModelConfig.from_dict(config_json(base)) for base in (FLASH, PRO)]
    found = [product for config in configs for ranks in (1, 2, 4, 8) for product in layer_products(config, ranks)]
    return list(dict.fromkeys(found))


def chosen(product: LayerProduct, tokens: int) -> tuple[KernelShape, Problem]:
    """The shape for a product of the model, and the problem."""
    size = product.features, product.k
    if not product.experts_per_token:
        return choose_product(*size, tokens, product.groups), Problem(*size, tokens, product.groups)
    pairs = tokens * product.experts_per_token
    output: Output = "nvfp4" if product.gated else "bf16"
    shape = choose_experts(*size, pairs, product.groups, product.gated, output)
    return shape, Problem(*size, pairs, product.groups, product.gated, True, output)


PRODUCTS = model_products()


def test_cost_of_a_pair_by_hand() -> None:
    found = cost(PAIR, Problem(features=512, k=1024, tokens=300))
    assert found.tiles == 2 * 2
    assert (found.waves, found.tail_waste) == (1, 1 - 4 / 74)
    # A CTA's stage: 128 rows of weights and half of 256 tokens, 128 bytes each; 16 bytes of scales for 128 + 256 rows.
    stage = 128 * 128 + 128 * 128 + (128 + 256) * 16
    assert found.loaded_bytes == 4 * 2 * 4 * stage
    # Each CTA of a pair reads half of the tokens' scales and sends it to both.
    read = stage - 256 * 16 / 2
    assert found.multiply_cycles == 256 * 256 * 256 / 2**14 / 2 + (128 + 256) * 16 / 128
    assert found.stage_cycles == read / 64
    shared = replace(PAIR, shared_tokens=2, shared_weights=2)
    assert read_bytes(PAIR) == read and read_bytes(shared) == read / 2
    assert cost(shared, Problem(512, 1024, 300)).stage_cycles == found.multiply_cycles
    scales = (4 * 16 + 2 * 2 * 16) * 512
    assert found.memory_bytes == (512 + 300) * 512 + scales + 300 * 512 * 2


def test_cost_of_split_k_by_hand() -> None:
    problem, shape = Problem(features=1024, k=4096, tokens=8), KernelShape(8, split_k=4)
    found = cost(shape, problem)
    assert (found.tiles, found.waves, found.tail_waste) == (8, 1, pytest.approx(1 - 8 * 4 / 148))
    stage = (128 + 8) * 128 + (128 + 128) * 16
    assert found.loaded_bytes == 8 * 16 * stage
    assert found.stage_cycles == stage / 64
    # Four slices of four stages; each CTA adds up a quarter of the features and gets it from three others.
    reduced = B200.exchange_cycles + 2 * 3 * 8 * 32 * 4 / 64
    cycles = 4 * stage / 64 + B200.fill_cycles + epilogue_cycles(shape) + reduced
    assert found.seconds == pytest.approx(cycles / B200.clock_hz)


def test_cost_of_experts_by_hand() -> None:
    problem = Problem(features=2048, k=4096, tokens=6, groups=256, gated=True, grouped=True, output="nvfp4")
    active = 256 * (1 - math.exp(-6 / 256))
    assert problem.matrices == pytest.approx(2 * active)
    found = cost(KernelShape(8, gated=True, grouped=True, output="nvfp4"), problem)
    assert found.tiles == pytest.approx(32 * active, rel=1e-6)  # two of them get nine tokens only in theory
    weights = 2 * active * 2048 * 4096 * 0.5625
    assert found.memory_bytes == pytest.approx(weights, rel=0.01)


def test_mean_number_of_tiles_matches_drawn_experts() -> None:
    random = np.random.default_rng(1)
    for pairs, tile in ((48, 8), (3072, 16), (9000, 32)):
        counts = random.multinomial(pairs, [1 / 128] * 128, size=400)
        drawn = np.ceil(counts / tile).sum(axis=1).mean()
        assert Problem(8, 64, pairs, 128, grouped=True).token_tiles(tile) == pytest.approx(drawn, rel=0.02)
    assert Problem(8, 64, 17, 1, grouped=True).token_tiles(8) == 3


@pytest.mark.parametrize("shape", [KernelShape(8), KernelShape(64, split_k=2), KernelShape(128), PAIR], ids=str)
def test_more_work_never_costs_less(shape: KernelShape) -> None:
    base = Problem(features=1000, k=2000, tokens=100, groups=2)
    for field in ("features", "k", "tokens", "groups"):
        sizes = [getattr(base, field) * factor for factor in (1, 2, 3, 7, 20)]
        times = [cost(shape, replace(base, **{field: size})).seconds for size in sizes]
        assert times == sorted(times), field
    large = replace(base, features=20000)
    faster = [cost(shape, large, replace(B200, multiprocessors=count)).seconds for count in (74, 100, 148, 200)]
    assert faster == sorted(faster, reverse=True)


def test_no_choice_is_modelled_faster_than_the_floor() -> None:
    for product in PRODUCTS:
        for tokens in TOKENS:
            shape, problem = chosen(product, tokens)
            found = cost(shape, problem)
            assert found.seconds > problem.floor_seconds(), (product, tokens)
            assert found.memory_bytes >= problem.least_bytes
            assert 0 <= found.tail_waste < 1


def test_every_product_of_the_model_is_supported() -> None:
    assert len(PRODUCTS) > 40
    for product in PRODUCTS:
        assert product.k % MMA_K == 0 and product.features % 32 == 0 and product.groups <= MAX_EXPERTS, product
        for tokens in TOKENS:
            shape, _ = chosen(product, tokens)
            assert shape.stages >= 3
            assert shape.tensor_columns <= TENSOR_COLUMNS
            assert shape.shared_bytes <= SHARED_CAPACITY
            assert (shape.gated, shape.grouped) == (product.gated, product.experts_per_token > 0)


@pytest.mark.parametrize("tokens", range(1, 65))
def test_decode_takes_the_narrowest_tile(tokens: int) -> None:
    expected = min(tile for tile in TOKEN_TILES if tile >= tokens)
    for product in PRODUCTS:
        if not product.experts_per_token:
            assert choose_product(product.features, product.k, tokens, product.groups).token_tile == expected


def test_k_is_split_where_tiles_are_few_and_not_where_they_are_many() -> None:
    assert choose_product(1536, 4096, 1).split_k >= 4
    assert choose_product(7168, 16384, 8).split_k == 2
    assert choose_product(65536, 1536, 1).split_k == 1
    assert choose_product(1536, 256, 1).split_k == 1  # no slice would have two stages


def test_prefill_takes_pairs_that_l2_can_feed() -> None:
    for features, k in ((4096, 8192), (65536, 1536), (7168, 16384), (4608, 7168)):
        shape = choose_product(features, k, 8192)
        assert shape.pair and shape.cluster > 2
        assert read_bytes(shape) / B200.l2_bytes_per_cycle <= multiply_cycles(shape)
    # Where K is long the widest tile pays: it reads and copies the least for each product.
    assert choose_product(4096, 8192, 8192).token_tile == 256


def test_the_layout_of_scales_follows_from_the_tokens_alone() -> None:
    for tokens in TOKENS:
        tiles = {chosen(product, tokens)[0].token_tile for product in PRODUCTS if not product.experts_per_token}
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
    assert choose_product(7168, 16384, 8, multiprocessors=32).split_k == 1
