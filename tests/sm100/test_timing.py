"""The emulator's timed mode gives the times that can be worked out by hand, and moves the right way otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nvfp4_sgl.cutedsl_kernels.common import shape as shape_module
from nvfp4_sgl.cutedsl_kernels.sm100.cost import EXPERT_COUNTS_CYCLES
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Options, TimingModel
from tests.sm100.emulator.timing import ClusterTiming
from tests.sm100.emulator.timing_issue import wavefronts
from tests.sm100.support import entries
from tests.sm100.support.snippets import launch
from tests.sm100.support.timed_products import timeline

MODEL = TimingModel()
FAST = TimingModel(load_bytes_per_cycle=1e6, load_latency=0)
SQUARE = KernelShape(128)
"""128 features by 128 tokens: an MMA takes 128 * 128 * 64 / 2^14 = 64 cycles, whether products or operands count."""


def cycles(body: str, block: int = 32, shared: int = 1024) -> float:
    """When the last warp of a few instructions ends."""
    run = launch(f"{body}\nret;", [np.zeros(256, np.uint32)], options=Options(timing=MODEL), block=block, shared=shared)
    return run.statistics.timelines[0].end


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("add.s32 %r1, %r1, 1;", 1),
        ("mov.b32 %r1, %r2;", 0),
        ("mul.rn.f32x2 %q1, %q2, %q3;", 2),
        ("ex2.approx.f32 %r1, %r2;", MODEL.function_cycles),
        ("cvt.rn.bf16.f32 %h1, %r2;", MODEL.conversion_cycles),
        ("bar.sync 0;", MODEL.barrier_latency),
        ("st.shared.b32 [%r1], %r2;", MODEL.warps_sharing),
    ],
)
def test_instructions_take_their_cycles(code: str, expected: float) -> None:
    own_word = "mov.u32 %r1, dynamic; mov.u32 %r3, %laneid; mad.lo.s32 %r1, %r3, 4, %r1;"
    assert cycles(f"{own_word}\n{code}\n{code}\n{code}") - cycles(f"{own_word}\n{code}") == 2 * expected


def test_a_load_is_waited_for_where_it_is_used() -> None:
    base = "ld.param.b64 %q1, [p0];"
    load = "ld.global.b32 %r1, [%q1]; ld.global.b32 %r2, [%q1+4];"
    assert cycles(f"{base} {load}") == 2
    assert cycles(f"{base} {load} add.s32 %r5, %r4, %r4;") == 3
    assert cycles(f"{base} {load} add.s32 %r5, %r1, %r2;") == 2 + MODEL.global_latency + 1


def test_warps_of_a_scheduler_share_its_cycles() -> None:
    def bound(warps: int) -> float:
        code = "ex2.approx.f32 %r1, %r2;" * 10 + "bar.sync 0; ret;"
        run = launch(code, [], options=Options(timing=MODEL), block=32 * warps)
        return run.statistics.timelines[0].issue_bound

    assert bound(1) == bound(4) == 10 * MODEL.function_cycles + 1
    assert bound(5) == bound(8) == 2 * bound(1)


def test_a_barrier_waits_for_the_slowest_warp() -> None:
    uneven = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra JOIN;" + "add.s32 %r2, %r2, 1;" * 100
    alone = cycles(f"{uneven} JOIN:", block=64)
    assert cycles(f"{uneven} JOIN: bar.sync 0;", block=64) == alone + MODEL.barrier_latency
    assert cycles(f"{uneven} JOIN: bar.sync 0; bar.sync 0;", block=64) == alone + 2 * MODEL.barrier_latency


@pytest.mark.parametrize(
    ("addresses", "size", "expected"),
    [
        (np.arange(32) * 4, 4, 1),
        (np.arange(32) * 2, 2, 1),
        (np.zeros(32, int), 16, 1),
        (np.arange(32) * 16, 16, 4),
        (np.arange(32) * 128, 4, 32),
        (np.arange(32) * 8, 4, 2),
    ],
)
def test_shared_memory_takes_a_pass_for_each_word_of_a_bank(addresses: np.ndarray, size: int, expected: int) -> None:
    assert wavefronts(addresses, size) == expected


def test_counts_of_experts_are_read_in_the_time_that_the_cost_model_has() -> None:
    first, with_counts = (
        timeline(KernelShape(8, grouped=grouped), 128, 256, 8).stages[0][0] for grouped in (False, True)
    )
    assert with_counts - first == pytest.approx(EXPERT_COUNTS_CYCLES, rel=0.02)


def test_one_tile_multiplies_for_the_time_of_its_products() -> None:
    times = timeline(SQUARE, 128, 256, 128, FAST)
    assert times.multiplying == 4 * 64
    assert times.copying == 0  # all of it before the first MMA
    assert times.span == pytest.approx(times.multiplying + sum(times.idle.values()))
    assert len(times.drains) == 1 and len(times.stages) == 1


def test_a_pair_multiplies_twice_as_fast_and_narrow_tiles_wait_for_their_weights() -> None:
    pair = timeline(KernelShape(128, pair=True), 256, 256, 128, FAST)
    assert pair.multiplying == 4 * 64
    narrow = timeline(KernelShape(8), 128, 256, 8, FAST)
    assert narrow.multiplying == 4 * (128 + 8) * 32 / MODEL.shared_bytes_per_cycle


def test_scales_are_copied_in_the_time_of_their_bytes() -> None:
    times = timeline(SQUARE, 128, 1024, 128, FAST)
    assert times.multiplying == 4 * 4 * 64
    assert times.copying == 3 * 2 * 2048 / MODEL.shared_bytes_per_cycle  # of weights and tokens, but for one stage


def test_two_tiles_share_the_tensor_core_and_hide_an_epilogue() -> None:
    one, two = timeline(SQUARE, 128, 1024, 128, FAST), timeline(SQUARE, 256, 1024, 128, FAST)
    assert two.multiplying == 2 * one.multiplying
    assert len(two.drains) == 2
    # With two accumulator buffers the second tile waits for no epilogue.
    assert two.idle.get("accumulators", 0.0) == 0
    assert two.end - one.end < one.drains[0] + one.span


def test_a_multicast_reads_once_and_is_received_by_each() -> None:
    timing = ClusterTiming(MODEL)
    first = timing.load(0, 100.0, 6400, 1, [])
    assert first == 100 + 6400 / MODEL.load_bytes_per_cycle + MODEL.load_latency
    assert timing.load(0, 100.0, 6400, 2, []) - first == 6400 / MODEL.load_bytes_per_cycle
    assert timing.load(0, 100.0, 6400, 4, []) - first == 3 * 6400 / MODEL.load_bytes_per_cycle
    # What the emulator runs later may have been ready earlier: it takes the gap before.
    assert timing.load(0, 0.0, 640, 1, []) == 640 / MODEL.load_bytes_per_cycle + MODEL.load_latency
    assert timing.load(1, 100.0, 6400, 1, []) == first  # each CTA has a port of its own


def test_starved_loads_set_the_pace() -> None:
    slow = TimingModel(load_bytes_per_cycle=8)
    few, many = (timeline(SQUARE, 128, 256 * stages, 128, slow) for stages in (8, 16))
    assert many.load_bytes == 16 * SQUARE.stage_bytes
    # Stage after stage arrives, and the tensor core waits for each.
    assert many.end - few.end == pytest.approx(8 * SQUARE.stage_bytes / 8, rel=0.001)
    assert many.idle["operands"] - few.idle["operands"] > 0.9 * (many.span - few.span)
    assert many.multiplying == 16 * 4 * 64


def test_more_latency_or_fewer_stages_lower_occupancy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    latencies = [400.0, 1600.0, 6400.0]
    found = [timeline(SQUARE, 128, 4096, 128, replace(MODEL, load_latency=one)).occupancy for one in latencies]
    assert found[0] >= found[1] > found[2]
    monkeypatch.setattr(shape_module, "MAX_STAGES", 2)
    # Another kernel of the same key: not one that was compiled before, nor one for others to find.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(entries, "compile_key", entries.compile_key.__wrapped__)
    fewer = timeline(SQUARE, 128, 4096, 128, replace(MODEL, load_latency=latencies[1]))
    assert fewer.occupancy < 0.5 * found[1]
    assert fewer.stages_in_flight <= 2


def test_times_depend_on_nothing_but_the_program() -> None:
    usual = timeline(SQUARE, 256, 512, 128)
    assert timeline(SQUARE, 256, 512, 128) == usual
    assert timeline(SQUARE, 256, 512, 128, options=Options("random", 3)) == usual
    assert timeline(SQUARE, 256, 512, 128, options=Options("starved", 4, "tma_load")) == usual
