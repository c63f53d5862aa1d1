"""The cost model against public measurements, and against arithmetic by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS, B200_GPCS, Clusters
from nvfp4_sgl.cutedsl_kernels.sm100.cost import (
    B200,
    Problem,
    SharedTiles,
    cost,
    epilogue_cycles,
    multiply_cycles,
    read_bytes,
)
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape

PAIR = KernelShape(256, pair=True)

CALIBRATED = {(896, 1024): 4.0, (896, 5120): 6.7, (512, 7168): 7.7, (1280, 8192): 8.8}
"""µs of FlashInfer's NVFP4 ``mm_fp4`` for one token by [features, K] (flashinfer-ai/flashinfer#2540, CuTeDSL, B200)."""
FURTHER = {
    (1, 1024, 7168): (8.06, 0.05),
    (1, 1792, 5120): (7.09, 0.07),
    (16, 7168, 2304): (6.30, 0.14),
    (16, 7168, 4608): (8.64, 0.14),
    (16, 9216, 7168): (11.87, 0.14),
    (64, 512, 7168): (7.70, 0.29),
    (64, 1792, 5120): (7.25, 0.29),
}
"""(tokens, features, K) of the same table: µs, and a bound of how far the model is off."""


@pytest.mark.parametrize("size", CALIBRATED, ids=str)
def test_the_model_reproduces_public_measurements(size: tuple[int, int]) -> None:
    modelled = cost(KernelShape(8), Problem(*size, tokens=1)).alone_seconds * 1e6
    assert modelled == pytest.approx(CALIBRATED[size], rel=0.1)


@pytest.mark.parametrize("point", FURTHER, ids=str)
def test_the_model_stays_near_further_measurements(point: tuple[int, int, int]) -> None:
    tokens, features, k = point
    measured, slack = FURTHER[point]
    modelled = cost(KernelShape(max(8, tokens)), Problem(features, k, tokens)).alone_seconds * 1e6
    assert modelled == pytest.approx(measured, rel=slack)


def test_all_multiprocessors_together_get_the_bandwidth_of_memory() -> None:
    """148 tiles leave none idle: HBM alone decides."""
    problem = Problem(features=148 * 128, k=65536, tokens=1)
    found = cost(KernelShape(8), problem)
    exposed = B200.launch_seconds + (B200.fill_cycles + epilogue_cycles(KernelShape(8))) / B200.clock_hz
    assert found.alone_seconds - exposed == pytest.approx(found.memory_bytes / B200.memory_bytes_per_second)
    assert B200.memory_bytes_per_second == 7.2e12


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
    assert found.stage_cycles == found.multiply_cycles > read / 68
    shared = replace(PAIR, shared_tokens=2, shared_weights=2)
    assert read_bytes(PAIR) == read and read_bytes(shared) == read / 2
    narrow = replace(PAIR, token_tile=128)
    assert cost(narrow, Problem(512, 1024, 300)).stage_cycles == read_bytes(narrow) / 68 > multiply_cycles(narrow)
    scales = (4 * 16 + 2 * 2 * 16) * 512
    assert found.memory_bytes == (512 + 300) * 512 + scales + 300 * 512 * 2


def test_cost_of_split_k_by_hand() -> None:
    problem, shape = Problem(features=1024, k=4096, tokens=8), KernelShape(8, split_k=4)
    found = cost(shape, problem)
    assert (found.tiles, found.waves, found.tail_waste) == (8, 1, pytest.approx(1 - 8 * 4 / 148))
    stage = (128 + 8) * 128 + (128 + 128) * 16
    assert found.loaded_bytes == 8 * 16 * stage
    assert found.stage_cycles == stage / 68
    # Four slices of four stages; each CTA adds up a quarter of the features and gets it from three others.
    reduced = B200.exchange_cycles + 2 * 3 * 8 * 32 * 4 / 68
    # 32 of 148 SMs load, and eight tiles read the same tokens: what comes from HBM is less than what is read.
    cold = (1 - 32 / 148) * 4 * stage / 68 * found.memory_bytes / found.loaded_bytes
    memory = found.memory_bytes / 7.2e12 + cold / B200.clock_hz
    exposed = B200.fill_cycles + epilogue_cycles(shape) + reduced
    assert found.alone_seconds == pytest.approx(B200.launch_seconds + memory + exposed / B200.clock_hz)
    assert found.seconds == pytest.approx(found.alone_seconds - B200.overlap_seconds)


