"""Acceptance of the right guesses of a round: those that the target has answered itself, up to the first wrong one.

``lengths[b]`` is the first row ``i`` with ``guesses[b, i + 1] != answers[b, i]``, or the last row, plus one. All that
follows from it is stored by the same launch: the rows' places, the last token, and the requests' new lengths.

A program of one warp holds the rows of a request. Supports int64 tokens, any number of requests, and up to
:data:`MAX_ROWS` rows of each. Floor: a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats.checks import (
    once,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_range,
    require_same_device,
    require_shape,
)

from ..common.integers import next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous

MAX_ROWS = 32
"""Rows of a request: a lane each."""
POINTERS = ("guesses", "answers", "starts", "lengths", "right", "places", "tokens", "last", "ends")


# One variant whatever the addresses: they follow from SGLang's batches.
@triton.jit(do_not_specialize_on_alignment=POINTERS)
def _accept_guesses(
    guesses, answers, starts, lengths, right, places, tokens, last, ends, COUNT: tl.constexpr, ROWS: tl.constexpr
):
    """Grid: (requests). COUNT: rows of a request. ROWS: a power of two, not less."""
    after_previous()
    request = tl.program_id(0)
    row = tl.arange(0, ROWS)
    there = row < COUNT
    at = request * COUNT + row
    answer = tl.load(answers + at, mask=there, other=0)
    guess = tl.load(guesses + at + 1, mask=row < COUNT - 1, other=0)
    ends_round = (row >= COUNT - 1) | (guess != answer)
    final = tl.min(tl.where(ends_round, row, COUNT - 1), axis=0)
    tl.store(places + at, tl.where(row <= final, at, -1), mask=there)
    tl.store(tokens + at, answer.to(tl.int32), mask=there)
    tl.store(last + request, tl.sum(tl.where(row == final, answer, 0), axis=0))
    tl.store(right + request, final)
    tl.store(lengths + request, final + 1)
    tl.store(ends + request, tl.load(starts + request) + final + 1)


def accept_guesses(
    guesses: Tensor, answers: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Accept the guesses of a round; no host sync.

    Args:
        guesses: int64 [B, n], contiguous, the token of each row; the first is decided.
        answers: int64 [B, n], contiguous, what the target answers each row with.
        starts: int64 [B], contiguous, tokens whose keys were cached in front of the round.

    Returns:
        (int32 [B], accepted rows; int32 [B], right guesses, one less; int32 [B, n], places of the accepted rows among
        all, -1 padded; int32 [B, n], the answers; int64 [B], the answer of the last accepted row; int64 [B], tokens
        whose keys are cached behind the round).

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit.
    """
    _check(guesses, answers, starts)
    requests, rows = guesses.shape
    lengths, right = (starts.new_empty(requests, dtype=torch.int32) for _ in range(2))
    places, tokens = (starts.new_empty(requests, rows, dtype=torch.int32) for _ in range(2))
    last, ends = (starts.new_empty(requests) for _ in range(2))
    if requests:
        _accept_guesses[(requests,)](
            guesses, answers, starts, lengths, right, places, tokens, last, ends,
            COUNT=rows, ROWS=next_power_of_2(rows), num_warps=1, **OVERLAPPED,
        )  # fmt: skip
    return lengths, right, places, tokens, last, ends


@once
def _check(guesses: Tensor, answers: Tensor, starts: Tensor) -> None:
    """Refuse what :func:`accept_guesses` cannot read; metadata only."""
    op = "accept_guesses"
    require_dimensions(f"{op}: guesses", guesses, 2, "[requests, rows]")
    requests, rows = guesses.shape
    require_range(f"{op}: rows", rows, 1, MAX_ROWS)
    require_range(f"{op}: requests times rows", requests * rows, 0, 2**31 - 1)
    require_shape(f"{op}: answers", answers, (requests, rows), "[requests, rows]")
    require_shape(f"{op}: starts", starts, (requests,), "[requests]")
    for name, tensor in (("guesses", guesses), ("answers", answers), ("starts", starts)):
        require_dtype(f"{op}: {name}", tensor, torch.int64)
        require_contiguous(f"{op}: {name}", tensor)
    require_same_device("guesses", guesses, answers=answers, starts=starts)
