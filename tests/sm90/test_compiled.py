"""The Hopper kernels as compiled for sm_90a: wgmmas in flight, registers, spills, shared memory. Nothing here runs."""

from __future__ import annotations

import pytest

from nvfp4_sgl.cutedsl_kernels.common.shape import SPLITS, TOKEN_TILES
from nvfp4_sgl.cutedsl_kernels.sm90.shape import MIN_STAGES, KernelShape
from tests.sm100.support.sass import compile_binary


@pytest.mark.parametrize(
    "shape",
    [KernelShape(8), KernelShape(16), KernelShape(16, split_k=8), KernelShape(64, split_k=2), KernelShape(256)],
    ids=str,
)
def test_sass(shape: KernelShape) -> None:
    """The loop's instructions, and registers that let as many CTAs share an SM as the shape promises."""
    from nvfp4_sgl.cutedsl_kernels.common.entry import Entry
    from nvfp4_sgl.cutedsl_kernels.sm90.epilogue import Epilogue
    from nvfp4_sgl.cutedsl_kernels.sm90.gemm import W4A16Gemm

    entry = Entry(W4A16Gemm(shape, Epilogue()))
    binary = compile_binary("sm_90a", entry, *entry.example())
    assert binary.count("HGMMA") == 8, "a stage of 128 of K"
    assert binary.count("WARPGROUP.ARRIVE") == 2, "ptxas has serialised the wgmmas of a group"
    assert binary.count("HMUL2.BF16") == 32, "64 weights a thread, two at a time"
    assert binary.count("STL") == binary.count("LDL") == binary.stack == binary.local == 0, "registers are spilled"
    assert binary.registers <= shape.max_registers
    assert binary.count("USETMAXREG") == (2 if shape.reallocates else 0)


def every_shape() -> list[KernelShape]:
    return [
        KernelShape(tile, split, output)
        for tile in TOKEN_TILES
        for split in SPLITS
        for output in ("bf16", "fp32")
        if split == 1 or tile <= 32 or (tile == 64 and split == 2)
    ]


@pytest.mark.parametrize("shape", every_shape(), ids=str)
def test_memory_budgets(shape: KernelShape) -> None:
    assert shape.stages >= MIN_STAGES
    assert shape.shared_bytes <= shape.max_shared_bytes
    assert shape.ctas_per_sm * (shape.shared_bytes + 1024) <= 228 * 1024
