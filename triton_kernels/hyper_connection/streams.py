"""Into the residual streams and out of the decoder: embedding rows copied to every stream, RMSNorm.

Both are copies with a little arithmetic. Floors: ``embed_streams`` reads d and writes n·d values a token, ``rms_norm``
reads and writes every value once; the benchmark compares with the device's copy bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import (
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_rows,
    require_same_device,
    require_shape,
)

from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import round_for

MAX_ROW = 16384
"""Longest row of :func:`rms_norm`: a program holds one whole row in registers."""


@triton.jit
def _copy_to_streams(source, rows, out, vocabulary, width, out_row, STREAMS: tl.constexpr, INDEXED: tl.constexpr,
                     BLOCK: tl.constexpr):  # fmt: skip
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    row = token
    known = True
    if INDEXED:
        row = tl.load(rows + token).to(tl.int64)
        known = (row >= 0) & (row < vocabulary)
    value = tl.load(source + row * width + columns, mask=inside & known, other=float("nan"))
    for stream in tl.static_range(STREAMS):
        tl.store(out + token * out_row + stream * width + columns, value, mask=inside)


def expand_streams(embedded: Tensor, streams: int, *, out: Tensor | None = None) -> Tensor:
    """Copy the embedding [T, d] to every residual stream: [T, streams, d], same dtype, no scaling."""
    require_dimensions("expand_streams: embedded", embedded, 2, "[tokens, d]")
    return _expand("expand_streams", embedded, None, embedded.shape[0], streams, out)


def embed_streams(token_ids: Tensor, table: Tensor, streams: int, *, out: Tensor | None = None) -> Tensor:
    """Embedding rows copied to every residual stream (spec section 2).

    Args:
        token_ids: int32 or int64 [T]. An id outside the table gives NaN; nothing is read for it.
        table: [vocabulary, d], fp32 or bf16.
        streams: number of residual streams.
        out: [T, streams, d] in the table's dtype, contiguous; allocated unless given.
    """
    require_dimensions("embed_streams: token_ids", token_ids, 1, "[tokens]")
    require_dtype("embed_streams: token_ids", token_ids, torch.int32, torch.int64)
    require_dimensions("embed_streams: table", table, 2, "[vocabulary, d]")
    require_contiguous("embed_streams: token_ids", token_ids)
    require_same_device("table", table, **{"embed_streams: token_ids": token_ids})
    return _expand("embed_streams", table, token_ids, token_ids.shape[0], streams, out)


def _expand(op: str, source: Tensor, rows: Tensor | None, tokens: int, streams: int, out: Tensor | None) -> Tensor:
    require_dtype(f"{op}: values", source, torch.bfloat16, torch.float32)
    require_contiguous(f"{op}: values", source)
    width = source.shape[1]
    if out is None:
        out = source.new_empty(tokens, streams, width)
    require_shape(f"{op}: out", out, (tokens, streams, width), "[tokens, streams, d]")
    require_dtype(f"{op}: out", out, source.dtype)
    require_contiguous(f"{op}: out", out)
    require_same_device("the values", source, **{f"{op}: out": out})
    if tokens:
        block = min(triton.next_power_of_2(width), 1024)
        _copy_to_streams[(tokens, triton.cdiv(width, block))](
            source, rows, out, source.shape[0], width, streams * width,
            STREAMS=streams, INDEXED=rows is not None, BLOCK=block, num_warps=4,
            **OVERLAPPED,
        )  # fmt: skip
    return out


@triton.jit
def normalized(x, weight, eps, columns, inside, width, WEIGHTED: tl.constexpr):
    """fp32 rows ``x`` [ROWS, BLOCK], zero outside, over their root mean square, times the weight."""
    if WEIGHTED:
        # Asked for with the rows, not after their sum.
        weights = tl.load(weight + columns, mask=inside, other=0.0)
    mean_square = tl.sum(x * x, axis=1) / width
    x *= tl.rsqrt(mean_square + eps)[:, None]
    if WEIGHTED:
        x *= weights.to(tl.float32)[None, :]
    return x


@triton.jit
def _rms_norm(x, weight, out, eps, rows, width, x_row, out_row, WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    after_previous()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    mask = (row < rows)[:, None] & inside[None, :]
    value = tl.load(x + row[:, None] * x_row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    value = normalized(value, weight, eps, columns, inside, width, WEIGHTED)
    tl.store(out + row[:, None] * out_row + columns[None, :], round_for(value, out), mask=mask)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension (spec section 2).

    Args:
        x: [..., n] fp32 or bf16, rows contiguous; leading dimensions of one stride (a column slice of a matrix will
            do). n up to 16384.
        weight: [n] fp32 or bf16, or ``None`` for the unweighted form.
        eps: added to the mean square.
        out_dtype: fp32 or bf16, ``x.dtype`` unless given. out: the result's place; may be ``x`` itself.

    Rounding: fp32 throughout, one rounding to the output dtype. Within 4 units of fp32's last place of the exact
    value before that rounding (n up to 16384: the sum of squares is pairwise over lanes).
    """
    op = "rms_norm"
    width = x.shape[-1]
    require_dtype(f"{op}: x", x, torch.bfloat16, torch.float32)
    if not 0 < width <= MAX_ROW:
        raise OperandValueError(f"{op}: x: expected rows of 1 to {MAX_ROW} values, found shape {tuple(x.shape)}")
    if weight is not None:
        require_dtype(f"{op}: weight", weight, torch.bfloat16, torch.float32)
        require_shape(f"{op}: weight", weight, (width,), "[n], the last dimension of x")
        require_contiguous(f"{op}: weight", weight)
    if out is None:
        out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    require_dtype(f"{op}: out", out, torch.bfloat16, torch.float32)
    require_shape(f"{op}: out", out, x.shape, "that of x")
    require_rows(f"{op}: x", x)
    require_rows(f"{op}: out", out)
    require_same_device("x", x, **{f"{op}: weight": weight, f"{op}: out": out})
    flat, flat_out = x.view(-1, width), out.view(-1, width)
    rows = flat.shape[0]
    if rows:
        block = triton.next_power_of_2(width)
        rows_each = max(1, min(2048 // block, triton.next_power_of_2(rows)))
        _rms_norm[(triton.cdiv(rows, rows_each),)](
            flat, weight, flat_out, eps, rows, width, flat.stride(0), flat_out.stride(0),
            WEIGHTED=weight is not None, ROWS=rows_each, BLOCK=block, num_warps=8 if block > 2048 else 4,
            **OVERLAPPED,
        )  # fmt: skip
    return out
