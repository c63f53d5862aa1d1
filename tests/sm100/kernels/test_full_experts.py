"""Experts write their own rows and no others, whether they fill their last tile or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Options
from tests.sm100.support.mutants import compile_changed
from tests.sm100.support.products import ExpertCase

STRICT = Options(strict_tensor_waits=True)
DOWN = KernelShape(8, grouped=True)
GATE_UP = KernelShape(16, gated=True, grouped=True, output="nvfp4")
PAIRS = KernelShape(128, pair=True, grouped=True, shared_weights=2)
CASES = {
    "down": ExpertCase(DOWN, (8, 0, 16, 3), features=136, k=128, spare=1),
    "gate up": ExpertCase(GATE_UP, (16, 5, 32), features=128, k=128, spare=1),
    "pairs that share weights": ExpertCase(PAIRS, (128, 3), features=136, k=64, spare=1),
}


@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_no_row_behind_an_expert_is_written(case: str, clusters: int) -> None:
    CASES[case].check(STRICT, clusters)


ROWS = {"rows = (count + (tokens - 1)) >>": "rows = (count + tokens) >>"}
STORED = {"token_tile * self.token_tile < self.counts[expert]": "token_tile * self.token_tile <= self.counts[expert]"}
MISTAKES = {
    "a tile more for a full expert": ("down", ROWS),
    "a tile more for a full expert, re-quantised": ("gate up", ROWS),
    "a tile stored that is another expert's": ("pairs that share weights", STORED),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_row_more_of_a_full_expert_is_noticed(mistake: str, tmp_path: Path) -> None:
    """The case passes without the spare rows where experts run in order: the next one overwrites what is wrong."""
    name, changes = MISTAKES[mistake]
    case = CASES[name]
    epilogue = case.epilogue(case.shape.output)
    mutant = compile_changed(tmp_path, "common/schedule.py", changes, case.shape, epilogue)
    with pytest.raises(AssertionError, match="were written"):
        case.check(compiled=mutant)
    if name != "pairs that share weights":
        replace(case, spare=0, counts=(case.shape.token_tile, 3)).check(compiled=mutant)
