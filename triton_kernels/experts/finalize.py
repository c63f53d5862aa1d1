"""The final sum of the mixture of experts: each token's expert outputs, weighted and added (specification §6.2).

``out[t] = sum_k weights[t, k] * rows[destination[t, k]] (+ shared[t])``, accumulated in fp32.

Supports bf16 and fp32 rows, routing weights applied here or already in the rows, pairs without a row (−1), and a shared
expert that is either one of the pairs or a tensor of its own. Destinations are data on the device and are not checked.

Floor: k·d values of ``rows`` (and d of ``shared``) read and d written a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import (
    once,
    require_aligned,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_one_of,
    require_rows,
    require_same_device,
    require_shape,
)
from nvfp4_sgl.limits import PUSHING_RANKS

from ..common.inbox import addresses, pointer
from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import round_for


@triton.jit
def _finalize(
    rows, destination, weights, shared, out, copies, d, row_stride, shared_stride,
    TOPK: tl.constexpr, WEIGHTED: tl.constexpr, SHARED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < d
    total = tl.zeros((BLOCK_D,), tl.float32)
    for k in tl.static_range(TOPK):
        row = tl.load(destination + token * TOPK + k).to(tl.int64)
        value = tl.load(rows + row * row_stride + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * TOPK + k)
        total += value
    if SHARED:
        total += tl.load(shared + token * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
    # Those on other GPUs have the longest way.
    for number in tl.static_range(len(copies)):
        tl.store(pointer(copies[number], out) + token * d + column, round_for(total, out), mask=inside)
    tl.store(out + token * d + column, round_for(total, out), mask=inside)


def finalize(
    rows: Tensor,
    destination: Tensor,
    weights: Tensor | None,
    out: Tensor,
    *,
    shared: Tensor | None = None,
    copies: Sequence[Tensor] = (),
) -> Tensor:
    """Sum each token's rows: ``sum_k weights_k rows[destination_k] (+ shared)``.

    Args:
        rows: bf16 or fp32 [padded rows, d], the experts' outputs, the last dimension contiguous. Padding is not read.
        destination: int32 [T, k], contiguous, the row of each pair; a pair with −1 adds nothing.
        weights: fp32 [T, k], contiguous, or ``None`` if the rows are weighted already.
        out: bf16 or fp32 [T, d], contiguous; written.
        shared: bf16 or fp32 [T, d], the last dimension contiguous: the shared expert's output, if it is not among the
            rows.
        copies: none, or 1, 3 or 7 more tensors like ``out``, in bf16, which get the same values, such as this rank's
            part in the other ranks' inboxes (:mod:`..common.inbox`). They begin at multiples of 16 bytes and may lie in
            another GPU's memory.

    Returns:
        ``out``.

    Rounding: sums are fp32, in the order of k, the shared expert last; one rounding to the output dtype. In
    bf16 every NaN is a positive one, never ``inbox.EMPTY``.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit, or d is 0.

    Source: specification §6.2.
    """
    copies = tuple(copies)
    _check(rows, destination, weights, out, shared, copies)
    d, (tokens, topk) = rows.shape[1], destination.shape
    if tokens:
        block = min(next_power_of_2(d), 1024)
        _finalize[(tokens, cdiv(d, block))](
            rows, destination, weights, shared, out, addresses(copies), d, rows.stride(0),
            0 if shared is None else shared.stride(0),
            TOPK=topk, WEIGHTED=weights is not None, SHARED=shared is not None, BLOCK_D=block, num_warps=4,
            **OVERLAPPED,
        )  # fmt: skip
    return out


@once
def _check(
    rows: Tensor,
    destination: Tensor,
    weights: Tensor | None,
    out: Tensor,
    shared: Tensor | None,
    copies: tuple[Tensor, ...],
) -> None:
    """Refuse what :func:`finalize` cannot read or write; metadata only."""
    op = "finalize"
    require_dimensions(f"{op}: rows", rows, 2, "[padded rows, d]")
    require_dimensions(f"{op}: destination", destination, 2, "[tokens, topk]")
    d = rows.shape[1]
    tokens, topk = destination.shape
    require_dtype(f"{op}: destination", destination, torch.int32)
    require_contiguous(f"{op}: destination", destination)
    require_shape(f"{op}: out", out, (tokens, d), "[tokens, d]")
    require_contiguous(f"{op}: out", out)
    for name, tensor in {"rows": rows, "out": out, "shared": shared}.items():
        if tensor is not None:
            require_dtype(f"{op}: {name}", tensor, torch.bfloat16, torch.float32)
            require_rows(f"{op}: {name}", tensor)
            require_same_device("destination", destination, **{f"{op}: {name}": tensor})
    require_one_of(f"{op}: number of copies", len(copies), (0, *(ranks - 1 for ranks in PUSHING_RANKS)))
    for number, copy in enumerate(copies):
        name = f"{op}: copy {number}"
        require_dtype(f"{op}: out", out, torch.bfloat16)
        require_dtype(name, copy, torch.bfloat16)
        require_shape(name, copy, (tokens, d), "[tokens, d]")
        require_contiguous(name, copy)
        require_aligned(name, copy)
        require_same_device("destination", destination, **{name: copy})
    if weights is not None:
        require_shape(f"{op}: weights", weights, (tokens, topk), "[tokens, topk]")
        require_dtype(f"{op}: weights", weights, torch.float32)
        require_contiguous(f"{op}: weights", weights)
        require_same_device("destination", destination, **{f"{op}: weights": weights})
    if shared is not None:
        require_shape(f"{op}: shared", shared, (tokens, d), "[tokens, d]")
    if d == 0:
        raise OperandValueError(f"{op}: rows: expected at least one column, found shape {tuple(rows.shape)}")
