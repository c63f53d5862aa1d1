"""The router's logits of up to 8 tokens: a small bf16 GEMM in one launch (specification §6.1).

``logits[t, e] = sum_k x[t, k] · weight[e, k]``, fp32. The matrix is never quantised. For so few tokens what counts is
the chain of latencies, not the bytes (2 MB): a library's GEMM splits K and adds the parts in a launch of its own; here
a program holds whole rows of the matrix, which it has loaded before the previous kernel ends.

Supports up to ``MAX_TOKENS`` tokens, any number of experts and any width. Floor: the matrix read once, 2·E·d bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks

from ..common.overlap import OVERLAPPED, after_previous

MAX_TOKENS = 8
"""Most tokens: a program reads all of them. For more, a library's GEMM is used."""
BLOCK_ROWS = 2
"""Rows of the matrix, that is experts, of one program: 128 programs for 256 experts, a program a multiprocessor."""


@triton.jit(do_not_specialize=["tokens"])
def _router_logits(
    x, weight, out, tokens, rows, width, x_row,
    PADDED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows,). PADDED: tokens, rounded up to a power of two."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_K)
    is_row, inside = row < rows, column < width
    # The matrix is a constant: it may be read before the previous kernel has ended.
    w = tl.load(weight + row[:, None] * width + column[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
    after_previous()
    token = tl.arange(0, PADDED)
    logits = tl.zeros((PADDED, BLOCK_ROWS), tl.float32)
    # All tokens are stored at the end: a store in between would hold back the loads of the tokens that follow.
    for t in tl.static_range(PADDED):
        values = tl.load(x + t * x_row + column, mask=inside & (t < tokens), other=0.0).to(tl.float32)
        sums = tl.sum(values[None, :] * w.to(tl.float32), axis=1)
        logits = tl.where(token[:, None] == t, sums[None, :], logits)
    mask = (token < tokens)[:, None] & is_row[None, :]
    tl.store(out + token[:, None] * rows + row[None, :], logits, mask=mask)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight^T`` in fp32.

    Args:
        x: bf16 [T, d], the last dimension contiguous, T from 1 to ``MAX_TOKENS``.
        weight: bf16 [E, d], contiguous; nothing before this launch in its stream may still be writing it.

    Returns:
        fp32 [T, E].

    Rounding: products are exact, sums are fp32 in an order that does not depend on T.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit, or there are too many tokens.

    Source: specification §6.1.
    """
    op = "router_logits"
    checks.require_dimensions(f"{op}: x", x, 2, "[T, d]")
    checks.require_dimensions(f"{op}: weight", weight, 2, "[E, d]")
    tokens, width = x.shape
    rows = weight.shape[0]
    checks.require_range(f"{op}: tokens", tokens, 1, MAX_TOKENS)
    checks.require_shape(f"{op}: weight", weight, (rows, width), "[E, d]")
    for name, tensor in (("x", x), ("weight", weight)):
        checks.require_dtype(f"{op}: {name}", tensor, torch.bfloat16)
    checks.require_rows(f"{op}: x", x)
    checks.require_contiguous(f"{op}: weight", weight)
    checks.require_same_device("x", x, weight=weight)
    out = x.new_empty(tokens, rows, dtype=torch.float32)
    _router_logits[(triton.cdiv(rows, BLOCK_ROWS),)](
        x,
        weight,
        out,
        tokens,
        rows,
        width,
        x.stride(0),
        triton.next_power_of_2(tokens),
        BLOCK_ROWS,
        triton.next_power_of_2(width),
        num_warps=4,
        **OVERLAPPED,
    )
    return out
