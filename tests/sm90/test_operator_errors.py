"""Wrong arguments of the w4a16 operators: an error that names the argument, and never a launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.errors import ArchitectureError
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape as BlackwellShape
from nvfp4_sgl.cutedsl_kernels.w4a16 import custom_ops  # noqa: F401
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.errors import OperandError, OperandTypeError, OperandValueError
from tests.support.reference_gemms import DryLauncher, dry_gemms

T, F, K, G, E, TILE = 24, 64, 128, 2, 3, 8
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def runner() -> Iterator[DryLauncher]:
    with dry_gemms("sm_90a") as dry:
        yield dry


def tiles(matrices: int, features: int = F, k: int = K) -> torch.Tensor:
    return torch.zeros(matrices, -(-features // 128), -(-k // 128), 9216, dtype=torch.uint8)


def copies(count: int, *last: torch.Tensor) -> list[torch.Tensor]:
    """Right copies of a product's result, then ``last``."""
    return [*(torch.zeros(T, F, dtype=BF16) for _ in range(count)), *last]


def product(**changed: Any) -> None:
    """A right call but for what is ``changed``."""
    right = {
        "tokens": torch.zeros(T, K, dtype=BF16),
        "weights": tiles(1),
        "alpha": torch.ones(1, F),
        "out": torch.zeros(T, F, dtype=BF16),
        "copies": [],
    }
    torch.ops.nvfp4_sgl.w4a16_product(*(right | changed).values())


def experts(**changed: Any) -> None:
    right = {
        "tokens": torch.zeros(T, K, dtype=BF16),
        "token_tile": TILE,
        "offsets": torch.zeros(E, dtype=torch.int32),
        "counts": torch.zeros(E, dtype=torch.int32),
        "weights": tiles(E, 2 * F),
        "alpha": torch.ones(E, 2),
        "limit": 10.0,
        "sources": None,
        "counts_ahead": False,
        "out": torch.zeros(T, F, dtype=BF16),
    }
    torch.ops.nvfp4_sgl.w4a16_experts(*(right | changed).values())


SOURCES = torch.zeros(T, dtype=torch.int32)


