"""What the modelled times and the emulator's byte counts say of the kernels' main loops.

Modelled, not measured: the figures are those of ``TimingModel``, whose assumptions it states.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from nvfp4_sgl.cutedsl_kernels.sm100.cost import epilogue_cycles, exposed_cycles, multiply_cycles
from nvfp4_sgl.cutedsl_kernels.sm100.shape import SCALE_ATOM_BYTES, SCALE_ATOM_ROWS, KernelShape
from tests.sm100.emulator import Options, TimingModel
from tests.sm100.support.products import ExpertCase, ProductCase, run
from tests.sm100.support.timed_products import timeline

PAIR = KernelShape(256, pair=True)
GATED = KernelShape(128, pair=True, gated=True, grouped=True, output="nvfp4", shared_weights=2)


def operand_bytes(rows: int, k: int) -> int:
    """Codes and whole atoms of block scales."""
    atoms = -(-rows // SCALE_ATOM_ROWS) * -(-k // 64)
    return rows * k // 2 + atoms * SCALE_ATOM_BYTES


def test_prefill_keeps_the_tensor_core_busy() -> None:
    times = timeline(PAIR, features=512, k=4096, tokens=256)
    stages = 2 * 4096 // PAIR.tile_k
    # The copies of the first stage come before the first MMA.
    assert times.multiplying + times.copying == stages * multiply_cycles(PAIR) - 48
    assert times.busy > 0.95
    assert times.occupancy > 0.87  # if tcgen05.cp holds up MMAs; nothing says that it does
    assert times.idle["accumulators"] < 1.1 * exposed_cycles(PAIR)


def test_an_epilogue_takes_less_than_the_main_loop_that_hides_it() -> None:
    times = timeline(PAIR, features=768, k=512, tokens=256)
    # Up to the next tile's wait: hidden from K = 768 on, by the MMAs alone.
    assert max(times.drains[:-1]) < 768 / 64 * 128


EPILOGUES = {
    KernelShape(8, grouped=True): 0.2,
    KernelShape(32, output="fp32"): 0.2,
    KernelShape(128): 0.2,
    PAIR: 0.05,
    replace(PAIR, output="fp32"): 0.05,
    KernelShape(8, gated=True, grouped=True, output="nvfp4"): 0.05,
    GATED: 0.05,
}
"""How near the cost model is: most where an epilogue counts."""


@pytest.mark.parametrize("shape", EPILOGUES, ids=str)
def test_the_cost_model_knows_an_epilogue(shape: KernelShape) -> None:
    """The epilogue of a last tile, which nothing hides.

    Turns are shuffled, so that no warp is first at the port of TMA stores.
    """
    tokens = shape.token_tile * shape.shared_weights
    times = timeline(shape, features=shape.tile_outputs, k=256, tokens=tokens, options=Options("random", 1))
    ends = TimingModel().cluster_latency if shape.cluster > 1 else 0.0
    assert times.drains[-1] - ends == pytest.approx(epilogue_cycles(shape), rel=EPILOGUES[shape])


TILES = 4


@pytest.mark.parametrize("shape", [KernelShape(8, grouped=True), KernelShape(128, grouped=True)], ids=str)
def test_a_short_product_waits_for_no_factors(shape: KernelShape) -> None:
    """Tiles of a single stage: an epilogue has the next tile's factors under way while it works on one."""
    model = TimingModel.from_memory()
    times = timeline(shape, features=TILES * 128, k=256, tokens=shape.token_tile, model=model)
    assert times.drains[2] < model.global_latency + epilogue_cycles(shape)
    assert times.idle.get("accumulators", 0.0) < TILES * 10


def test_gated_prefill_waits_for_no_epilogue() -> None:
    """Three tiles: the third's accumulator is the first's."""
    times = timeline(GATED, features=384, k=3072, tokens=256)
    assert times.busy > 0.94
    assert times.idle.get("accumulators", 0.0) == exposed_cycles(GATED) == 0


@pytest.mark.parametrize("tile", [8, 64])
def test_decode_has_four_stages_in_flight_and_reads_each_weight_once(tile: int) -> None:
    shape, features, k = KernelShape(tile), 256, 2048
    assert timeline(shape, features, k, tile, TimingModel.from_memory()).stages_in_flight >= 4
    statistics = run(*ProductCase(shape, tile, features, k).build())
    tiles = features // 128
    tokens = tile * k // 2 + k // 64 * SCALE_ATOM_BYTES
    assert statistics.engine_bytes["tma_load"] == operand_bytes(features, k) + tiles * tokens


@pytest.mark.parametrize(
    "shape", [KernelShape(8, gated=True, grouped=True, output="nvfp4"), KernelShape(8, grouped=True)], ids=str
)
def test_only_experts_with_tokens_are_read(shape: KernelShape) -> None:
    def loaded(counts: tuple[int, ...]) -> Counter[str]:
        case = ExpertCase(shape, counts, features=128, k=256)
        return run(case.build()[0], case.epilogue(shape.output)).engine_bytes

    few = loaded((5, 3))
    assert loaded((0, 5, 0, 0, 3, 0))["tma_load"] == few["tma_load"] > 0
    # The 17th token of an expert takes a tile more, with the expert's weights once more, from L2.
    assert loaded((5, 17))["tma_load"] == 2 * few["tma_load"]


def test_pairs_of_a_cluster_share_what_they_read() -> None:
    case = ProductCase(replace(PAIR, token_tile=128), tokens=256, features=512, k=64)
    alone = run(*case.build()).engine_bytes
    shape = replace(case.shape, shared_tokens=2, shared_weights=2)
    shared = run(*replace(case, shape=shape).build()).engine_bytes
    assert shared["tma_load"] == alone["tma_load"] / 2
    assert shared["tma_load_shared"] == alone["tma_load_shared"]
