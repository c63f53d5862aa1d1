"""The Hopper kernel does not depend on when engines act, and a broken hand-over between its roles is noticed."""

from __future__ import annotations

import re

import pytest

from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from tests.sm90.support.products import ProductCase, compile_shape
from tests.sm100.emulator import Compiled, EmulatorError, Options
from tests.sm100.support.mutants import without_each
from tests.support.full import but_for

MODES = {
    "immediate": Options(),
    "random": Options("random", 1),
    "loads starved": Options("starved", 2, "tma_load"),
    "stores starved": Options("starved", 3, "tma_store"),
    "tensor core starved": Options("starved", 4, "tensor"),
    "copies by lanes starved": Options("starved", 5, "cp_async"),
    "stores to the cluster starved": Options("starved", 6, "st_async"),
}
CASES = {
    "warps": ProductCase(KernelShape(8), tokens=8, features=16, k=192),
    "warpgroups": ProductCase(KernelShape(32), tokens=8, features=16, k=192),
}
"""By what multiplies: warps with mma.sync, or warpgroups with wgmma. Their tile passes over the ring of stages once."""
RINGS = {
    "warps": ProductCase(KernelShape(8, output="fp32"), tokens=8, features=528, k=320),
    "warps, K split": ProductCase(KernelShape(8, split_k=2, output="fp32"), tokens=8, features=784, k=576),
    "warpgroups": ProductCase(KernelShape(32, output="fp32"), tokens=8, features=528, k=320),
}
"""Several tiles each, with more stages in all than the ring has."""


@pytest.mark.parametrize("by", CASES)
@pytest.mark.parametrize("mode", list(MODES)[1:])
def test_results_do_not_depend_on_timing(mode: str, by: str) -> None:
    CASES[by].check(MODES[mode])


def survives(mutant: Compiled, case: ProductCase) -> bool:
    """Whether a mutant passes in every mode."""
    for options in MODES.values():
        try:
            case.check(options, compiled=mutant)
        except (EmulatorError, AssertionError):
            return False
    return True


DROPPED = {
    "proxy fence before the store": ("warps", r"fence\.proxy\.async", 1),
    "fences before wgmmas": ("warpgroups", r"wgmma\.fence", 2),
    "waits for wgmmas": ("warpgroups", r"wgmma\.wait_group", 3),
    "announced bytes, first pass": ("warps", r"mbarrier\.arrive\.expect_tx", 1),
    "copies of weights, first pass": ("warps", r"cp\.async\.bulk\.tensor\.2d\.shared::cta\.global", 1),
    "loads of tokens": ("warps", r"ldmatrix\.", 4),
    "multiplications": ("warps", r"mma\.sync", 8),
}


@pytest.mark.parametrize("what", DROPPED)
def test_every_dropped_instruction_is_noticed(what: str) -> None:
    """The first ones of a kind, one after the other: those that a single pass over the ring executes."""
    by, pattern, count = DROPPED[what]
    case = CASES[by]
    mutants = list(without_each(compile_shape(case.shape), pattern))[:count]
    assert len(mutants) == count
    assert [where for where, mutant in mutants if survives(mutant, case)] == []


def without_wait(compiled: Compiled, index: int) -> Compiled:
    """The kernel without one of its waits for an mbarrier, in the order of its PTX."""
    found = list(re.finditer(r"mbarrier\.try_wait\.parity[^;]* (\w+), \[[^;]*;", compiled.ptx))[index]
    ptx = f"{compiled.ptx[: found.end()]} mov.pred {found.group(1)}, -1;{compiled.ptx[found.end() :]}"
    return Compiled(compiled.function, ptx)


@pytest.mark.parametrize("by", CASES)
def test_a_dropped_wait_for_operands_is_noticed(by: str) -> None:
    assert not survives(without_wait(compile_shape(CASES[by].shape), 0), CASES[by])


FILLED = [(by, mode) for by in RINGS for mode in MODES]
"""A ring in every mode: those of warps and of a split differ by what a cluster exchanges."""
REPEATED = [("warps, K split", mode) for mode in ("immediate", "tensor core starved", "copies by lanes starved")]
REPEATED += [("warps", "stores to the cluster starved"), ("warpgroups", "stores to the cluster starved")]


@pytest.mark.parametrize(("by", "mode"), but_for(FILLED, *REPEATED))
def test_stages_are_filled_again(by: str, mode: str) -> None:
    RINGS[by].check(MODES[mode])


@pytest.mark.parametrize("by", RINGS)
def test_a_dropped_wait_for_a_free_stage_is_noticed(by: str) -> None:
    """The load warp's, which comes last."""
    assert not survives(without_wait(compile_shape(RINGS[by].shape), -1), RINGS[by])


@pytest.mark.parametrize("by", RINGS)
@pytest.mark.parametrize("dropped", [r"bar\.warp\.sync", r"mbarrier\.arrive\.shared"])
def test_a_stage_that_not_all_lanes_have_released_is_noticed(dropped: str, by: str) -> None:
    """The first ones of a kernel: lanes meet, then one releases what all have read."""
    mutant = next(without_each(compile_shape(RINGS[by].shape), dropped))[1]
    assert not survives(mutant, RINGS[by])
