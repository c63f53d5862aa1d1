"""The SM100 kernel with MXFP8 operands, executed in the emulator, against fp64: E4M3 codes, UE8M0 scales of 32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.common.shape import Output
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Options
from tests.sm100.support.products import ExpertCase, ProductCase, run
from tests.sm100.support.scaled_gemm import ScaledGemm, ScaledOperand
from tests.support.full import full

STRICT = Options(strict_tensor_waits=True)


def dense(token_tile: int, *, pair: bool = False, split_k: int = 1, output: Output = "bf16") -> KernelShape:
    return KernelShape(token_tile, split_k, output, pair=pair, operands="mxfp8")


PRODUCTS = [
    # Decode; features and K that fill no tile, K that fills no atom of scales.
    ProductCase(dense(8), tokens=3, features=136, k=416),
    ProductCase(dense(16, split_k=2, output="fp32"), tokens=9, features=128, k=512),
    ProductCase(dense(64), tokens=33, features=72, k=256),
    # Several token tiles, a pair.
    ProductCase(dense(128), tokens=131, features=136, k=160),
    ProductCase(dense(256), tokens=300, features=136, k=160),
    ProductCase(dense(256, pair=True, output="fp32"), tokens=257, features=264, k=160),
    # The block-diagonal GEMM; a group's K fills no atom of scales.
    ProductCase(dense(8), tokens=5, features=136, k=128, groups=3),
    ProductCase(dense(128, pair=True), tokens=130, features=256, k=96, groups=2),
]


def name(case: ProductCase) -> str:
    shape = case.shape
    kind = "pair " * shape.pair + f"split {shape.split_k} " * (shape.split_k > 1)
    return f"{kind}{shape.token_tile} {shape.output} {case.tokens}x{case.features}x{case.k}x{case.groups}"


@pytest.mark.parametrize("case", PRODUCTS, ids=name)
def test_equals_fp64_after_rounding(case: ProductCase) -> None:
    statistics = case.check(STRICT)
    assert any("tcgen05.mma" in opcode and "kind::mxf8f6f4" in opcode for opcode in statistics.by_opcode())


GATED = [
    ExpertCase(KernelShape(8, gated=True, operands="mxfp8"), (5,), features=96, k=160),
    ExpertCase(KernelShape(16, 2, gated=True, operands="mxfp8"), (11,), features=64, k=512),
    ExpertCase(KernelShape(128, output="fp32", gated=True, pair=True, operands="mxfp8"), (131,), features=160, k=128),
]


@pytest.mark.parametrize("case", GATED, ids=str)
def test_gates_and_ups_of_a_shared_expert(case: ExpertCase) -> None:
    case.check(STRICT)


@pytest.mark.parametrize("clusters", [2, 3])
def test_persistent_clusters_share_the_tiles(clusters: int) -> None:
    ProductCase(dense(8), tokens=8, features=5 * 128, k=256).check(STRICT, clusters)


@pytest.mark.parametrize("seed", [1, *full(2)])
def test_any_order_of_warps_gives_the_same(seed: int) -> None:
    ProductCase(dense(128, pair=True), tokens=140, features=264, k=416).check(Options("random", seed))


@pytest.mark.parametrize("shape", [*full(dense(128, output="fp32")), dense(128, pair=True, output="fp32")], ids=str)
def test_equals_nvidias_kernel_bit_for_bit(shape: KernelShape) -> None:
    """The same bytes in NVIDIA's GEMM, as FlashInfer installs it: the layouts are what it reads."""
    pytest.importorskip("flashinfer")
    case = ProductCase(shape, tokens=132, features=264, k=384)
    call, epilogue = case.build()
    call = replace(call, row_scale=torch.ones(1), alpha=torch.ones(1, case.features))
    run(call, epilogue)
    a, b = (
        ScaledOperand(operand.packed[0], operand.swizzled().flatten(), operand.values(0)) for operand in case.operands()
    )
    theirs, _ = ScaledGemm("e4m3", (128, 128), (1, 1)).multiply(a, b, Options())
    assert torch.equal(call.out[:, 0], theirs.T)


@pytest.mark.full
def test_a_gemm_of_flash_for_one_token() -> None:
    """wq_a and wkv, merged: 1536 features by 4096."""
    ProductCase(dense(8, split_k=4, output="fp32"), tokens=1, features=1536, k=4096).check(clusters=4)
