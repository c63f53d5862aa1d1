"""The worked example of docs/own_kernel.md: the kernel equals its reference, which equals the NVFP4 recipe."""

from __future__ import annotations

import pytest
import torch

from examples.own_kernel import kernel, reference
from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats.nvfp4 import quantize_rows
from tests.triton.support.resources import resources

SHAPES = [(1, 16), (5, 48), (3, 1024), (2, 1040), (4, 7168)]


def rows(tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows whose maxima stand anywhere: an outlier in the last column, tiny values and NaN, zeros, infinity."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(tokens, width, generator=generator)
    x[0, -1] = -300.0
    if tokens > 1:
        x[1] *= 1e-20
        x[1, 3] = float("nan")
    if tokens > 2:
        x[2] = 0
    if tokens > 3:
        x[3, 7], x[3, 9] = float("nan"), float("-inf")
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_the_reference_is_the_recipe_of_quantize_rows(tokens: int, width: int, dtype: torch.dtype) -> None:
    x = rows(tokens, width, dtype)
    assert torch.equal(reference.row_scales(x), quantize_rows(x).global_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), *SHAPES])
def test_the_kernel_is_the_reference_bit_for_bit(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    x = rows(tokens, width, dtype) if tokens else torch.empty(0, width, dtype=dtype)
    out = torch.full((tokens,), float("nan"), device=device)
    assert kernel.row_scales(x.to(device), out=out) is out
    assert torch.equal(out.cpu(), reference.row_scales(x) if tokens else out.cpu())


def test_rows_of_a_column_slice(device: str) -> None:
    matrix = torch.randn(6, 256).to(device)
    part = matrix[:, 64:160]
    assert torch.equal(kernel.row_scales(part).cpu(), reference.row_scales(part.cpu()))


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernel.row_scales(torch.ones(2, 8, dtype=torch.float16)),
        lambda: kernel.row_scales(torch.ones(8)),
        lambda: kernel.row_scales(torch.ones(8, 2).t()),
        lambda: kernel.row_scales(torch.ones(2, 8), out=torch.ones(3)),
        lambda: kernel.row_scales(torch.ones(2, 8), out=torch.ones(2, dtype=torch.bfloat16)),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(call) -> None:
    with pytest.raises(OperandError):
        call()


def launches() -> None:
    kernel.row_scales(torch.empty(256, 7168, dtype=torch.bfloat16, device="meta"))


def test_nothing_spills() -> None:
    for usage in resources(__name__):
        usage.require_no_spills()
