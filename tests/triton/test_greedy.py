"""Greedy tokens and the check of logits against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.ops import greedy as reference
from nvfp4_sgl.ops.greedy import FAILED
from nvfp4_sgl.triton_kernels.logits import greedy
from nvfp4_sgl.triton_kernels.logits.greedy import BLOCK, greedy_tokens
from tests.triton.support.interpreter import run_backwards
from tests.triton.support.resources import resources
from tests.triton.test_router_logits import poisoned

SHAPES = [(1, 1), (2, BLOCK), (3, 2 * BLOCK + 1), (9, 5000), (1, 5 * BLOCK - 7), (256, 33)]
"""Rows and columns: one part and several, of one block and several, whole and not."""
FAULTS: dict[str, Callable[[Tensor, int], object]] = {
    "NaN": lambda row, at: row[at].fill_(torch.nan),
    "NaN with a sign": lambda row, at: row[at].copy_(-torch.tensor(torch.nan)),
    "inf": lambda row, at: row[at].fill_(torch.inf),
    "nothing": lambda row, at: row.fill_(-torch.inf),
    "nothing but NaN": lambda row, at: row.fill_(-torch.inf)[at].fill_(torch.nan),
}


def some_logits(rows: int, columns: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """With outliers, -inf as masks of grammars leave it, and ties; columns of a wider matrix, whose others are +inf."""
    generator = torch.Generator().manual_seed(rows + columns)
    wide = torch.full((rows, columns + 24), torch.inf)
    logits = wide[:, :columns]
    logits.copy_((torch.randn(rows, columns, generator=generator) * 4).round())  # integers: many are equal
    logits[torch.rand(rows, columns, generator=generator) < 0.3] = -torch.inf
    logits[:, int(torch.randint(columns, (), generator=generator))] = -3e38  # a finite one
    return wide.to(device, dtype)[:, :columns]


def semaphores_for(logits: Tensor) -> Tensor:
    return torch.zeros(len(logits), dtype=torch.int32, device=logits.device)


def check(logits: Tensor) -> Tensor:
    """Tokens, marks and rows are those of the reference; the tokens."""
    given, expected = logits.clone(), logits.clone()
    tokens, failed = reference.greedy_tokens(expected)
    semaphores = semaphores_for(logits)
    with mock.patch.object(Tensor, "new_empty", poisoned):
        found, marks = greedy_tokens(logits, semaphores, mark=FAILED)
    assert torch.equal(found, tokens) and torch.equal(marks, failed), (found, tokens)
    assert torch.equal(logits, expected) and torch.equal(logits[~failed], given[~failed])
    assert not semaphores.any()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_greedy_tokens(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    logits = some_logits(rows, columns, device, dtype)
    beyond = logits.new_zeros(()).set_(logits.untyped_storage(), 0, (rows, columns + 24), (columns + 24, 1))
    assert (check(logits) >= 0).all()
    assert beyond[:, columns:].isinf().all()


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_that_cannot_be_sampled_from(fault: str, device: str) -> None:
    """In the first, a middle and the last part; their neighbours go on, and a launch after it, too."""
    columns = 3 * BLOCK + 5
    logits = some_logits(7, columns, device)
    for row, at in ((1, 0), (3, BLOCK + 100), (6, columns - 1)):
        FAULTS[fault](logits[row], at)
    assert check(logits).eq(FAILED).tolist() == [False, True, False, True, False, False, True]


def test_the_lowest_index_of_equal_logits(device: str) -> None:
    """Within a block, between blocks and between parts; zeros of either sign are equal."""
    logits = torch.full((4, 4 * BLOCK), -1.0, device=device)
    for row, places in enumerate(((5, 6), (7, BLOCK + 7), (BLOCK + 9, 3 * BLOCK), (2 * BLOCK, 4 * BLOCK - 1))):
        logits[row, places[0]], logits[row, places[1]] = -0.0, 0.0
    assert check(logits).tolist() == [5, 7, BLOCK + 9, 2 * BLOCK]
    with mock.patch.object(greedy, "PROGRAMS", 4):  # a part a row
        assert check(logits).tolist() == [5, 7, BLOCK + 9, 2 * BLOCK]


def test_many_rows(device: str) -> None:
    """More than programs are meant for, as passes that verify drafts have; and none."""
    with mock.patch.object(greedy, "PROGRAMS", 8):
        check(some_logits(19, BLOCK + 3, device))
        check(some_logits(3, 5 * BLOCK, device))
    check(some_logits(0, 100, device))


def test_programs_may_run_in_any_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_backwards(monkeypatch)
    logits = some_logits(3, 3 * BLOCK + 5, device)
    logits[1, 7] = torch.nan
    assert check(logits)[1] == FAILED


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 256, 384])
def test_whole_vocabularies(rows: int, device: str) -> None:
    """Launch after launch with the same semaphores; as many in a CUDA graph."""
    logits = torch.randn(rows, 129280, device=device) * 5
    logits[rows // 2, 129279] = torch.nan
    semaphores = semaphores_for(logits)
    expected, failed = reference.greedy_tokens(logits.clone())
    for _ in range(20):
        found, marks = greedy_tokens(logits.clone(), semaphores, mark=FAILED)
        assert torch.equal(found, expected) and torch.equal(marks, failed)
    graph, captured = torch.cuda.CUDAGraph(), logits.clone()
    with torch.cuda.graph(graph):
        found, _ = greedy_tokens(captured, semaphores, mark=FAILED)
    for _ in range(20):
        captured.copy_(logits)
        graph.replay()
        assert torch.equal(found, expected)
    assert not semaphores.any()


LOGITS, SEMAPHORES = torch.ones(3, 40), torch.zeros(3).int()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: greedy_tokens(LOGITS.half(), SEMAPHORES, mark=FAILED), "logits"),
        (lambda: greedy_tokens(LOGITS[0], SEMAPHORES, mark=FAILED), "logits"),
        (lambda: greedy_tokens(LOGITS.t(), SEMAPHORES, mark=FAILED), "logits"),
        (lambda: greedy_tokens(LOGITS[:, :0], SEMAPHORES, mark=FAILED), "columns"),
        (lambda: greedy_tokens(LOGITS, SEMAPHORES.long(), mark=FAILED), "semaphores"),
        (lambda: greedy_tokens(LOGITS, SEMAPHORES[:2], mark=FAILED), "number of semaphores"),
        (lambda: greedy_tokens(LOGITS, torch.zeros(6).int()[::2], mark=FAILED), "semaphores"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(call: Callable[[], Any], named: str) -> None:
    with pytest.raises(OperandError, match=f"greedy_tokens: {named}"):
        call()


def launches() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(2, 129280, dtype=dtype)
        greedy_tokens(logits, semaphores_for(logits), mark=FAILED)


def test_resources() -> None:
    """Loads of 16 bytes a thread; one count a program."""
    for usage in resources(__name__):
        usage.require_no_spills()
        assert usage.registers <= 64 and usage.early_loads == 0, usage
        assert usage.count("atom.global.gpu.acq_rel.add") == 1, usage
        assert usage.count("ld.global.v4.b32") > 0 and usage.count("ld.global.b") == 0, usage
