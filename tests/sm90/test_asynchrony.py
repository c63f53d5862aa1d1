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
SMALL = ProductCase(KernelShape(8), tokens=8, features=16, k=192)


@pytest.mark.parametrize("mode", list(MODES)[1:])
def test_results_do_not_depend_on_timing(mode: str) -> None:
    SMALL.check(MODES[mode])


def survives(mutant: Compiled) -> bool:
    """Whether a mutant passes in every mode."""
    for options in MODES.values():
        try:
            SMALL.check(options, compiled=mutant)
        except (EmulatorError, AssertionError):
            return False
    return True


DROPPED = {
    "proxy fence before the store": (r"fence\.proxy\.async", 1),
    "fences before wgmmas": (r"wgmma\.fence", 2),
    "waits for wgmmas": (r"wgmma\.wait_group", 3),
    "announced bytes, first pass": (r"mbarrier\.arrive\.expect_tx", 1),
    "bulk copies of weights, first pass": (r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier", 1),
}


@pytest.mark.parametrize("what", DROPPED)
def test_every_dropped_instruction_is_noticed(what: str) -> None:
    """The first ones of a kind, one after the other: those that a single pass over the ring executes."""
    pattern, count = DROPPED[what]
    mutants = list(without_each(compile_shape(SMALL.shape), pattern))[:count]
    assert len(mutants) == count
    assert [where for where, mutant in mutants if survives(mutant)] == []


def test_a_dropped_wait_for_operands_is_noticed() -> None:
    compiled = compile_shape(SMALL.shape)
    found = re.search(r"(mbarrier\.try_wait\.parity[^;]* (\w+), \[[^;]*;)", compiled.ptx)
    assert found is not None
    ptx = f"{compiled.ptx[: found.end()]} mov.pred {found.group(2)}, -1;{compiled.ptx[found.end() :]}"
    assert not survives(Compiled(compiled.function, ptx))