def test_right_calls_are_launched(runner: DryLauncher) -> None:
    product()
    product(copies=copies(3))
    product(tokens=torch.zeros(T, G, K, dtype=BF16), weights=tiles(G), alpha=torch.ones(G, F), out=torch.zeros(T, G, F))
    experts()
    experts(weights=tiles(E), alpha=torch.ones(E), limit=None)
    experts(weights=tiles(E), alpha=torch.ones(E), limit=None, counts_ahead=True)
    experts(tokens=torch.zeros(5, K, dtype=BF16), sources=SOURCES)
    assert len(runner.keys) == 7 and runner.keys[5].shape.counts_ahead and runner.keys[1].shape.copies == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": torch.zeros(T, K)}, "tokens: expected dtype torch.bfloat16, found torch.float32"),
        ({"tokens": torch.zeros(T, 96, dtype=BF16)}, "tokens: expected K to be a positive multiple of 64"),
        ({"tokens": torch.zeros(K, T, dtype=BF16).T}, "tokens: expected the last dimension to be contiguous"),
        ({"tokens": torch.zeros(T, K + 4, dtype=BF16)[:, :K]}, "tokens: expected .*multiples? of 16"),
        ({"tokens": torch.zeros(K, dtype=BF16)}, r"tokens: expected shape \[rows, K\]"),
        ({"weights": tiles(1, k=256)}, "weights: expected shape .1, 1, 1, 9216. = tiles of matrices of 64 features"),
        ({"weights": tiles(2)}, "weights: expected 1 matrices, as tokens have groups, found 2"),
        ({"weights": tiles(1).view(torch.int8)}, "weights: expected dtype torch.uint8"),
        ({"alpha": torch.ones(1, F - 1)}, r"alpha: expected shape \(1, 64\)"),
        ({"alpha": torch.ones(1, F, dtype=torch.float64)}, "alpha: expected dtype torch.float32"),
        ({"out": torch.zeros(T, F, dtype=torch.float16)}, "out: expected dtype torch.bfloat16 or torch.float32"),
        ({"out": torch.zeros(T - 1, F, dtype=BF16)}, r"out: expected shape \(24, 64\)"),
        (
            {"out": torch.zeros(T, 72, dtype=BF16)[:, :68], "alpha": torch.ones(1, 68), "weights": tiles(1, 68)},
            "out: expected features to be a positive multiple of 8",
        ),
        ({"tokens": torch.zeros(T * K + 1, dtype=BF16)[1:].view(T, K)}, "tokens: expected an address"),
        ({"alpha": torch.ones(1, F, device="meta")}, "alpha: expected device cpu"),
        ({"copies": copies(2)}, r"copies: expected one of \(0, 1, 3, 7\), found 2"),
        (
            {"copies": copies(1), "out": torch.zeros(T, F)},
            r"copies: expected none unless out is bf16 \[rows, features\]",
        ),
        (
            {
                "tokens": torch.zeros(T, G, K, dtype=BF16),
                "weights": tiles(G),
                "alpha": torch.ones(G, F),
                "out": torch.zeros(T, G, F, dtype=BF16),
                "copies": [torch.zeros(T, G, F, dtype=BF16)],
            },
            "copies: expected none unless out is .*, found 1 of torch.bfloat16 with 3 dimensions",
        ),
        ({"copies": copies(2, torch.zeros(T, F))}, r"copies\[2\]: expected dtype torch.bfloat16, found torch.float32"),
        (
            {"copies": copies(0, torch.zeros(T - 1, F, dtype=BF16))},
            r"copies\[0\]: expected shape \(24, 64\) = that of out",
        ),
        (
            {"copies": copies(0, torch.zeros(T, F + 8, dtype=BF16)[:, :F])},
            r"copies\[0\]: expected strides those of out, \(64, 1\), found \(72, 1\)",
        ),
        ({"copies": copies(2, torch.zeros(T * F + 1, dtype=BF16)[1:].view(T, F))}, r"copies\[2\]: expected an address"),
        ({"copies": copies(0, torch.zeros(T, F, dtype=BF16, device="meta"))}, r"copies\[0\]: expected device cpu"),
    ],
)
def test_wrong_products(changed: dict[str, Any], message: str, runner: DryLauncher) -> None:
    with pytest.raises(OperandError, match=message):
        product(**changed)
    assert not runner.keys


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token_tile": 512}, r"token_tile: expected one of \(8, 16, 32, 64, 128, 256\), found 512"),
        ({"offsets": torch.zeros(E)}, "offsets: expected dtype torch.int32"),
        ({"counts": torch.zeros(E + 1, dtype=torch.int32)}, r"counts: expected shape \(3,\)"),
        ({"alpha": torch.ones(E)}, r"alpha: expected shape \(3, 2\)"),
        ({"limit": None}, "weights: expected shape|alpha: expected shape"),
        ({"limit": 0.0}, "limit: expected a positive clamp, found 0.0"),
        ({"limit": float("nan")}, "limit: expected a positive clamp, found nan"),
        (
            {"weights": tiles(513, 2 * F), "offsets": torch.zeros(513, dtype=torch.int32)},
            "weights: expected 1 to 512 experts",
        ),
        ({"out": torch.zeros(T, 60, dtype=BF16)}, "out: expected features to be a positive multiple of 8"),
        ({"out": torch.zeros(T + 8, F, dtype=BF16)}, r"out: expected shape \(24, 64\)"),
        ({"sources": SOURCES.long()}, "sources: expected dtype torch.int32"),
        ({"sources": SOURCES[1:]}, r"sources: expected shape \(24,\)"),
        ({"sources": SOURCES.repeat(2)[::2]}, "sources: expected .*contiguous"),
        ({"sources": SOURCES, "tokens": torch.zeros(T + 1, K, dtype=BF16)}, "tokens: expected at most as many rows"),
        (
            {"sources": SOURCES[:20], "tokens": torch.zeros(5, K, dtype=BF16), "out": torch.zeros(20, F, dtype=BF16)},
            "sources: expected rows to be a positive multiple of 8 .*found 20",
        ),
        ({"sources": SOURCES, "token_tile": 32}, "sources: expected a gated GEMM with a token tile that gathers"),
        ({"sources": SOURCES, "limit": None}, "sources: expected a gated GEMM"),
        ({"counts_ahead": True}, "counts_ahead: expected False for a gated GEMM"),
    ],
)
def test_wrong_experts(changed: dict[str, Any], message: str, runner: DryLauncher) -> None:
    with pytest.raises(OperandError, match=f"w4a16_experts: ({message})"):
        experts(**changed)
    assert not runner.keys


