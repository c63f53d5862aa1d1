"""Lanes of a warp of the epilogue exchange values through shared memory; each of its barriers there is needed."""

from __future__ import annotations

import re

import pytest

from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Compiled, HazardError, Options
from tests.sm100.support.entries import compile_entry
from tests.sm100.support.products import ExpertCase

BARRIER = r"\s*bar\.warp\.sync\s+-1;"
STAGED = rf"(fence\.proxy\.async\.shared::cta;){BARRIER}"
"""Before a store by TMA reads what all lanes have written."""
REQUANTISED = ExpertCase(
    KernelShape(256, pair=True, gated=True, grouped=True, output="nvfp4"), (130,), features=64, k=64
)
"""Four chunks for each team: the next one's values take the place of the last one's."""
ENCODED = r"cvt\.rn\.satfinite\.e2m1x2\.f32[^}]*}[^}]*}\s*// end inline asm"
CASES = {
    "bf16": (ExpertCase(KernelShape(8, grouped=True), (3, 9), features=128, k=64), STAGED),
    "fp32": (ExpertCase(KernelShape(8, grouped=True, output="fp32"), (3, 9), features=128, k=64), STAGED),
    "turned": (REQUANTISED, rf"(st\.shared[^;]*;){BARRIER}"),
    "turned again": (REQUANTISED, rf"({ENCODED}){BARRIER}"),
}
"""The kernel and where a barrier is, behind what stays."""


@pytest.mark.parametrize("options", [Options(), Options("random", 1)], ids=["immediate", "random"])
@pytest.mark.parametrize("case", CASES)
def test_a_missing_barrier_is_noticed(case: str, options: Options) -> None:
    expert, pattern = CASES[case]
    compiled = compile_entry(expert.shape, expert.epilogue(expert.shape.output))
    ptx, count = re.subn(pattern, r"\1", compiled.ptx)
    assert count >= 1, f"the kernel has no {pattern}"
    with pytest.raises(HazardError, match="without being ordered after|by another lane"):
        expert.check(options, compiled=Compiled(compiled.function, ptx))
