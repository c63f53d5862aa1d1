"""Embedding rows to streams, and RMSNorm."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.ops.hyper_connection import expand_streams
from nvfp4_sgl.ops.norm import rms_norm
from nvfp4_sgl.triton_kernels.hyper_connection import streams
from tests.triton.support.resources import resources


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width", "count"), [(1, 8, 4), (3, 1500, 4), (5, 64, 1), (0, 64, 4)])
def test_expand_streams(tokens: int, width: int, count: int, dtype: torch.dtype, device: str) -> None:
    embedded = torch.randn(tokens, width).to(device, dtype)
    out = poisoned((tokens, count, width), dtype, device)
    assert streams.expand_streams(embedded, count, out=out) is out
    assert torch.equal(out, expand_streams(embedded, count))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_embed_streams(ids_dtype: torch.dtype, device: str) -> None:
    table = torch.randn(7, 100).to(device, torch.bfloat16)
    ids = torch.tensor([6, 0, 3, 3], dtype=ids_dtype, device=device)
    out = streams.embed_streams(ids, table, 4, out=poisoned((4, 4, 100), torch.bfloat16, device))
    assert torch.equal(out, expand_streams(table[ids.long()], 4))


def test_an_unknown_token_is_nan_and_reads_nothing(device: str) -> None:
    table = torch.randn(7, 16).to(device)
    out = streams.embed_streams(torch.tensor([7, 1, -1], device=device), table, 2)
    assert out[0].isnan().all() and out[2].isnan().all() and torch.equal(out[1, 0], table[1])


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "width"),
    [(1, 512), (7, 96), (3, 1536), (2, 7168), pytest.param(8192, 7168, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(
    rows: int, width: int, weighted: bool, dtype: torch.dtype, out_dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, width)
    x[:, ::17] *= 300  # outliers carry most of the mean square
    x[-1] *= 1e-4  # eps counts
    x = x.to(device, dtype)
    weight = torch.randn(width).to(device, torch.bfloat16) if weighted else None
    out = streams.rms_norm(x, weight, 1e-6, out=poisoned((rows, width), out_dtype, device))
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    if weight is not None:
        exact *= weight.double()
    rounding = 2.0**-8 if out_dtype == torch.bfloat16 else 0
    error = (out.double() - exact).abs()
    assert bool((error <= exact.abs() * (rounding + 2.0**-21)).all())


def test_rms_norm_of_a_column_slice_in_place(device: str) -> None:
    matrix = torch.randn(5, 3, 64, device=device)
    before = matrix.clone()
    part = matrix[:, 1]
    streams.rms_norm(part, None, 1e-6, out=part)
    torch.testing.assert_close(matrix[:, 1], rms_norm(before[:, 1].cpu(), None, 1e-6).to(device))
    assert torch.equal(matrix[:, 0], before[:, 0]) and torch.equal(matrix[:, 2], before[:, 2])


@pytest.mark.parametrize(
    "call",
    [
        lambda: streams.rms_norm(torch.ones(2, 8, dtype=torch.float16), None, 1e-6),
        lambda: streams.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6),
        lambda: streams.rms_norm(torch.ones(8, 2).t(), None, 1e-6),
        lambda: streams.rms_norm(torch.ones(1, 16385), None, 1e-6),
        lambda: streams.expand_streams(torch.ones(2, 8), 4, out=torch.ones(2, 3, 8)),
        lambda: streams.embed_streams(torch.ones(2), torch.ones(2, 8), 4),
    ],
)
def test_what_no_kernel_takes_is_refused(call) -> None:
    with pytest.raises(OperandError):
        call()


def launches() -> None:
    x = torch.empty(256, 7168, dtype=torch.bfloat16, device="meta")
    streams.expand_streams(x, 4)
    streams.rms_norm(x, x[0], 1e-6)


def test_nothing_spills() -> None:
    for usage in resources(__name__):
        usage.require_no_spills()
