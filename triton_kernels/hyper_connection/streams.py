"""The ends of the residual streams: embedding rows copied to every stream, and RMSNorm (specification §2).

Both are copies with a little arithmetic. They support bf16 and fp32, any number of streams, and RMSNorm rows of up to
:data:`MAX_NORM_WIDTH` values, with or without a weight.

Floors: ``embed_streams`` reads d and writes n·d values a token, ``rms_norm`` reads and writes every value once; the
benchmark compares with the device's copy bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import (
    once,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_rows,
    require_same_device,
    require_shape,
)
from nvfp4_sgl.limits import MAX_NORM_WIDTH

from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import round_for


@triton.jit(do_not_specialize=["vocabulary"])
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
    """Copy embedded tokens to every residual stream, without scaling.

    Args:
        embedded: bf16 or fp32 [T, d], contiguous.
        streams: number of residual streams.
        out: [T, streams, d] in the dtype of ``embedded``, contiguous; allocated unless given.

    Returns:
        ``out``.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit.

    Source: specification §2.
    """
    require_dimensions("expand_streams: embedded", embedded, 2, "[tokens, d]")
    return _expand("expand_streams", embedded, None, embedded.shape[0], streams, out)


def embed_streams(token_ids: Tensor, table: Tensor, streams: int, *, out: Tensor | None = None) -> Tensor:
    """Look tokens up in the embedding table and copy each row to every residual stream, without scaling.

    Args:
        token_ids: int32 or int64 [T], contiguous. An id outside the table gives NaN; nothing is read for it.
        table: bf16 or fp32 [vocabulary, d], contiguous.
        streams: number of residual streams.
        out: [T, streams, d] in the table's dtype, contiguous; allocated unless given.

    Returns:
        ``out``.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit.

    Floor: d values read and ``streams``·d written a token.
    Source: specification §2.
    """
    _check_ids(token_ids, table)
    return _expand("embed_streams", table, token_ids, token_ids.shape[0], streams, out)


def _expand(op: str, source: Tensor, rows: Tensor | None, tokens: int, streams: int, out: Tensor | None) -> Tensor:
    width = source.shape[1]
    if out is None:
        out = source.new_empty(tokens, streams, width)
    _check_copies(op, source, tokens, streams, out)
    if tokens:
        block = min(next_power_of_2(width), 1024)
        _copy_to_streams[(tokens, cdiv(width, block))](
            source, rows, out, source.shape[0], width, streams * width,
            STREAMS=streams, INDEXED=rows is not None, BLOCK=block, num_warps=4,
            **OVERLAPPED,
        )  # fmt: skip
    return out


@triton.jit
def normalized(x, weight, eps, columns, inside, width, WEIGHTED: tl.constexpr):
    """RMSNorm of fp32 rows ``x`` [ROWS, BLOCK], zero outside: divided by their root mean square, times the weight."""
    if WEIGHTED:
        # Loaded together with the rows, not after their sum.
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
    """Compute ``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension.

    Args:
        x: fp32 or bf16 [..., n], n up to 16384, the last dimension contiguous; leading dimensions of one stride (a
            column slice of a matrix will do).
        weight: fp32 or bf16 [n], contiguous, or ``None`` for the unweighted form.
        eps: added to the mean square.
        out_dtype: fp32 or bf16, the dtype of the result if ``out`` is not given; ``x.dtype`` by default.
        out: fp32 or bf16 [..., n], the last dimension contiguous, leading dimensions of one stride; may be ``x``
            itself; allocated unless given.

    Returns:
        ``out``.

    Rounding: fp32 throughout, one rounding to the output dtype. Within 4 units of fp32's last place of the exact
    value before that rounding (n up to 16384: the sum of squares is pairwise over lanes).

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit.

    Floor: every value read and written once.
    Source: specification §2.
    """
    op = "rms_norm"
    width = x.shape[-1]
    require_dtype(f"{op}: x", x, torch.bfloat16, torch.float32)
    if not 0 < width <= MAX_NORM_WIDTH:
        raise OperandValueError(f"{op}: x: expected rows of 1 to {MAX_NORM_WIDTH} values, found shape {tuple(x.shape)}")
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
        block = next_power_of_2(width)
        rows_each = max(1, min(2048 // block, next_power_of_2(rows)))
        _rms_norm[(cdiv(rows, rows_each),)](
            flat, weight, flat_out, eps, rows, width, flat.stride(0), flat_out.stride(0),
            WEIGHTED=weight is not None, ROWS=rows_each, BLOCK=block, num_warps=8 if block > 2048 else 4,
            **OVERLAPPED,
        )  # fmt: skip
    return out


@once
def _check_ids(token_ids: Tensor, table: Tensor) -> None:
    """Refuse tokens that :func:`embed_streams` cannot look up; metadata only."""
    require_dimensions("embed_streams: token_ids", token_ids, 1, "[tokens]")
    require_dtype("embed_streams: token_ids", token_ids, torch.int32, torch.int64)
    require_dimensions("embed_streams: table", table, 2, "[vocabulary, d]")
    require_contiguous("embed_streams: token_ids", token_ids)
    require_same_device("table", table, **{"embed_streams: token_ids": token_ids})


@once
def _check_copies(op: str, source: Tensor, tokens: int, streams: int, out: Tensor) -> None:
    """Refuse values that cannot be copied to every stream; metadata only."""
    require_dtype(f"{op}: values", source, torch.bfloat16, torch.float32)
    require_contiguous(f"{op}: values", source)
    require_shape(f"{op}: out", out, (tokens, streams, source.shape[1]), "[tokens, streams, d]")
    require_dtype(f"{op}: out", out, source.dtype)
    require_contiguous(f"{op}: out", out)
    require_same_device("the values", source, **{f"{op}: out": out})
