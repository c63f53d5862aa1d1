"""Each element gets the factors of its own row, feature and tile, which are under way a tile ahead; so do fp32 results
their own buffer, while the one before is still being read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import EmulatorError, Options
from tests.sm100.support.entries import compile_entry
from tests.sm100.support.mutants import compile_changed, without_each
from tests.sm100.support.products import ExpertCase, ProductCase

PLAIN = ProductCase(KernelShape(32), tokens=40, features=256, k=64)
SPLIT = ProductCase(KernelShape(16, split_k=2), tokens=20, features=256, k=512)
EXPERTS = ExpertCase(KernelShape(16, grouped=True), (3, 17), features=136, k=64)
FP32 = ProductCase(KernelShape(64, output="fp32"), tokens=64, features=256, k=64)
"""Two tiles, in each four stores for a team."""
GEMM, EPILOGUE = "sm100/gemm.py", "sm100/epilogue.py"
MISTAKES: dict[str, tuple[ProductCase | ExpertCase, str, dict[str, str]]] = {
    "the same tile's again": (PLAIN, GEMM, {"total, tile + work.step, peer)": "total, tile, peer)"}),
    "the same tile's again, split": (SPLIT, GEMM, {"total, tile + work.step, Int32(0))": "total, tile, Int32(0))"}),
    "another token's": (PLAIN, EPILOGUE, {"within // 8 * 2 + within % 2": "within // 8 * 2 + (within + 1) % 2"}),
    "another group's": (EXPERTS, EPILOGUE, {"within // 8 * 2 +": "(groups - 1 - within // 8) * 2 +"}),
    "row scales for weights": (EXPERTS, EPILOGUE, {"place = which * shape.token_tile + chunk": "place = chunk"}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_factors_of_something_else_are_noticed(mistake: str, tmp_path: Path) -> None:
    case, file, changes = MISTAKES[mistake]
    epilogue = case.epilogue(case.shape.output) if isinstance(case, ExpertCase) else Epilogue()
    case.check()
    with pytest.raises(AssertionError, match="wrong"):
        case.check(compiled=compile_changed(tmp_path, file, changes, case.shape, epilogue))


def test_every_wait_for_a_buffer_of_fp32_is_needed() -> None:
    assert FP32.shape.warp_buffers == 2
    starved = Options("starved", 3, "tma_store")
    FP32.check(starved)
    compiled = compile_entry(FP32.shape, Epilogue())
    mutants = list(without_each(compiled, r"cp\.async\.bulk\.wait_group\.read"))
    assert len(mutants) == 3, "one for each buffer, and one at the end"
    for left_out, mutant in mutants:
        with pytest.raises((EmulatorError, AssertionError)):
            FP32.check(starved, compiled=mutant)
            pytest.fail(left_out)


@pytest.mark.parametrize(("tile", "reads"), [(8, ["b64"]), (16, ["v2.b64"]), (256, ["v2.b64"] * 2)])
def test_row_factors_are_read_16_bytes_at_a_time(tile: int, reads: list[str]) -> None:
    """A thread has two of every eight tokens."""
    ptx = compile_entry(KernelShape(tile), Epilogue()).ptx
    assert re.findall(r"ld\.shared\.((?:v\d\.)?b64)", ptx) == reads


REQUANTISED = ExpertCase(KernelShape(8, gated=True, grouped=True, output="nvfp4"), (3,), features=64, k=64)


def literals(ptx: str) -> set[int]:
    """Bits of the fp32 constants."""
    return {int(bits, 16) for bits in re.findall(r"\b0[fF]([0-9A-Fa-f]{8})\b", ptx)}


def test_the_reciprocal_of_the_row_scale_is_rounded_as_the_reference_rounds_it(tmp_path: Path) -> None:
    """It is a constant of the code: an ulp would change few scales, so no output is sure to tell."""
    epilogue = REQUANTISED.epilogue("nvfp4")
    assert epilogue.row_scale_constant is not None
    row_scale = torch.tensor(epilogue.row_scale_constant, dtype=torch.float32)
    bits = int((1.0 / row_scale).view(torch.int32))
    assert bits in literals(compile_entry(REQUANTISED.shape, epilogue).ptx)
    inexact = {"float(np.float32(1) / np.float32(row_scale))": "float(np.nextafter(np.float32(1 / row_scale), 0))"}
    mutant = compile_changed(tmp_path, "sm100/quantized_store.py", inexact, REQUANTISED.shape, epilogue)
    assert bits not in literals(mutant.ptx)
