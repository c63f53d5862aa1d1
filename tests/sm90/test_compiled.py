"""The Hopper kernels as compiled for sm_90a: wgmmas in flight, registers, spills, shared memory. Nothing here runs."""

from __future__ import annotations

import pytest

from nvfp4_sgl.cutedsl_kernels.common.shape import TOKEN_TILES
from nvfp4_sgl.cutedsl_kernels.sm90.shape import HOPPER_SPLITS, MAX_CTAS, MIN_STAGES, KernelShape, max_split
from tests.sm90.support.machine_code import checked_binary
from tests.support.full import but_for

SHAPES = [
    KernelShape(8),
    KernelShape(16),
    KernelShape(16, split_k=8),
    KernelShape(8, split_k=3, max_ctas=1),
    KernelShape(64, split_k=2),
    KernelShape(256),
    KernelShape(8, copies=7),
    KernelShape(16, split_k=8, copies=1),
    KernelShape(64, split_k=2, copies=3),
    KernelShape(64, split_k=2, copies=7),
    KernelShape(32, split_k=8, copies=7),
    KernelShape(32, split_k=4, copies=7),
    KernelShape(256, copies=7),
    KernelShape(128, grouped=True),
    KernelShape(256, grouped=True),
    KernelShape(256, gated=True, grouped=True),
    KernelShape(256, output="fp32", grouped=True),
    KernelShape(128, output="fp32", grouped=True),
    KernelShape(128, gated=True, grouped=True),
    KernelShape(8, gated=True, grouped=True),
    KernelShape(16, grouped=True),
    KernelShape(32, split_k=8, gated=True, grouped=True),
    KernelShape(64, split_k=2, gated=True, grouped=True),
    KernelShape(8, gated=True, grouped=True, gathers=True),
    KernelShape(16, gated=True, grouped=True, gathers=True),
    KernelShape(8, split_k=4, gated=True, grouped=True, gathers=True),
    KernelShape(8, grouped=True, counts_ahead=True),
    KernelShape(16, split_k=2, grouped=True, counts_ahead=True),
    KernelShape(128, grouped=True, counts_ahead=True),
    KernelShape(256, grouped=True, counts_ahead=True),
]
BETWEEN = [
    KernelShape(16),
    KernelShape(64, split_k=2),
    KernelShape(128, grouped=True),
    KernelShape(256, grouped=True),
    KernelShape(128, output="fp32", grouped=True),
    KernelShape(128, gated=True, grouped=True),
    KernelShape(16, grouped=True),
    KernelShape(128, grouped=True, counts_ahead=True),
]
"""Those that take no more registers than others of their kind."""


@pytest.mark.parametrize("shape", but_for(SHAPES, *BETWEEN), ids=str)
def test_sass(shape: KernelShape) -> None:
    binary = checked_binary(shape)
    assert binary.count("USETMAXREG") == (2 if shape.reallocates else 0)


def every_shape() -> list[KernelShape]:
    return [
        KernelShape(tile, split, output, gated, grouped, max_ctas=ctas)
        for tile in TOKEN_TILES
        for split in HOPPER_SPLITS
        for output in ("bf16", "fp32")
        for gated in (False, True)
        for grouped in (False, True)
        for ctas in range(1, MAX_CTAS + 1)
        if split <= max_split(tile)
    ]


@pytest.mark.parametrize("shape", every_shape(), ids=str)
def test_memory_budgets(shape: KernelShape) -> None:
    assert shape.stages >= MIN_STAGES
    assert shape.shared_bytes <= shape.max_shared_bytes
    assert shape.ctas_per_sm * (shape.shared_bytes + 1024) <= 228 * 1024