def test_cost_of_shared_tiles_by_hand() -> None:
    """Pro's wo_a on 8 ranks: 256 tiles for 74 pairs, of which 34 are left over, each for two pairs."""
    problem, shape = Problem(features=1024, k=4096, tokens=8192, groups=2), replace(PAIR, stream_k=True)
    shared = SharedTiles.of(256, 74, 16)
    assert (shared.whole, shared.rest, shared.sharers, shared.longest) == (3, 34, 2, 8)
    # A CTA of a slice adds up 16 of 32 units of 32 rows by 32 tokens: reads those of the other slice, and 4 of its own.
    sums = 20 * 32 * 32 * 4
    assert shared.read_bytes(shape) == sums
    finish = sums * 16 / 20 / 68 + 1.5e-6 * 1.85e9 + sums / 68 + epilogue_cycles(shape) / 2
    assert shared.finish_cycles(shape, B200) == pytest.approx(finish)
    # While it is finished, operands and sums of the first whole tile come from L2, which takes longer than the MMAs.
    first = (16 * read_bytes(shape) + sums) / 68
    assert 16 * 560 < first > finish
    busy = 8 * 560 + 100 + first + 2 * (100 + 16 * 560)
    exposed = B200.fill_cycles + epilogue_cycles(shape)
    found = cost(shape, problem)
    assert found.alone_seconds == pytest.approx(B200.launch_seconds + (busy + exposed) / B200.clock_hz)
    assert found.waves == 3.5 and found.tail_waste == pytest.approx(1 - 256 / (3.5 * 74))
    assert found.loaded_bytes == cost(PAIR, problem).loaded_bytes and found.seconds < cost(PAIR, problem).seconds


def test_a_rest_is_shared_by_all_pairs_that_can_have_a_stage() -> None:
    assert SharedTiles.of(148, 74, 16) == SharedTiles(2, 0, 1, 0, 16)
    assert SharedTiles.of(896, 74, 8) == SharedTiles(12, 8, 8, 1, 8)
    # Five pairs a tile, of which four do as well: none has more than four stages.
    assert SharedTiles.of(74 + 14, 74, 16) == SharedTiles(1, 14, 4, 4, 16)
    assert SharedTiles.of(74 + 38, 74, 16).sharers == 1
    alone = cost(replace(PAIR, stream_k=True), Problem(features=256, k=4096, tokens=256))
    assert alone.waves == 1 / 16 and alone.seconds > 3e-6


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


def test_a_shared_expert_has_every_token_for_certain() -> None:
    alone = Problem(8, 64, 48, 128, grouped=True)
    both = Problem(8, 64, 48 + 20, 129, grouped=True, shared_tokens=20)
    assert both.token_tiles(16) == pytest.approx(alone.token_tiles(16) + 2)
    assert both.active_groups == pytest.approx(alone.active_groups + 1)
    # The same operands as apart, read by one launch.
    assert both.least_bytes == pytest.approx(alone.least_bytes + Problem(8, 64, 20).least_bytes)
    assert Problem(8, 64, 48, 129, grouped=True).active_groups < both.active_groups


@pytest.mark.parametrize("shape", [KernelShape(8), KernelShape(64, split_k=2), KernelShape(128), PAIR], ids=str)
def test_more_work_never_costs_less(shape: KernelShape) -> None:
    base = Problem(features=1000, k=2000, tokens=100, groups=2)
    for field in ("features", "k", "tokens", "groups"):
        sizes = [getattr(base, field) * factor for factor in (1, 2, 3, 7, 20)]
        times = [cost(shape, replace(base, **{field: size})).seconds for size in sizes]
        assert times == sorted(times), field
    large = replace(base, features=20000)
    gpus = [replace(B200, clusters=Clusters.in_gpcs((count,))) for count in (74, 100, 148, 200)]
    faster = [cost(shape, large, gpu).seconds for gpu in gpus]
    assert faster == sorted(faster, reverse=True)


def test_a_cluster_never_spans_gpcs() -> None:
    assert Clusters.in_gpcs((7, 9)) == (16, 7, 5, 3, 1)
    assert sum(B200_GPCS) == 148 and all(16 <= count <= 20 for count in B200_GPCS)
    assert B200_CLUSTERS == (148, 74, 48, 34, 16) and B200.multiprocessors == 148
    # What an H200 of 132 SMs runs, by some such GPCs.
    h200 = Clusters.in_gpcs((18, 18, 18, 18, 18, 16, 16, 10))
    assert (h200.multiprocessors, h200.of(4), h200.of(8)) == (132, 30, 15)


def test_a_wave_is_as_many_clusters_as_run_at_a_time() -> None:
    """34 clusters of four, not 148 / 4 = 37."""
    shape = KernelShape(8, split_k=4)
    waves = {tiles: cost(shape, Problem(tiles * 128, 4096, 1)).waves for tiles in (34, 35, 37, 68, 69)}
    assert waves == {34: 1, 35: 2, 37: 2, 68: 2, 69: 3}
    assert cost(shape, Problem(34 * 128, 4096, 1)).tail_waste == pytest.approx(1 - 136 / 148)
