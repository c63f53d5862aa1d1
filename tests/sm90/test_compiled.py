"""The Hopper kernels as compiled for sm_90a: wgmmas in flight, registers, spills, shared memory. Nothing here runs."""

from __future__ import annotations

import pytest

from nvfp4_sgl.cutedsl_kernels.common.shape import SPLITS, TOKEN_TILES
from nvfp4_sgl.cutedsl_kernels.sm90.shape import MIN_STAGES, KernelShape
from tests.sm100.support.sass import compile_binary


@pytest.mark.parametrize(
    ("shape", "registers"), [(KernelShape(8), 80), (KernelShape(64, split_k=4), 128), (KernelShape(256), 168)], ids=str
)
def test_sass(shape: KernelShape, registers: int) -> None:
    """A launch's registers; the widest kernel's warps that multiply then take 232 each."""
    from nvfp4_sgl.cutedsl_kernels.common.entry import Entry
    from nvfp4_sgl.cutedsl_kernels.sm90.epilogue import Epilogue
    from nvfp4_sgl.cutedsl_kernels.sm90.gemm import W4A16Gemm

    entry = Entry(W4A16Gemm(shape, Epilogue()))
    binary = compile_binary("sm_90a", entry, *entry.example())
    assert binary.count("HGMMA") == 8, "a stage of 128 of K"
    assert binary.count("WARPGROUP.ARRIVE") == 2, "ptxas has serialised the wgmmas of a group"
    assert binary.count("HMUL2.BF16") == 32, "64 weights a thread, two at a time"
    assert binary.count("STL") == binary.count("LDL") == binary.stack == binary.local == 0, "registers are spilled"
    assert binary.registers <= registers
    assert binary.count("USETMAXREG") == (2 if shape.reallocates else 0)


def every_shape() -> list[KernelShape]:
    return [
        KernelShape(tile, split, output)
        for tile in TOKEN_TILES
        for split in SPLITS
        for output in ("bf16", "fp32")
        if split == 1 or tile <= 64
    ]


@pytest.mark.parametrize("shape", every_shape(), ids=str)
def test_memory_budgets(shape: KernelShape) -> None:
    assert shape.stages >= MIN_STAGES
    assert shape.shared_bytes <= shape.max_shared_bytes
