"""GEMMs that others wrote for Hopper hardware run in the emulator: exact numbers, and what is left out is found."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.sm100.emulator import Compiled, EmulatorError, HazardError, Options
from tests.sm100.support.dense_gemm import DenseGemm
from tests.sm100.support.hopper_gemm import HopperGemm
from tests.sm100.support.mutants import without_each

pytest.importorskip("quack")

OPTIONS = [Options(), Options("random", 1), Options("starved", 2, "warpgroup"), Options("starved", 3, "tma_load")]
KERNELS = {
    "two warpgroups a tile": HopperGemm(),
    "A in registers": HopperGemm(registers=True),
    "a tile each": HopperGemm((64, 128), pingpong=True),
}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: f"{options.mode} {options.starve or ''}")
@pytest.mark.parametrize("kernel", KERNELS)
def test_output_is_exact(kernel: str, options: Options) -> None:
    """Ragged edges in every dimension, several tiles."""
    options = replace(options, strict_reads=kernel != "A in registers")
    right, statistics = KERNELS[kernel].run((200, 136, 200), options)
    assert right
    assert statistics.engine_operations["wgmma"]


def test_lanes_that_read_a_stage_are_not_synchronised_before_one_releases_it() -> None:
    """QuACK counts on a warp whose lanes read together."""
    with pytest.raises(HazardError, match=f"write of shared memory .* {UNORDERED} read"):
        KERNELS["A in registers"].run((200, 136, 200), Options())


def test_output_of_nvidias_example_is_exact() -> None:
    """FP8, A multicast to two CTAs; its compiler leaves moves between wgmma.fence and wgmma."""
    pytest.importorskip("flashinfer")
    gemm = DenseGemm("Float8E4M3FN", "Float16", (64, 128), (1, 2), hopper=True)
    right, statistics = gemm.run((72, 264, 160), Options("random", 1))
    assert right
    assert statistics.engine_operations["wgmma"]


SHAPE = (300, 264, 720)
"""Nine tiles of more K tiles than the pipeline has stages."""
UNORDERED = "without being ordered after its"
LEFT_OUT: dict[str, list[str]] = {
    # The loop's own fence orders nothing: its registers were accessed before the fence of the first K tile.
    r"wgmma\.fence": ["", "wgmma of registers that were accessed without wgmma.fence since"],
    r"wgmma\.commit_group": [f"write of shared memory .* {UNORDERED} read"] * 2,
    r"wgmma\.wait_group": [f"write of shared memory .* {UNORDERED} read", "which a wgmma in flight accumulates"],
    r"fence\.proxy\.async": ["read of shared memory .* without fence.proxy.async since its write"] * 4,
    r"fence\.mbarrier_init": ["used before its initialisation is known"],
    r"bar\.sync": ["used before its initialisation is known", *[UNORDERED] * 8],
}
"""What is left out, by the begin of its text; the reports, in the order of the statements, "" for none."""


@pytest.mark.parametrize("pattern", LEFT_OUT)
def test_what_is_left_out_is_found(pattern: str) -> None:
    """Without any delay, and whatever the values."""
    for (what, mutant), report in zip(without_each(HopperGemm().compiled(), pattern), LEFT_OUT[pattern], strict=True):
        if not report:
            assert HopperGemm().run(SHAPE, Options(), mutant)[0], what
            continue
        with pytest.raises(HazardError, match=report):
            HopperGemm().run(SHAPE, Options(max_instructions=400_000), mutant)


def without_waits(compiled: Compiled, offset: bool) -> Compiled:
    """Without the waits, and the looks ahead, for full stages; with ``offset``, for empty ones."""
    place = r"\[%r\d+\+\d+\]" if offset else r"\[%r\d+\]"
    looks = re.findall(rf"mbarrier\.try_wait\.parity\.acquire\S+ (%p\d+), {place}, (%r\d+);", compiled.ptx)
    (parity,) = {parity for _, parity in looks}
    ptx = re.sub(rf"mbarrier\.try_wait\S+ (\w+|%p\d+), \[[^]]+\], {parity}(, \d+)?;", r"mov.pred \1, -1;", compiled.ptx)
    return Compiled(compiled.function, ptx)


@pytest.mark.parametrize("empty", [False, True], ids=["full", "empty"])
def test_waits_for_stages_are_found_missing(empty: bool) -> None:
    report = f"write of shared memory .* {UNORDERED}" if empty else "never written"
    with pytest.raises(EmulatorError, match=report):
        HopperGemm().run(SHAPE, Options(max_instructions=400_000), without_waits(HopperGemm().compiled(), empty))
