"""Products of FP8 weights on the Hopper kernel, executed in the emulator, against fp64; and the kernel as compiled."""

from __future__ import annotations

from typing import Any

import pytest

from nvfp4_sgl.cutedsl_kernels.common.shape import SPLITS, Output
from nvfp4_sgl.cutedsl_kernels.sm90 import stage
from nvfp4_sgl.cutedsl_kernels.sm90.shape import GEMM_TOKEN_TILES, MIN_STAGES, KernelShape, max_split
from tests.sm90.support.machine_code import checked_binary
from tests.sm90.support.products import ProductCase, compile_anew
from tests.sm100.emulator import Options


def fp8(token_tile: int, split_k: int = 1, output: Output = "bf16") -> KernelShape:
    return KernelShape(token_tile, split_k, output, weights="fp8")


CASES = [
    # Decode: one token to a full tile; features and K that fill no tile.
    ProductCase(fp8(8), tokens=1, features=200, k=576),
    ProductCase(fp8(8), tokens=7, features=136, k=64, wider=24),
    ProductCase(fp8(32, output="fp32"), tokens=17, features=68, k=64, wider=8),
    # Several token tiles; a single staging buffer for two chunks.
    ProductCase(fp8(64), tokens=70, features=72, k=64),
    ProductCase(fp8(64, output="fp32"), tokens=64, features=20, k=128),
    ProductCase(fp8(128), tokens=128, features=16, k=64),
    # Groups, K split over a cluster.
    ProductCase(fp8(8), tokens=5, features=136, k=192, groups=2),
    ProductCase(fp8(8, 2), tokens=8, features=72, k=320),
    ProductCase(fp8(16, 4, "fp32"), tokens=10, features=68, k=576),
    ProductCase(fp8(64, 2), tokens=64, features=16, k=256),
]


def name(case: ProductCase) -> str:
    split = f"split {case.shape.split_k} " * (case.shape.split_k > 1)
    groups = f" x{case.groups}" * (case.groups > 1)
    return f"{split}{case.shape.token_tile} {case.shape.output} {case.tokens}x{case.features}x{case.k}{groups}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_equals_fp64_after_rounding(case: ProductCase) -> None:
    case.check()


def test_the_ring_goes_round() -> None:
    """More stages than there are, by two clusters, whatever is late."""
    ProductCase(fp8(8), tokens=8, features=3 * 128, k=7 * 128).check(Options("random", 4), clusters=2)


def test_bytes_loaded_are_the_operands_once() -> None:
    """A byte a weight and 512 bytes of factors a tile; tokens once for each tile of features."""
    statistics = ProductCase(fp8(8), tokens=8, features=256, k=384).check()
    assert statistics.engine_bytes["tma_load"] == 256 * 384 + 6 * 512 + 2 * 8 * 384 * 2
    assert statistics.engine_bytes["tma_store"] == 8 * 256 * 2


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="token_tile is at most 128 for fp8 weights, found 256"):
        fp8(256)
    for gated, grouped in ((True, False), (False, True)):
        with pytest.raises(ValueError, match="weights: expected 'nvfp4' for gated and grouped kernels, found 'fp8'"):
            KernelShape(8, weights="fp8", gated=gated, grouped=grouped)
    other: Any = "mxfp8"
    with pytest.raises(ValueError, match="weights: expected one of"):
        KernelShape(8, weights=other)


MISTAKES: dict[str, Any] = {
    "the other half's factors": lambda right: (
        lambda tile, warp, lane, half: (
            *right(tile, warp, lane, half)[:8],
            right(tile, warp, lane, 1 - half)[8],
        )
    ),
    "the factors of another row": lambda right: (
        lambda tile, warp, lane, half: (
            *right(tile, warp, lane, half)[:8],
            right(tile, warp, lane ^ 4, half)[8],
        )
    ),
    "another warp's codes": lambda right: (
        lambda tile, warp, lane, half: (
            *right(tile, warp ^ 1, lane, half)[:8],
            right(tile, warp, lane, half)[8],
        )
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_load_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stage.LOAD_HALF, "fp8", MISTAKES[mistake](stage.LOAD_HALF["fp8"]))
    case = CASES[0]
    with pytest.raises(AssertionError, match="wrong"):
        case.check(compiled=compile_anew(case.shape))


# The kernels as compiled for sm_90a. Nothing of the following runs.


@pytest.mark.parametrize("shape", [fp8(8), fp8(16, 8), fp8(32, output="fp32"), fp8(64), fp8(64, 2), fp8(128)], ids=str)
def test_sass(shape: KernelShape) -> None:
    checked_binary(shape)


@pytest.mark.parametrize("output", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("tile", "split"),
    [(tile, split) for tile in GEMM_TOKEN_TILES["fp8"] for split in SPLITS if split <= max_split(tile)],
)
def test_memory_budgets(tile: int, split: int, output: Output) -> None:
    shape = fp8(tile, split, output)
    assert shape.stages >= MIN_STAGES
    assert shape.shared_bytes <= shape.max_shared_bytes
    assert shape.ctas_per_sm * (shape.shared_bytes + 1024) <= 228 * 1024
