"""The sum of experts' rows against torch in fp64."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.triton_kernels.common.inbox import EMPTY
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
from tests.triton.support.interpreter import mapped
from tests.triton.support.resources import resources


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("tokens", "d"), [(5, 1100), pytest.param(8192, 7168, marks=pytest.mark.gpu)])
def test_finalize(
    tokens: int, d: int, shared: bool, weighted: bool, dtype: torch.dtype, out_dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(d)
    topk, padded = 6, tokens * 8
    # Pairs stand anywhere, each in a row of its own; other rows are padding, which counts for nothing.
    destination = torch.randperm(padded)[: tokens * topk].view(tokens, topk).int().to(device)
    rows = torch.full((padded, d + 16), float("nan"), dtype=dtype, device=device)[:, :d]
    rows[destination.long()] = torch.randn(tokens, topk, d).to(device, dtype)
    destination[0, 2] = -1
    weights = torch.rand(tokens, topk).to(device) if weighted else None
    extra = torch.randn(tokens, d + 8).to(device, dtype)[:, :d] if shared else None
    out = torch.full((tokens, d), float("nan"), dtype=out_dtype, device=device)
    assert finalize(rows, destination, weights, out, shared=extra) is out
    parts = torch.where(destination[..., None] < 0, 0, rows.double()[destination.long()])
    parts *= 1 if weights is None else weights.double()[..., None]
    exact, size = parts.sum(1), parts.abs().sum(1)
    if extra is not None:
        exact, size = exact + extra.double(), size + extra.double().abs()
    rounding = 2.0**-8 if out_dtype == torch.bfloat16 else 0
    assert bool(((out.double() - exact).abs() <= exact.abs() * rounding + size * 2.0**-21).all())


def test_the_order_of_the_sum(device: str) -> None:
    """As documented: pairs in the order of k, the shared expert last. A 1 in front of the large terms is lost."""
    rows = torch.tensor([[2.0**24], [-(2.0**24)]], device=device).expand(2, 8).contiguous()
    destination = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    out = torch.full((1, 8), torch.nan, device=device)
    assert bool((finalize(rows, destination, None, out, shared=torch.ones(1, 8, device=device)) == 1).all())
    three = torch.cat([rows, torch.ones(1, 8, device=device)])
    for order, kept in (([0, 1, 2], 1), ([2, 0, 1], 0)):
        pairs = torch.tensor([order], dtype=torch.int32, device=device)
        assert bool((finalize(three, pairs, None, out.fill_(torch.nan)) == kept).all()), order


@pytest.mark.parametrize("count", [0, 1, 3, 7])
@pytest.mark.parametrize("d", [72, 1100])
def test_copies(count: int, d: int, device: str) -> None:
    """The values of ``out``, in rows of larger tensors, of which nothing else is written."""
    torch.manual_seed(count)
    rows, destination = torch.randn(9, d).to(device), torch.tensor([[0, 7], [-1, 3], [8, 1], [2, 5]])
    rows[7, ::3], rows[3, 1::5] = torch.inf, torch.nan
    destination, weights = destination.int().to(device), torch.rand(4, 2).to(device)
    alone = finalize(rows, destination, weights, torch.empty(4, d, dtype=torch.bfloat16, device=device))
    around = torch.full((count + 1, 8, d), 77, dtype=torch.bfloat16, device=device)
    out, *copies = around[:, :4]
    mapped(copies)
    assert finalize(rows, destination, weights, out, copies=copies) is out
    for copy in (out, *copies):
        assert torch.equal(copy.view(torch.int16), alone.view(torch.int16))
    assert bool((around[:, 4:] == 77).all())


def test_no_nan_is_the_mark_of_an_empty_inbox(device: str) -> None:
    bits = torch.tensor([-1, 0x7FFFFFFF, -0x400001, 0x7F800001, 0x7FFF0000, -0x10000], dtype=torch.int32)
    rows = bits.view(torch.float32).expand(4, 6).contiguous().to(device)
    destination, out = torch.zeros(4, 1, dtype=torch.int32, device=device), torch.zeros(4, 6, dtype=torch.bfloat16)
    for shared in (None, rows):
        found = finalize(rows, destination, None, out.to(device), shared=shared)
        assert found.isnan().all() and bool((found.view(torch.int16) != EMPTY.value).all())


ROWS, DESTINATION, OUT = torch.ones(4, 8), torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 8)
HALF = torch.ones(3, 8, dtype=torch.bfloat16)[:2]


@pytest.mark.parametrize(
    "call",
    [
        lambda: finalize(ROWS, DESTINATION, None, torch.ones(2, 7)),
        lambda: finalize(ROWS, DESTINATION.long(), None, OUT),
        lambda: finalize(ROWS, DESTINATION, torch.ones(2, 3), OUT),
        lambda: finalize(ROWS, DESTINATION, None, OUT, shared=torch.ones(1, 8)),
        lambda: finalize(ROWS[:, :0], DESTINATION, None, OUT[:, :0]),
        lambda: finalize(ROWS, DESTINATION, None, HALF, copies=[HALF] * 2),
        lambda: finalize(ROWS, DESTINATION, None, OUT, copies=[HALF]),
        lambda: finalize(ROWS, DESTINATION, None, HALF, copies=[OUT]),
        lambda: finalize(ROWS, DESTINATION, None, HALF, copies=[HALF[:1]]),
        lambda: finalize(ROWS, DESTINATION, None, HALF, copies=[HALF.T.contiguous().T]),
        lambda: finalize(ROWS, DESTINATION, None, HALF, copies=[torch.cat([HALF, HALF]).view(-1)[1:17].view(2, 8)]),
        lambda: finalize(ROWS, DESTINATION, None, HALF, copies=[HALF.to("meta")]),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(call) -> None:
    with pytest.raises(OperandError):
        call()


def launches() -> None:
    rows = torch.empty(64, 7168, dtype=torch.bfloat16, device="meta")
    destination = torch.empty(8, 7, dtype=torch.int32, device="meta")
    finalize(rows, destination, torch.empty(8, 7, device="meta"), rows[:8])


def test_nothing_spills() -> None:
    for usage in resources(__name__):
        usage.require_no_spills()
