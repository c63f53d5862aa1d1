"""The router's logits of few tokens against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.triton_kernels.experts.router_logits import (
    MAX_TOKENS,
    WHOLE_ROWS_MAX_TOKENS,
    max_tokens,
    router_logits,
    semaphores_size,
)
from tests.triton.support.interpreter import run_backwards
from tests.triton.support.resources import resources

WHOLE_ROWS = [(1, 256, 4096), (1, 40, 600), (2, 33, 1288), (1, 7, 8), (2, 384, 7168)]
SPLIT = [
    (3, 40, 600),
    (8, 33, 1288),
    (9, 7, 8),
    (16, 33, 1288),
    (17, 16, 512),
    (24, 20, 4616),
    (33, 7, 8),
    (64, 50, 136),
]
"""Blocks of experts and parts of K that are whole and that are not; one part, and more than are added at once."""


def operands(tokens: int, rows: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """Random with outliers; tokens are columns of a wider matrix, whose others are NaN."""
    torch.manual_seed(tokens + rows + width)
    x = torch.full((tokens, width + 16), torch.nan, dtype=torch.bfloat16)
    x[:, :width] = torch.randn(tokens, width) * torch.where(torch.rand(tokens, width) < 0.01, 100.0, 1.0)
    return x.to(device)[:, :width], (torch.randn(rows, width) / 8).bfloat16().to(device)


def semaphores_for(weight: Tensor) -> Tensor:
    return torch.zeros(semaphores_size(len(weight)), dtype=torch.int32, device=weight.device)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """By a launch with semaphores of its own, which it leaves zero."""
    semaphores = semaphores_for(weight)
    found = router_logits(x, weight, semaphores)
    assert not semaphores.any()
    return found


def distance(found: Tensor, x: Tensor, weight: Tensor) -> float:
    """The largest error, by the bound of fp32 sums in any order."""
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    return float(((found.double() - exact).abs() / (size * x.shape[1] * 2.0**-24 + 1e-30)).max())


def poisoned(self: Tensor, *shape: int, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """``new_empty``, with NaN for whatever memory holds."""
    found = torch.empty(shape, dtype=dtype or self.dtype, device=device or self.device)
    return found.fill_(torch.nan) if found.is_floating_point() else found


@pytest.mark.parametrize(("tokens", "rows", "width"), WHOLE_ROWS + SPLIT)
def test_router_logits(tokens: int, rows: int, width: int, device: str) -> None:
    x, weight = operands(tokens, rows, width, device)
    with mock.patch.object(Tensor, "new_empty", poisoned):
        found = logits(x, weight)
    assert found.shape == (tokens, rows) and found.dtype == torch.float32
    assert distance(found, x, weight) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("rows", "width"), [(256, 4096), (384, 7168)])
def test_whole_models(tokens: int, rows: int, width: int, device: str) -> None:
    x, weight = operands(tokens, rows, width, device)
    assert distance(logits(x, weight), x, weight) <= 1


def test_a_token_has_the_same_bits_beside_others(device: str) -> None:
    x, weight = operands(2, 20, 600, device)
    assert torch.equal(torch.cat([logits(x[i : i + 1], weight) for i in range(2)]), logits(x, weight))


@pytest.mark.parametrize("fewest", [3, 17, 33])
def test_a_token_has_the_same_bits_in_launches_of_one_kernel(fewest: int, device: str) -> None:
    """As many tokens as it is compiled for, and the fewest."""
    x, weight = operands(max(16, 2 * fewest - 2), 20, 1100, device)
    assert torch.equal(logits(x[:fewest], weight), logits(x, weight)[:fewest])


@pytest.mark.gpu
def test_a_token_has_the_same_bits_in_all_kernels_that_split(device: str) -> None:
    """And in any place. Interpreted, a product of matrices is numpy's, whose sums depend on the place."""
    x, weight = operands(MAX_TOKENS, 384, 7168, device)
    found = logits(x, weight)
    for tokens in (WHOLE_ROWS_MAX_TOKENS + 1, 16, 17, 32, 33):
        assert torch.equal(logits(x[:tokens], weight), found[:tokens])
        assert torch.equal(logits(x[-tokens:], weight), found[-tokens:])


@pytest.mark.parametrize("tokens", [2, 9, 40])
def test_nan_stays_with_its_token(tokens: int, device: str) -> None:
    x, weight = operands(tokens, 20, 600, device)
    x[1, 7] = torch.nan
    assert logits(x, weight).isnan().all(1).tolist() == [token == 1 for token in range(tokens)]
    assert int(logits(x, weight).isnan().sum()) == 20


