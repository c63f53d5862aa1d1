"""Keeps what a round of drafts leaves for the next one: a row for each request, in one launch.

``kept[slots[b]] = given[b]`` of four tensors: the last token, the next guess, its probability, and the streams.
Supports int32 and int64 tokens, any number of requests and values of streams. Floor: the streams read and written once.
"""

from __future__ import annotations

from typing import NamedTuple

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
    require_rows,
    require_same_device,
    require_shape,
)

from ..common.integers import cdiv
from ..common.overlap import OVERLAPPED, after_previous

BLOCK = 1024
"""Values of streams that a program copies, 8 a thread. Not yet timed on a GPU."""

TOKENS = (torch.int32, torch.int64)
"""Dtypes of a token that is given; int64 is kept."""
COPIED = (torch.int64, torch.float32, torch.bfloat16)
"""Dtypes of guesses, probabilities and streams."""


class Left(NamedTuple):
    """Values that a round leaves of B requests, or that are kept of S slots, with S for B.

    Attributes:
        token: int64 [B], the last token, or int32 where it is given. guess: int64 [B, 1], the token behind it.
        probability: fp32 [B, 1], the guess's. streams: bf16 [B, values], that the draft goes on from.
    """

    token: Tensor
    guess: Tensor
    probability: Tensor
    streams: Tensor


@triton.jit
def _keep_rows(slots, given, kept, values, streams_row, BLOCK: tl.constexpr):
    """Grid: (requests, parts of the streams of BLOCK values)."""
    after_previous()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < values
    streams = tl.load(given.streams + row * streams_row + column, mask=inside)
    tl.store(kept.streams + slot * values + column, streams, mask=inside)
    if part == 0:
        tl.store(kept.token + slot, tl.load(given.token + row).to(tl.int64))
        tl.store(kept.guess + slot, tl.load(given.guess + row))
        tl.store(kept.probability + slot, tl.load(given.probability + row))


def keep_rows(slots: Tensor, given: Left, kept: Left) -> None:
    """Keep ``given`` in rows ``slots`` of ``kept``, in place; other rows stay.

    Args:
        slots: int64 [B], contiguous, different rows of ``kept``, which is not checked.
        given: of B requests, contiguous, the streams but for their rows.
        kept: of S slots, contiguous.

    Rounding: none.

    Raises:
        OperandTypeError: a dtype is not one of those of :class:`Left`.
        OperandValueError: a shape, stride or device does not fit.
    """
    _check(slots, given, kept)
    requests, values = given.streams.shape
    if requests:
        _keep_rows[(requests, max(cdiv(values, BLOCK), 1))](
            slots, given, kept, values, given.streams.stride(0), BLOCK=BLOCK, num_warps=4, **OVERLAPPED
        )


@once
def _check(slots: Tensor, given: Left, kept: Left) -> None:
    """Refuse what :func:`keep_rows` cannot read or write; metadata only."""
    op = "keep_rows"
    require_dimensions(f"{op}: slots", slots, 1, "[requests]")
    require_dtype(f"{op}: slots", slots, torch.int64)
    require_contiguous(f"{op}: slots", slots)
    require_dimensions(f"{op}: streams", kept.streams, 2, "[slots, values]")
    most, values = kept.streams.shape
    require_range(f"{op}: values", values, 0, 2**31 - BLOCK - 1)
    for where, left, rows in (("given", given, len(slots)), ("kept", kept, most)):
        require_shape(f"{op}: token, {where}", left.token, (rows,), "[rows]")
        require_shape(f"{op}: guess, {where}", left.guess, (rows, 1), "[rows, 1]")
        require_shape(f"{op}: probability, {where}", left.probability, (rows, 1), "[rows, 1]")
        require_shape(f"{op}: streams, {where}", left.streams, (rows, values), "[rows, values]")
        require_dtype(f"{op}: token, {where}", left.token, *(TOKENS if where == "given" else TOKENS[1:]))
        for name, dtype in zip(("guess", "probability", "streams"), COPIED, strict=True):
            require_dtype(f"{op}: {name}, {where}", getattr(left, name), dtype)
        for name in ("token", "guess", "probability"):
            require_contiguous(f"{op}: {name}, {where}", getattr(left, name))
        require_same_device("slots", slots, **{f"{op}: {name}": each for name, each in left._asdict().items()})
    require_rows(f"{op}: streams, given", given.streams)
    require_contiguous(f"{op}: streams, kept", kept.streams)
