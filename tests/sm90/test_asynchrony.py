"""The Hopper kernel does not depend on when engines act, and a broken hand-over between its roles is noticed.

One pass over the ring of stages: that loads wait for a free stage is not shown here.
"""

from __future__ import annotations

import re

import pytest

from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from tests.sm90.support.products import ProductCase, compile_shape
from tests.sm100.emulator import Compiled, EmulatorError, Options
from tests.sm100.support.mutants import without_each

MODES = {
    "immediate": Options(),
    "random": Options("random", 1),
    "loads starved": Options("starved", 2, "tma_load"),
    "stores starved": Options("starved", 3, "tma_store"),
    "tensor core starved": Options("starved", 4, "tensor"),
}
CASES = {
    "warps": ProductCase(KernelShape(8), tokens=8, features=16, k=192),
    "warpgroups": ProductCase(KernelShape(32), tokens=8, features=16, k=192),
}
"""By what multiplies: warps with mma.sync, or warpgroups with wgmma."""


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
    "bulk copies of weights, first pass": ("warps", r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier", 1),
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


@pytest.mark.parametrize("by", CASES)
def test_a_dropped_wait_for_operands_is_noticed(by: str) -> None:
    case = CASES[by]
    compiled = compile_shape(case.shape)
    found = re.search(r"(mbarrier\.try_wait\.parity[^;]* (\w+), \[[^;]*;)", compiled.ptx)
    assert found is not None
    ptx = f"{compiled.ptx[: found.end()]} mov.pred {found.group(2)}, -1;{compiled.ptx[found.end() :]}"
    assert not survives(Compiled(compiled.function, ptx), case)