def test_semaphores_serve_launch_after_launch(device: str) -> None:
    """Launches of several sizes share semaphores: each leaves those that it uses zero and does not touch the others."""
    semaphores = torch.zeros(semaphores_size(100), dtype=torch.int32, device=device)
    beyond = semaphores[semaphores_size(50) :].fill_(7)
    for tokens, rows, width in ((9, 33, 600), (40, 50, 1100), (2, 50, 600), (40, 50, 1100), (16, 7, 600)):
        x, weight = operands(tokens, rows, width, device)
        assert distance(router_logits(x, weight, semaphores), x, weight) <= 1
        assert not semaphores[: semaphores_size(50)].any() and bool((beyond == 7).all())


@pytest.mark.parametrize(("tokens", "rows", "width"), [(9, 40, 1100), (40, 20, 600)])
def test_programs_may_run_in_any_order(
    tokens: int, rows: int, width: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backwards here: whoever comes last adds, and adds in the same order."""
    x, weight = operands(tokens, rows, width, device)
    forwards = logits(x, weight)
    run_backwards(monkeypatch)
    assert torch.equal(logits(x, weight), forwards)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [9, 32, 64])
def test_in_a_cuda_graph(tokens: int, device: str) -> None:
    """The same bits in each of many replays, whichever program comes last."""
    x, weight = operands(tokens, 384, 7168, device)
    semaphores = semaphores_for(weight)
    expected = router_logits(x, weight, semaphores)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches = [router_logits(x, weight, semaphores) for _ in range(10)]
    for _ in range(50):
        graph.replay()
        assert all(torch.equal(found, expected) for found in launches)
    assert not semaphores.any()


X, WEIGHT, SEMAPHORES = torch.ones(2, 64).bfloat16(), torch.ones(20, 64).bfloat16(), torch.zeros(4).int()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: router_logits(X.float(), WEIGHT, SEMAPHORES), "x"),
        (lambda: router_logits(X, WEIGHT.float(), SEMAPHORES), "weight"),
        (lambda: router_logits(X[:, :32], WEIGHT, SEMAPHORES), "weight"),
        (lambda: router_logits(X.t().contiguous().t(), WEIGHT, SEMAPHORES), "x"),
        (lambda: router_logits(X[:0], WEIGHT, SEMAPHORES), "tokens"),
        (lambda: router_logits(torch.ones(MAX_TOKENS + 1, 64).bfloat16(), WEIGHT, SEMAPHORES), "tokens"),
        (lambda: router_logits(X, WEIGHT, SEMAPHORES.float()), "semaphores"),
        (lambda: router_logits(X, WEIGHT, SEMAPHORES[:3]), "number of semaphores"),
        (lambda: router_logits(X, WEIGHT, torch.zeros(8).int()[::2]), "semaphores"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(call: Callable[[], Tensor], named: str) -> None:
    with pytest.raises(OperandError, match=f"router_logits: {named}"):
        call()


@pytest.mark.parametrize(("rows", "width", "most"), [(256, 4096, 64), (384, 7168, 32)])
def test_a_library_takes_over_where_it_is_faster(rows: int, width: int, most: int) -> None:
    assert max_tokens(rows, width) == most <= MAX_TOKENS


def launches() -> None:
    for rows, width in ((256, 4096), (384, 7168)):
        for tokens in (1, 2, 3, 64):
            x, weight = operands(tokens, rows, width, "cpu")
            router_logits(x, weight, semaphores_for(weight))


def test_resources() -> None:
    """Four warps take less than half of an SM's registers, however many: the kernel before fits beside them."""
    found = resources(__name__)
    split = [usage for usage in found if usage.kernel == "_router_logits_split"]
    for usage in found:
        usage.require_no_spills()
        assert usage.warps == 4, usage
        # Of the matrix, 8 values a thread and load, and nothing of what the kernel before may write.
        early = (16 * 512,) if usage in split else (2 * 4096, 2 * 8192)
        assert usage.early_loads * 8 * 32 * usage.warps in early, usage
    assert len(split) == 2  # whatever the model and the tokens
    for usage in split:
        # Small enough that four are on an SM at once; products by mma.sync, whose operands come by ldmatrix.
        assert usage.registers <= 128 and usage.shared <= 48 * 1024, usage
        assert usage.count("mma.sync") == 16 and usage.count("ldmatrix") > 0, usage
        assert usage.count("wgmma") == usage.count("tcgen05") == 0, usage
        assert usage.count("atom.global.gpu.acq_rel.add") == 1, usage
