"""SwiGLU between expert GEMMs, rounded to NVFP4: scales, clamps, codes and rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats.nvfp4 import quantize_rows, swiglu_row_scale
from nvfp4_sgl.ops.swiglu import clamped_swiglu
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.experts.rounded_swiglu import swiglu_to_nvfp4
from nvfp4_sgl.triton_kernels.experts.swiglu import swiglu
from tests.triton.support.resources import resources

# The interpreter computes both sides of a choice.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

LIMIT = 10.0
SCALE = swiglu_row_scale(LIMIT)
GROUPS, TILE = 5, 8
PAIRS = [[0, 4], [3, 4], [-1, 4], [0, 3]]
"""The groups that each token visits; −1 is no group."""


def routed(device: str, tokens: int = len(PAIRS)) -> Routes:
    """Routes of the tokens, rows in the order of groups, tokens of a group backwards."""
    routes = Routes.allocate(tokens, 2, GROUPS, TILE, "cpu")
    routes.experts.copy_(torch.tensor(PAIRS[:tokens]).view(tokens, 2))
    routes.destination.fill_(-1)
    begin = 0
    for group in range(GROUPS):
        pairs = (routes.experts == group).nonzero().flip(0).tolist()
        for row, (token, copy) in enumerate(pairs):
            routes.destination[token, copy] = begin + row
        begin += -(-len(pairs) // TILE) * TILE
    moved: dict[str, Any] = {k: v.to(device) for k, v in vars(routes).items() if isinstance(v, torch.Tensor)}
    return replace(routes, **moved)


def inputs(width: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums with outliers, zeros and what is not finite; row scales of tokens; alphas of groups."""
    generator = torch.Generator().manual_seed(width)
    sums = torch.randn(rows, 2 * width, generator=generator) * 300
    sums[:, ::37] *= 1e4
    sums[:, 16:48] *= 1e-6
    sums[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    sums[0, width + 5 : width + 8] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    scale = torch.rand(len(PAIRS), generator=generator) / 50 + 0.001
    return sums, scale, torch.rand(GROUPS, 2, generator=generator) + 0.25


def expected_rows(
    sums: torch.Tensor, scale: torch.Tensor, alpha: torch.Tensor, routes: Routes, device: str
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """What is rounded, by the device's SwiGLU and by the reference's: fp32 [pairs, I] each; and their rows."""
    own, reference, rows = [], [], []
    for token, (groups, to) in enumerate(zip(routes.experts.tolist(), routes.destination.tolist(), strict=True)):
        for group, row in zip(groups, to, strict=True):
            if row >= 0:
                gate, up = (half * scale[token] * alpha[group, n] for n, half in enumerate(sums[row].chunk(2)))
                both = torch.cat([gate, up])[None].to(device)
                own.append(swiglu(both, LIMIT, both.new_empty(1, len(gate))).cpu()[0])
                reference.append(clamped_swiglu(gate, up, LIMIT))
                rows.append(row)
    return torch.stack(own), torch.stack(reference), rows


@pytest.mark.parametrize("width", [64, 192, 2112])
def test_rounded_swiglu(width: int, device: str):
    routes = routed(device)
    count = len(routes.source_row)
    sums, scale, alpha = inputs(width, count)
    out = torch.full((count, width), torch.nan, dtype=torch.bfloat16, device=device)
    moved_sums, moved_scale, moved_alpha = (tensor.to(device) for tensor in (sums, scale, alpha))
    assert swiglu_to_nvfp4(moved_sums, moved_scale, moved_alpha, routes, LIMIT, SCALE, out) is out
    own, reference, rows = expected_rows(sums, scale, alpha, routes, device)
    assert len(rows) == 7
    found = out.cpu()
    assert torch.equal(found[rows].float(), quantize_rows(own, SCALE).unscaled()), "bit for bit"
    assert bool(found[rows].isfinite().all())
    others = [row for row in range(count) if row not in rows]
    assert bool(found[others].isnan().all()), "rows of no pair are left alone"
    # The reference's exp is another: a code may flip, rarely.
    theirs = quantize_rows(reference, SCALE).unscaled()
    assert float((found[rows].float() != theirs).float().mean()) < 0.002


@pytest.mark.parametrize("mistake", ["another token's scale", "gate and up exchanged", "no alpha", "another constant"])
def test_mistakes_are_seen(mistake: str, device: str):
    routes = routed(device)
    count, width = len(routes.source_row), 64
    sums, scale, alpha = inputs(width, count)
    own, _, rows = expected_rows(sums, scale, alpha, routes, device)
    if mistake == "another token's scale":
        scale = scale.roll(1)
    elif mistake == "gate and up exchanged":
        alpha = alpha.flip(1)
    elif mistake == "no alpha":
        alpha = torch.ones_like(alpha)
    constant = 1.0 if mistake == "another constant" else SCALE
    out = torch.zeros(count, width, dtype=torch.bfloat16, device=device)
    moved_sums, moved_scale, moved_alpha = (tensor.contiguous().to(device) for tensor in (sums, scale, alpha))
    swiglu_to_nvfp4(moved_sums, moved_scale, moved_alpha, routes, LIMIT, constant, out)
    assert not torch.equal(out.cpu()[rows].float(), quantize_rows(own, SCALE).unscaled())


def test_no_tokens(device: str):
    routes = Routes.allocate(0, 2, GROUPS, TILE, device)
    empty = torch.empty(0, 128, device=device)
    swiglu_to_nvfp4(empty, empty[:, 0].contiguous(), torch.ones(GROUPS, 2, device=device), routes, LIMIT, SCALE,
                    torch.empty(0, 64, dtype=torch.bfloat16, device=device))  # fmt: skip


def test_refusals():
    routes = routed("cpu")
    rows = len(routes.source_row)
    good: dict[str, Any] = {
        "gate_up": torch.zeros(rows, 128),
        "row_scale": torch.ones(len(PAIRS)),
        "alpha": torch.ones(GROUPS, 2),
        "routes": routes,
        "limit": LIMIT,
        "scale": SCALE,
        "out": torch.zeros(rows, 64, dtype=torch.bfloat16),
    }
    for name, bad, message in [
        ("gate_up", torch.zeros(rows, 96), "columns"),
        ("gate_up", torch.zeros(rows, 128).bfloat16(), "gate_up: expected dtype"),
        ("gate_up", torch.zeros(rows, 256)[:, :128], "gate_up: expected a contiguous"),
        ("row_scale", torch.ones(3), "row_scale: expected shape"),
        ("alpha", torch.ones(GROUPS), "alpha: expected shape"),
        ("routes", replace(routes, source_row=routes.source_row[1:]), "source_row"),
        ("limit", 0.0, "limit"),
        ("scale", 0.0, "scale"),
        ("out", torch.zeros(rows, 64), "out: expected dtype"),
        ("out", torch.zeros(rows, 128, dtype=torch.bfloat16), "out: expected shape"),
    ]:
        with pytest.raises(OperandError, match=message):
            swiglu_to_nvfp4(**{**good, name: bad})


def launches() -> None:
    for width in (256, 2048):
        routes = Routes.allocate(16, 7, 257, 8, "cpu")
        rows = len(routes.source_row)
        out = torch.empty(rows, width, dtype=torch.bfloat16)
        alpha = torch.empty(257, 2)
        swiglu_to_nvfp4(torch.empty(rows, 2 * width), torch.empty(16), alpha, routes, LIMIT, SCALE, out)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert len(found) == 2
    for usage in found:
        usage.require_no_spills()
