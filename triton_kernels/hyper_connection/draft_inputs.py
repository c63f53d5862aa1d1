"""Inputs of draft models, made of the target's residual streams (specification §7).

``add_to_streams`` makes the streams that MTP's block begins with: ``y[k] = token + streams[k]``. ``stream_mean`` makes
what DSpark's stages read of a layer: the mean stream behind it. The streams are overwritten by the next site, so each
layer takes a launch. Both support any number of streams; sums are fp32.

Floors: every value read and written once.
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
    require_rows,
    require_same_device,
    require_shape,
)

from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import round_for

MAX_BLOCK = 1024
"""Columns of a program; as of ``streams.expand_streams``, not measured."""


@triton.jit
def _add_to_streams(token, streams, out, width, token_row, streams_row, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    shared = tl.load(token + row * token_row + columns, mask=inside, other=0.0)
    for stream in tl.static_range(STREAMS):
        at = row * STREAMS + stream
        value = shared + tl.load(streams + at * streams_row + columns, mask=inside, other=0.0)
        tl.store(out + at * width + columns, round_for(value, out), mask=inside)


def add_to_streams(token: Tensor, streams: Tensor, out: Tensor) -> Tensor:
    """Add a row of each token to all of its streams.

    Args:
        token: fp32 [T, d], the last dimension contiguous.
        streams: fp32 [T * n, d], the last dimension contiguous; the streams of a token are neighbours.
        out: bf16 or fp32 [T, n, d], contiguous.

    Returns:
        ``out``.

    Rounding: one sum in fp32, one rounding to the dtype of ``out``.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit.

    Source: specification §7.
    """
    _check_sum(token, streams, out)
    tokens, count, width = out.shape
    if tokens:
        block = min(next_power_of_2(width), MAX_BLOCK)
        _add_to_streams[(tokens, cdiv(width, block))](
            token, streams, out, width, token.stride(0), streams.stride(0), STREAMS=count, BLOCK=block, num_warps=4,
            **OVERLAPPED,
        )  # fmt: skip
    return out


@once
def _check_sum(token: Tensor, streams: Tensor, out: Tensor) -> None:
    """Refuse what :func:`add_to_streams` cannot read or write; metadata only."""
    op = "add_to_streams"
    require_dimensions(f"{op}: out", out, 3, "[tokens, streams, d]")
    tokens, count, width = out.shape
    require_dtype(f"{op}: out", out, torch.bfloat16, torch.float32)
    require_contiguous(f"{op}: out", out)
    for name, tensor, rows in (("token", token, tokens), ("streams", streams, tokens * count)):
        require_dtype(f"{op}: {name}", tensor, torch.float32)
        require_shape(f"{op}: {name}", tensor, (rows, width), "rows of out's d values")
        require_rows(f"{op}: {name}", tensor)
        require_same_device("out", out, **{f"{op}: {name}": tensor})


@triton.jit
def _stream_mean(streams, out, width, out_row, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(STREAMS):
        at = streams + (row * STREAMS + stream) * width + columns
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.div_rn(total, tl.full((BLOCK,), STREAMS, tl.float32))
    tl.store(out + row * out_row + columns, round_for(mean, out), mask=inside)


def stream_mean(streams: Tensor, out: Tensor) -> Tensor:
    """The mean stream of each token, into columns of what a draft reads.

    Args:
        streams: bf16 or fp32 [T, n, d], contiguous.
        out: bf16 or fp32 [T, d], the last dimension contiguous.

    Returns:
        ``out``.

    Rounding: the streams are added in their order, in fp32; one rounding to the dtype of ``out``.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit.

    Source: specification §7.
    """
    _check_mean(streams, out)
    tokens, count, width = streams.shape
    if tokens:
        block = min(next_power_of_2(width), MAX_BLOCK)
        _stream_mean[(tokens, cdiv(width, block))](
            streams, out, width, out.stride(0), STREAMS=count, BLOCK=block, num_warps=4,
            **OVERLAPPED,
        )  # fmt: skip
    return out


@once
def _check_mean(streams: Tensor, out: Tensor) -> None:
    """Refuse what :func:`stream_mean` cannot read or write; metadata only."""
    op = "stream_mean"
    require_dimensions(f"{op}: streams", streams, 3, "[tokens, streams, d]")
    require_dtype(f"{op}: streams", streams, torch.bfloat16, torch.float32)
    require_contiguous(f"{op}: streams", streams)
    tokens, _, width = streams.shape
    require_dtype(f"{op}: out", out, torch.bfloat16, torch.float32)
    require_shape(f"{op}: out", out, (tokens, width), "[tokens, d]")
    require_rows(f"{op}: out", out)
    require_same_device("streams", streams, **{f"{op}: out": out})
