"""What a round leaves is kept in the rows of its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.triton_kernels.plan.relay import BLOCK, Left, keep_rows
from tests.triton.support.interpreter import run_backwards
from tests.triton.support.resources import resources


def some_rows(rows: int, values: int, *, device: str = "cpu", tokens: torch.dtype = torch.int64) -> Left:
    generator = torch.Generator().manual_seed(rows + values)
    ids = torch.randint(-1, 129280, (2, rows), generator=generator)
    streams = torch.randn(rows, values + 8, generator=generator).bfloat16()[:, :values]
    probability = torch.rand(rows, 1, generator=generator)
    left = Left(ids[0].to(tokens), ids[1, :, None].contiguous(), probability, streams)
    return Left(*(each.to(device) for each in left))


def kept_rows(rows: int, values: int, device: str = "cpu") -> Left:
    return Left(*(each.contiguous() for each in some_rows(rows, values, device=device)))


def check(requests: int, values: int, device: str, tokens: torch.dtype = torch.int64) -> None:
    slots = torch.randperm(2 * requests + 1, generator=torch.Generator().manual_seed(1))[:requests].to(device)
    given, kept = some_rows(requests, values, device=device, tokens=tokens), kept_rows(2 * requests + 1, values, device)
    expected = [each.clone() for each in kept]
    for to, row in zip(expected, given, strict=True):
        to[slots] = row.to(to.dtype)
    keep_rows(slots, given, kept)
    assert all(map(torch.equal, kept, expected))


@pytest.mark.parametrize("tokens", [torch.int32, torch.int64])
@pytest.mark.parametrize(("requests", "values"), [(1, BLOCK), (3, 2 * BLOCK + 8), (16, 24), (0, 24)])
def test_rows_of_requests(requests: int, values: int, tokens: torch.dtype, device: str) -> None:
    """In whole blocks and not; ids of failed requests are kept, too; other requests' rows stay."""
    check(requests, values, device, tokens)


def test_programs_may_run_in_any_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_backwards(monkeypatch)
    check(3, 2 * BLOCK + 8, device)


SLOTS, GIVEN, KEPT = torch.tensor([2, 0]), some_rows(2, 16), kept_rows(4, 16)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: keep_rows(SLOTS.int(), GIVEN, KEPT), "slots"),
        (lambda: keep_rows(SLOTS[:1], GIVEN, KEPT), "token, given"),
        (lambda: keep_rows(SLOTS, GIVEN._replace(token=GIVEN.token.float()), KEPT), "token, given"),
        (lambda: keep_rows(SLOTS, GIVEN, KEPT._replace(token=KEPT.token.int())), "token, kept"),
        (lambda: keep_rows(SLOTS, GIVEN._replace(guess=GIVEN.guess[:, 0]), KEPT), "guess, given"),
        (lambda: keep_rows(SLOTS, GIVEN._replace(probability=GIVEN.probability.half()), KEPT), "probability, given"),
        (lambda: keep_rows(SLOTS, GIVEN._replace(streams=GIVEN.streams.float()), KEPT), "streams, given"),
        (lambda: keep_rows(SLOTS, GIVEN, KEPT._replace(streams=some_rows(4, 16).streams)), "streams, kept"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(call: Callable[[], Any], named: str) -> None:
    with pytest.raises(OperandError, match=f"keep_rows: {named}"):
        call()


def launches() -> None:
    for tokens in (torch.int32, torch.int64):
        given = some_rows(2, 16384, tokens=tokens)
        keep_rows(SLOTS, given._replace(streams=given.streams.contiguous()), kept_rows(4, 16384))


def test_resources() -> None:
    """Loads of 16 bytes a thread."""
    for usage in resources(__name__):
        usage.require_no_spills()
        assert usage.registers <= 40 and usage.early_loads == 0 and usage.count("ld.global.v4.b32") > 0, usage
