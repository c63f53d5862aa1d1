"""The SM100 kernels do not depend on when engines act, and a broken hand-over between their roles is noticed."""

from __future__ import annotations

import re

import pytest

from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Compiled, EmulatorError, Options
from tests.sm100.support.entries import compile_entry
from tests.sm100.support.products import ExpertCase, ProductCase
from tests.support.full import but_for

MODES = {
    "immediate": Options(strict_tensor_waits=True),
    "random": Options("random", 1, strict_tensor_waits=True),
    "TMA loads starved": Options("starved", 2, "tma_load", strict_tensor_waits=True),
    "TMA stores starved": Options("starved", 3, "tma_store", strict_tensor_waits=True),
    "tensor core starved": Options("starved", 4, "tensor", strict_tensor_waits=True),
}
SMALL = ProductCase(KernelShape(8), tokens=8, features=384, k=1216)
"""Three tiles for one CTA, fifteen loads: more than there are stages."""
CASES: dict[str, ProductCase | ExpertCase] = {
    "decode": SMALL,
    "split": ProductCase(KernelShape(16, split_k=2), tokens=16, features=256, k=576),
    "one CTA": ProductCase(KernelShape(128), tokens=129, features=256, k=320),
    "pair, overlapping accumulators": ProductCase(KernelShape(256, pair=True), tokens=256, features=520, k=320),
    "pairs, multicast": ProductCase(
        KernelShape(128, pair=True, shared_tokens=2, shared_weights=2), tokens=129, features=264, k=320
    ),
    "experts, re-quantised": ExpertCase(
        KernelShape(16, gated=True, grouped=True, output="nvfp4"), (17, 0, 5), features=64, k=320
    ),
    "experts, pair": ExpertCase(KernelShape(128, pair=True, gated=True, grouped=True), (129, 1), features=128, k=128),
    "experts, split": ExpertCase(
        KernelShape(16, gated=True, grouped=True, split_k=4, output="nvfp4"), (17, 0, 5), features=64, k=1088
    ),
    "experts, down": ExpertCase(KernelShape(32, grouped=True), (33, 0, 40), features=136, k=128),
}


TIMED = [(case, mode) for case in CASES for mode in list(MODES)[1:]]
LARGE = ("pair, overlapping accumulators", "pairs, multicast", "experts, pair")
LONG = [(case, mode) for case in LARGE for mode in ("random", "TMA stores starved")]


@pytest.mark.parametrize(("case", "mode"), but_for(TIMED, *LONG))
def test_results_do_not_depend_on_timing(case: str, mode: str) -> None:
    CASES[case].check(MODES[mode], clusters=1)


# Planted bugs: (what is dropped or changed in the PTX, where it must be noticed). Each pattern is one instruction.


def compiled_small() -> Compiled:
    return compile_entry(SMALL.shape, Epilogue())


def occurrences(pattern: str) -> list[str]:
    """Whole PTX statements that match."""
    return re.findall(rf"^\s*((?:@!?%p\d+ )?{pattern}[^;]*;)", compiled_small().ptx, re.M)


def survives(ptx: str) -> bool:
    """Whether a mutant passes in every mode."""
    mutant = Compiled(compiled_small().function, ptx)
    for options in MODES.values():
        try:
            SMALL.check(options, compiled=mutant)
        except (EmulatorError, AssertionError):
            return False
    return True


DROPPED = {
    "proxy fence before the store": r"fence\.proxy\.async",
    "tcgen05.wait::ld": r"tcgen05\.wait::ld",
    "tcgen05.fence after waits": r"tcgen05\.fence::after_thread_sync",
    "tcgen05.fence before signals": r"tcgen05\.fence::before_thread_sync",
    "commits": r"tcgen05\.commit",
    "announced bytes": r"mbarrier\.arrive\.expect_tx",
    "barriers of the epilogue": r"(?:bar|barrier)(?:\.cta)?\.sync",
    "waits for stores to have read": r"cp\.async\.bulk\.wait_group\.read",
    "block scales to tensor memory": r"tcgen05\.cp",
    "products": r"tcgen05\.mma",
    "tensor memory given back": r"tcgen05\.dealloc",
}


@pytest.mark.parametrize("what", DROPPED)
def test_every_dropped_instruction_is_noticed(what: str) -> None:
    """All instructions of a kind, one after the other."""
    found = occurrences(DROPPED[what])
    assert found, f"the kernel has no {DROPPED[what]}"
    ptx = compiled_small().ptx
    survivors = []
    for statement in sorted(set(found)):
        pieces = ptx.split(statement)
        for i in range(1, len(pieces)):
            mutant = statement.join(pieces[:i]) + "// " + statement.join(pieces[i:])
            if survives(mutant):
                survivors.append(f"{i}: {statement}")
    assert not survivors


def test_every_dropped_wait_is_noticed() -> None:
    """A wait for an mbarrier that is over at once, one after the other."""
    wait = re.compile(r"(mbarrier\.try_wait\.parity[^;]* (\w+), \[[^;]*;)")
    found = list(wait.finditer(compiled_small().ptx))
    assert len(found) == 4, "loads wait for a free stage, MMAs for operands and a free buffer, the epilogue for sums"
    for match in found:
        ptx = compiled_small().ptx
        mutant = f"{ptx[: match.end()]} mov.pred {match.group(2)}, -1;{ptx[match.end() :]}"
        assert not survives(mutant), match.group(0)
