"""Acceptance of guesses against the reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.ops import drafts as reference
from nvfp4_sgl.triton_kernels.logits.accept import MAX_ROWS, accept_guesses
from tests.triton.support.interpreter import run_backwards
from tests.triton.support.resources import resources

Round = tuple[Tensor, Tensor, Tensor]


def poisoned(self: Tensor, *shape: int, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """``new_empty``, with what nothing else here has."""
    return torch.full(shape, -7, dtype=dtype or self.dtype, device=device or self.device)


def some_round(requests: int, rows: int, *, device: str = "cpu") -> Round:
    """Guesses, answers and lengths; of so few tokens that many guesses are right."""
    generator = torch.Generator().manual_seed(31 * requests + rows)
    guesses, answers = (torch.randint(3, (requests, rows), generator=generator) for _ in range(2))
    starts = torch.randint(1 << 20, (requests,), generator=generator)
    return guesses.to(device), answers.to(device), starts.to(device)


def check(guesses: Tensor, answers: Tensor, starts: Tensor) -> list[int]:
    """What is stored is the reference's, in its dtypes; the accepted rows."""
    before = [each.clone() for each in (guesses, answers, starts)]
    expected = reference.accept_guesses(guesses, answers, starts)
    with mock.patch.object(Tensor, "new_empty", poisoned):
        found = accept_guesses(guesses, answers, starts)
    for name, one, other in zip(expected._fields, found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other), (name, one, other)
    assert all(map(torch.equal, (guesses, answers, starts), before))
    return found[0].tolist()


@pytest.mark.parametrize(("requests", "rows"), [(1, 1), (3, 2), (16, 4), (5, 6), (2, 10), (2, MAX_ROWS), (0, 4)])
def test_some_guesses_are_right(requests: int, rows: int, device: str) -> None:
    check(*some_round(requests, rows, device=device))


@pytest.mark.parametrize("rows", [4, 6])
def test_right_guesses_in_every_place(rows: int, device: str) -> None:
    """A request for each set of right guesses: none, all, up to each row, and right ones behind a wrong one."""
    sets = torch.tensor(list(product((False, True), repeat=rows - 1)))
    guesses, answers, starts = some_round(len(sets), rows)
    guesses[:, 1:] = torch.where(sets, answers[:, :-1], answers[:, :-1] + 1)
    lengths = check(guesses.to(device), answers.to(device), starts.to(device))
    assert lengths == [1 + [*each, False].index(False) for each in sets.tolist()]
    assert set(lengths) == {*range(1, rows + 1)}


def test_rows_that_failed_and_padding(device: str) -> None:
    """-1, of logits that are not finite, is no guess, also behind a token that had failed; padding is all zeros."""
    guesses = torch.tensor([[5, 7, 8, 9], [-1, 0, 0, 0], [5, 7, 8, 9], [0, 0, 0, 0]], device=device)
    answers = torch.tensor([[7, -1, 9, 2], [-1, -1, -1, -1], [7, 8, 9, -1], [0, 0, 0, 0]], device=device)
    starts = torch.tensor([9, 9, 9, 1], device=device)
    assert check(guesses, answers, starts) == [2, 1, 4, 4]
    assert accept_guesses(guesses, answers, starts)[4].tolist() == [-1, -1, -1, 0]


def test_programs_may_run_in_any_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_backwards(monkeypatch)
    check(*some_round(7, 4, device=device))


@pytest.mark.gpu
def test_in_a_graph(device: str) -> None:
    given, graph = some_round(16, 4, device=device), torch.cuda.CUDAGraph()
    accept_guesses(*given)
    with torch.cuda.graph(graph):
        found = accept_guesses(*given)
    for seed in range(20):
        given[1].copy_(torch.randint(3, (16, 4), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert all(map(torch.equal, found, reference.accept_guesses(*given)))


GUESSES, ANSWERS, STARTS = some_round(3, 4)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: accept_guesses(GUESSES.int(), ANSWERS, STARTS), "guesses"),
        (lambda: accept_guesses(GUESSES[0], ANSWERS, STARTS), "guesses"),
        (lambda: accept_guesses(GUESSES[:, :2], ANSWERS[:, :2].contiguous(), STARTS), "guesses"),
        (lambda: accept_guesses(GUESSES[:, :0], ANSWERS[:, :0], STARTS), "rows"),
        (lambda: accept_guesses(*some_round(1, MAX_ROWS + 1)), "rows"),
        (lambda: accept_guesses(GUESSES, ANSWERS.int(), STARTS), "answers"),
        (lambda: accept_guesses(GUESSES, ANSWERS[:2], STARTS), "answers"),
        (lambda: accept_guesses(GUESSES, ANSWERS, STARTS.int()), "starts"),
        (lambda: accept_guesses(GUESSES, ANSWERS, STARTS[:2]), "starts"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(call: Callable[[], Any], named: str) -> None:
    with pytest.raises(OperandError, match=f"accept_guesses: {named}"):
        call()


def launches() -> None:
    for rows in (2, 4, 6, 10):
        accept_guesses(*some_round(2, rows))


def test_resources() -> None:
    """A warp, which needs no shared memory."""
    for usage in resources(__name__):
        usage.require_no_spills()
        assert usage.registers <= 40 and usage.shared == 0 and usage.early_loads == 0, usage
