"""Clamped SwiGLU and scattered rows, in bf16."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.ops.swiglu import clamped_swiglu
from nvfp4_sgl.triton_kernels.experts.swiglu import scatter_rows, swiglu
from tests.triton.support.resources import resources

LIMIT = 10.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, width", [(1, 128), (7, 1200), (3, 2048)])
def test_swiglu(rows: int, width: int, dtype: torch.dtype, device: str):
    gate_up = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(0)) * 8
    gate_up[:, ::37] *= 1e4
    gate_up[0, :3] = torch.tensor([-1e30, -0.0, 88.0])
    gate_up = gate_up.to(dtype)
    out = torch.full((rows, width + 3), torch.nan, dtype=dtype, device=device)
    wide = torch.nn.functional.pad(gate_up, (0, 5), value=torch.nan).to(device)
    found = swiglu(wide[:, : 2 * width], LIMIT, out[:, :width]).cpu().float()
    expected = clamped_swiglu(gate_up.float()[:, :width], gate_up.float()[:, width:], LIMIT)
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else 2e-6
    assert bool(((found - expected).abs() <= expected.abs() * tolerance + 1e-30).all())
    assert bool(out[:, width:].isnan().all())


def test_nan_stays_nan(device: str):
    """In the gate alone, in the up alone, the other being an ordinary number; and in both."""
    gate_up = torch.full((2, 256), 0.5, device=device)
    gate_up[0, 3], gate_up[1, 130] = torch.nan, torch.nan
    gate_up[0, [7, 135]] = torch.nan
    found = swiglu(gate_up, LIMIT, torch.zeros(2, 128, device=device))
    assert found.isnan().nonzero().tolist() == [[0, 3], [0, 7], [1, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scatter(dtype: torch.dtype, device: str):
    x = torch.randn(5, 2508, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)[:, :2500]
    destination = torch.tensor([[6, 0], [-1, 3], [9, 1], [-1, -1], [8, 2]], dtype=torch.int32, device=device)
    out = torch.full((10, 2504), torch.inf, dtype=dtype, device=device)
    scatter_rows(x, destination, out[:, :2500])
    expected = torch.full_like(out, torch.inf)
    for token, rows in enumerate(destination.tolist()):
        for row in rows:
            if row >= 0:
                expected[row, :2500] = x[token]
    assert torch.equal(out, expected)


def test_refusals(device: str):
    x = torch.zeros(2, 6, device=device)
    with pytest.raises(OperandError, match="out: expected shape"):
        swiglu(x, LIMIT, x)
    with pytest.raises(OperandError, match="columns"):
        swiglu(x[:, :5], LIMIT, x[:, :2])
    with pytest.raises(OperandError, match="limit"):
        swiglu(x, 0.0, x[:, :3])
    with pytest.raises(OperandError, match="destination: expected dtype"):
        scatter_rows(x, torch.zeros(2, 3, dtype=torch.int64, device=device), x)
    with pytest.raises(OperandError, match="destination: expected shape"):
        scatter_rows(x, torch.zeros(3, 3, dtype=torch.int32, device=device), x)


def launches() -> None:
    x = torch.zeros(16, 4096, dtype=torch.bfloat16)
    swiglu(x, LIMIT, x[:, :2048])
    scatter_rows(x, torch.zeros(16, 7, dtype=torch.int32), x)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    for usage in resources(__name__):
        if usage.architecture == architecture:
            usage.require_no_spills()
