"""The Hopper kernel does not depend on when engines act, and a broken hand-over between its roles is noticed."""

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
SMALL = ProductCase(KernelShape(8), tokens=8, features=256, k=7 * 128)
"""Two tiles for one CTA, fourteen loads: more than there are stages."""
SPLIT = ProductCase(KernelShape(8, split_k=2), tokens=5, features=136, k=320)


@pytest.mark.parametrize("mode", list(MODES)[1:])
def test_results_do_not_depend_on_timing(mode: str) -> None:
    SMALL.check(MODES[mode])


def test_split_sums_do_not_depend_on_timing() -> None:
    SPLIT.check(MODES["random"])


def survives(mutant: Compiled) -> bool:
    """Whether a mutant passes in every mode."""
    for options in MODES.values():
        try:
            SMALL.check(options, compiled=mutant)
        except (EmulatorError, AssertionError):
            return False
    return True


DROPPED = {
    "proxy fence before the store": r"fence\.proxy\.async",
    "fences before wgmmas": r"wgmma\.fence",
    "waits for wgmmas": r"wgmma\.wait_group",
    "announced bytes": r"mbarrier\.arrive\.expect_tx",
    "bulk copies of weights": r"cp\.async\.bulk\.shared::cluster",
}


@pytest.mark.parametrize("what", DROPPED)
def test_every_dropped_instruction_is_noticed(what: str) -> None:
    """All instructions of a kind, one after the other."""
    mutants = list(without_each(compile_shape(SMALL.shape), DROPPED[what]))
    assert mutants, f"the kernel has no {DROPPED[what]}"
    assert [where for where, mutant in mutants if survives(mutant)] == []


def test_every_dropped_wait_is_noticed() -> None:
    """A wait for an mbarrier that is over at once, one after the other."""
    compiled = compile_shape(SMALL.shape)
    wait = re.compile(r"(mbarrier\.try_wait\.parity[^;]* (\w+), \[[^;]*;)")
    found = list(wait.finditer(compiled.ptx))
    assert len(found) == 2, "loads wait for a free stage, warps for a full one"
    for match in found:
        ptx = f"{compiled.ptx[: match.end()]} mov.pred {match.group(2)}, -1;{compiled.ptx[match.end() :]}"
        assert not survives(Compiled(compiled.function, ptx)), match.group(0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"0x4141;", "0x4040;"),  # another row's scale
        (r"shf.l.wrap.b32 {}, {}, {}, 14;", None),  # one register's codes
    ],
    ids=["scale", "codes"],
)
def test_a_wrong_weight_is_noticed(old: str, new: str | None) -> None:
    ptx = compile_shape(SMALL.shape).ptx
    if new is None:
        changed, count = re.subn(r"(shf\.l\.wrap\.b32 \S+ \S+ \S+) 14;", r"\1 13;", ptx)
    else:
        changed, count = ptx.replace(old, new), ptx.count(old)
    assert count
    with pytest.raises(AssertionError):
        SMALL.check(compiled=Compiled(compile_shape(SMALL.shape).function, changed))
