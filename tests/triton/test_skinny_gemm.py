"""The GEMM of few tokens with a small matrix against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.triton_kernels.skinny_gemm.skinny_gemm import MAX_TOKENS, new_skinny_semaphores, skinny_gemm
from tests.triton.support.resources import resources

SIZES = [(1, 256, 4096), (3, 40, 600), (16, 16, 256), (17, 33, 1288), (64, 64, 4104), (64, 384, 7168), (2, 5, 8)]


def operands(tokens: int, rows: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """Random with outliers; tokens are columns of a wider matrix, whose others are NaN."""
    torch.manual_seed(tokens + rows + width)
    x = torch.full((tokens, width + 16), torch.nan, dtype=torch.bfloat16)
    x[:, :width] = torch.randn(tokens, width) * torch.where(torch.rand(tokens, width) < 0.01, 100.0, 1.0)
    return x.to(device)[:, :width], (torch.randn(rows, width) / 8).bfloat16().to(device)


def distance(found: Tensor, x: Tensor, weight: Tensor) -> float:
    """The largest error, by the bound of fp32 sums in any order; tensor cores drop bits where fp32 would round."""
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    return float(((found.double() - exact).abs() / (size * x.shape[1] * 2.0**-24 + 1e-30)).max())


def poisoned(self: Tensor, *shape: int, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """``new_empty``, with NaN for whatever memory holds."""
    found = torch.empty(shape, dtype=dtype or self.dtype, device=device or self.device)
    return found.fill_(torch.nan) if found.is_floating_point() else found


@pytest.mark.parametrize(("tokens", "rows", "width"), SIZES)
def test_skinny_gemm(tokens: int, rows: int, width: int, device: str) -> None:
    x, weight = operands(tokens, rows, width, device)
    semaphores = new_skinny_semaphores(rows, device)
    with mock.patch.object(Tensor, "new_empty", poisoned):
        found, again = skinny_gemm(x, weight, semaphores), skinny_gemm(x, weight, semaphores)
    assert found.shape == (tokens, rows) and found.dtype == torch.float32
    assert distance(found, x, weight) <= 2
    assert torch.equal(found, again)
    assert not semaphores.any()


def test_no_tokens(device: str) -> None:
    x, weight = operands(0, 16, 64, device)
    assert skinny_gemm(x, weight, new_skinny_semaphores(16, device)).shape == (0, 16)


X, WEIGHT, SEMAPHORES = torch.ones(2, 64).bfloat16(), torch.ones(20, 64).bfloat16(), new_skinny_semaphores(20, "cpu")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: skinny_gemm(X.float(), WEIGHT, SEMAPHORES), "x"),
        (lambda: skinny_gemm(X, WEIGHT.float(), SEMAPHORES), "weight"),
        (lambda: skinny_gemm(X[:, :32], WEIGHT, SEMAPHORES), "weight"),
        (lambda: skinny_gemm(X.t().contiguous().t(), WEIGHT, SEMAPHORES), "x"),
        (lambda: skinny_gemm(X, WEIGHT, SEMAPHORES[:1]), "semaphores"),
        (lambda: skinny_gemm(X, WEIGHT, SEMAPHORES.long()), "semaphores"),
        (lambda: skinny_gemm(torch.ones(MAX_TOKENS + 1, 64).bfloat16(), WEIGHT, SEMAPHORES), "tokens"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(call: Callable[[], Tensor], named: str) -> None:
    with pytest.raises(OperandError, match=f"skinny_gemm: {named}"):
        call()


def launches() -> None:
    for rows, width in ((256, 4096), (384, 7168), (64, 4096)):
        for tokens in (1, 16, 64):
            skinny_gemm(*operands(tokens, rows, width, "cpu"), new_skinny_semaphores(rows, "cpu"))


def test_resources() -> None:
    for usage in resources(__name__):
        usage.require_no_spills()
        assert usage.registers <= 168, usage
        assert usage.shared <= 100 * 1024, f"two programs must fit on a multiprocessor: {usage}"