def test_another_gpu() -> None:
    with (
        dry_gemms("sm_100a"),
        pytest.raises(ArchitectureError, match="expected sm_90a for bf16 activations, found sm_100a"),
    ):
        product()


def test_operators_trace_on_fake_tensors() -> None:
    with torch._subclasses.FakeTensorMode():
        product()
        product(copies=copies(1))
        with pytest.raises(OperandValueError, match="out: expected shape"):
            product(out=torch.zeros(T + 1, F, dtype=BF16))


def test_keys_of_another_architecture_are_refused() -> None:
    with pytest.raises(OperandValueError, match="shape: expected one of sm_90a"):
        KernelKey("sm_90a", BlackwellShape(8))
    with pytest.raises(OperandValueError, match="shape: expected one of sm_100a"):
        KernelKey("sm_100a", KernelShape(8))
    with pytest.raises(OperandValueError, match="weighted: expected False"):
        KernelKey("sm_90a", KernelShape(8), weighted=True)


class TestWeights:
    """What ``TiledWeights`` refuses."""

    def scales(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8).view(torch.float8_e4m3fn)

    def test_dense(self) -> None:
        codes = torch.zeros(F, K // 2, dtype=torch.uint8)
        with pytest.raises(OperandValueError, match=r"codes: expected shape \[F, K/2\]"):
            TiledWeights.dense(codes[None], self.scales(1, F, K // 16), torch.ones(()))
        with pytest.raises(OperandValueError, match="alpha: expected 1 or 64 values"):
            TiledWeights.dense(codes, self.scales(F, K // 16), torch.ones(3))
        with pytest.raises(OperandTypeError, match="alpha: expected dtype torch.float32"):
            TiledWeights.dense(codes, self.scales(F, K // 16), torch.ones((), dtype=BF16))
        wrong = torch.full((F, K // 16), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        with pytest.raises(OperandValueError, match="block_scales: expected finite values"):
            TiledWeights.dense(codes, wrong, torch.ones(()))

    def test_first_rows(self) -> None:
        tiled = TiledWeights.dense(
            torch.zeros(256, K // 2, dtype=torch.uint8), self.scales(256, K // 16), torch.ones(())
        )
        for features in (0, 100, 384):
            with pytest.raises(
                OperandValueError, match=f"multiple of 128 up to 256 of a single matrix, found {features} "
            ):
                tiled.first(features)
        experts = TiledWeights.allocate_experts(E, 128, K, torch.device("cpu"))
        with pytest.raises(OperandValueError, match=f"of a single matrix, found 128 of {E}"):
            experts.first(128)

    def test_experts(self) -> None:
        with pytest.raises(OperandValueError, match="I to be a positive multiple of 8"):
            TiledWeights.allocate_gated_experts(E, 12, K, torch.device("cpu"))
        with pytest.raises(OperandValueError, match="K to be a positive multiple of 64"):
            TiledWeights.allocate_experts(E, F, 96, torch.device("cpu"))
        stack = TiledWeights.allocate_experts(E, F, K, torch.device("cpu"))
        codes, scales = torch.zeros(1, F, K // 2, dtype=torch.uint8), self.scales(1, F, K // 16)
        with pytest.raises(OperandValueError, match=r"codes: expected shape \(1, 64, 64\)"):
            stack.put_experts(0, torch.zeros(1, F, K, dtype=torch.uint8), scales, torch.ones(1))
        with pytest.raises(OperandValueError, match=r"alpha: expected shape \(1,\)"):
            stack.put_experts(0, codes, scales, torch.ones(2))
        with pytest.raises(OperandValueError, match="tiles: expected shape .*room for the experts"):
            stack.put_experts(E, codes, scales, torch.ones(1))
