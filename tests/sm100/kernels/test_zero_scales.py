"""Blocks whose scale underflows to 0 when an epilogue re-quantises them have codes 0, whatever the signs in them."""

from __future__ import annotations

from pathlib import Path

import torch

from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Compiled
from tests.sm100.support.mutants import compile_changed
from tests.sm100.support.products import ExpertCase, run, unswizzle_rows

CASE = ExpertCase(KernelShape(8, gated=True, grouped=True, output="nvfp4"), (8, 5), features=128, k=128)
TINY = 2.0**-60
"""What the second expert's up factor is multiplied by: its blocks are small, but not zero, and of both signs."""


def build(output: str) -> tuple[Call, Epilogue, slice]:
    """A call, and the rows of the second expert."""
    shape = KernelShape(8, gated=True, grouped=True, output=output)  # type: ignore[arg-type]
    call, *_ = ExpertCase(shape, CASE.counts, CASE.features, CASE.k).build()
    call.alpha[1, 1] *= TINY
    return call, CASE.epilogue(output), slice(8, 13)


def quantised(compiled: Compiled | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and codes of the second expert."""
    call, epilogue, rows = build("nvfp4")
    run(call, epilogue, compiled=compiled)
    assert call.out_scales is not None
    scales = unswizzle_rows(call.out_scales, call.rows, CASE.features // 16, CASE.shape.token_tile)
    assert (scales[:8] != 0).any() and (call.out[:8] != 0).any()
    return scales[rows], call.out[rows]


def test_codes_are_zero() -> None:
    scales, codes = quantised()
    assert not scales.any() and not codes.any()


def test_the_elements_are_not_all_positive() -> None:
    """So that the test above tells a code of -0 from one that was forced to 0."""
    call, epilogue, rows = build("fp32")
    run(call, epilogue)
    assert (call.out[rows] < 0).float().mean() > 0.2 and (call.out[rows] > 0).float().mean() > 0.2


def test_codes_that_are_not_forced_are_noticed(tmp_path: Path) -> None:
    changes = {"cutlass.select_(scale == 0, word(0), encoded)": "encoded"}
    mutant = compile_changed(tmp_path, "sm100/quantized_store.py", changes, CASE.shape, CASE.epilogue("nvfp4"))
    scales, codes = quantised(mutant)
    assert not scales.any() and codes.any()
