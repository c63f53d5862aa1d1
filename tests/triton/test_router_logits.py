"""The router's logits of few tokens against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.triton_kernels.experts.router_logits import MAX_TOKENS, router_logits
from tests.triton.support.resources import resources

SIZES = [(1, 256, 4096), (3, 40, 600), (8, 33, 1288), (5, 7, 8), (2, 384, 7168)]


def operands(tokens: int, rows: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """Random with outliers; tokens are columns of a wider matrix, whose others are NaN."""
    torch.manual_seed(tokens + rows + width)
    x = torch.full((tokens, width + 16), torch.nan, dtype=torch.bfloat16)
    x[:, :width] = torch.randn(tokens, width) * torch.where(torch.rand(tokens, width) < 0.01, 100.0, 1.0)
    return x.to(device)[:, :width], (torch.randn(rows, width) / 8).bfloat16().to(device)


def distance(found: Tensor, x: Tensor, weight: Tensor) -> float:
    """The largest error, by the bound of fp32 sums in any order."""
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    return float(((found.double() - exact).abs() / (size * x.shape[1] * 2.0**-24 + 1e-30)).max())


def poisoned(self: Tensor, *shape: int, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """``new_empty``, with NaN for whatever memory holds."""
    found = torch.empty(shape, dtype=dtype or self.dtype, device=device or self.device)
    return found.fill_(torch.nan) if found.is_floating_point() else found


@pytest.mark.parametrize(("tokens", "rows", "width"), SIZES)
def test_router_logits(tokens: int, rows: int, width: int, device: str) -> None:
    x, weight = operands(tokens, rows, width, device)
    with mock.patch.object(Tensor, "new_empty", poisoned):
        found = router_logits(x, weight)
    assert found.shape == (tokens, rows) and found.dtype == torch.float32
    assert distance(found, x, weight) <= 1


def test_a_token_has_the_same_bits_beside_others(device: str) -> None:
    x, weight = operands(8, 20, 600, device)
    assert torch.equal(torch.cat([router_logits(x[i : i + 1], weight) for i in range(8)]), router_logits(x, weight))


def test_nan_stays_with_its_token(device: str) -> None:
    x, weight = operands(3, 20, 600, device)
    x[1, 7] = torch.nan
    assert router_logits(x, weight).isnan().all(1).tolist() == [False, True, False]


X, WEIGHT = torch.ones(2, 64).bfloat16(), torch.ones(20, 64).bfloat16()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: router_logits(X.float(), WEIGHT), "x"),
        (lambda: router_logits(X, WEIGHT.float()), "weight"),
        (lambda: router_logits(X[:, :32], WEIGHT), "weight"),
        (lambda: router_logits(X.t().contiguous().t(), WEIGHT), "x"),
        (lambda: router_logits(X[:0], WEIGHT), "tokens"),
        (lambda: router_logits(torch.ones(MAX_TOKENS + 1, 64).bfloat16(), WEIGHT), "tokens"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(call: Callable[[], Tensor], named: str) -> None:
    with pytest.raises(OperandError, match=f"router_logits: {named}"):
        call()


def launches() -> None:
    for rows, width in ((256, 4096), (384, 7168)):
        for tokens in (1, 2, 4, 8):
            router_logits(*operands(tokens, rows, width, "cpu"))


def test_resources() -> None:
    """Four warps take less than half of an SM's registers, however many: the kernel before fits beside them."""
    for usage in resources(__name__):
        usage.require_no_spills()
        assert usage.warps == 4, usage
