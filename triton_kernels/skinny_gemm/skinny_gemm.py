"""A GEMM of up to 64 tokens with a small bf16 matrix, in one launch: the router's logits, the index weights.

``out[t, n] = sum_k x[t, k] · weight[n, k]``, fp32. Such a matrix (2 MB, 0.5 MB) is read in a microsecond if all of the
chip reads it, so K is split over programs, and what counts is the chain of latencies. A program loads its part of the
matrix before the previous kernel has ended; the last program of a block of rows adds the parts.

On an H200 (2026-11-23) cuBLAS took two launches for it, a GEMM with K split and its reduction: 6.7 µs of a decode step
of one token, 7.7 of 64.

Supports up to MAX_TOKENS tokens, any number of rows and any K. Floor: the matrix read once, 2·N·K
bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks

from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import INTERPRETED

MAX_TOKENS = 64
"""Most tokens: a program holds all of them. For more, a library's GEMM is as fast."""
BLOCK_ROWS, BLOCK_K = 16, 256
"""Rows and columns of the matrix that a program multiplies: 256 programs for 256 experts and K of 4096."""
SPLITS_AT_ONCE = {16: 32, 64: 16}
"""Parts that the last program adds at a time, by its tokens: 128 values of a thread at most."""


@triton.jit(do_not_specialize=["tokens"])
def _skinny_gemm(
    x, weight, out, parts, semaphores, tokens, rows, width, x_row, splits,
    BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows, ``splits``). ``parts``: fp32 [splits, tokens, rows]."""
    block, split = tl.program_id(0), tl.program_id(1)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = split * BLOCK_K + tl.arange(0, BLOCK_K)
    inside, is_row = column < width, row < rows
    # The matrix is a constant: it may be read before the previous kernel has ended.
    w = tl.load(weight + row[:, None] * width + column[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
    after_previous()
    token = tl.arange(0, BLOCK_TOKENS)
    is_token = token < tokens
    values = tl.load(x + token[:, None] * x_row + column[None, :], mask=is_token[:, None] & inside[None, :], other=0.0)
    if INTERPRETED:
        part = tl.dot(values.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee")
    else:
        part = tl.dot(values, tl.trans(w))
    at = token[:, None] * rows + row[None, :]
    mask = is_token[:, None] & is_row[None, :]
    tl.store(parts + split * tokens * rows + at, part, mask=mask)
    # All stores of the program must be in memory before it raises the semaphore.
    tl.debug_barrier()
    if tl.atomic_add(semaphores + block, 1, sem="acq_rel", scope="gpu") == splits - 1:
        tl.store(semaphores + block, 0)
        total = tl.zeros((BLOCK_TOKENS, BLOCK_ROWS), tl.float32)
        for first in range(0, splits, SPLITS_AT_ONCE):
            number = first + tl.arange(0, SPLITS_AT_ONCE)
            there = parts + number[:, None, None] * (tokens * rows) + at[None, :, :]
            known = (number < splits)[:, None, None] & mask[None, :, :]
            total += tl.sum(tl.load(there, mask=known, other=0.0, cache_modifier=".cg"), axis=0)
        tl.store(out + at, total, mask=mask)


def new_skinny_semaphores(rows: int, device: torch.device | str) -> Tensor:
    """Zeroed semaphores for :func:`skinny_gemm` with a matrix of ``rows`` rows."""
    return torch.zeros(triton.cdiv(rows, BLOCK_ROWS), dtype=torch.int32, device=device)


def skinny_gemm(x: Tensor, weight: Tensor, semaphores: Tensor) -> Tensor:
    """Compute ``x @ weight^T`` in fp32.

    Args:
        x: bf16 [T, K], the last dimension contiguous, T up to MAX_TOKENS.
        weight: bf16 [N, K], contiguous; nothing before this launch in its stream may still be writing it.
        semaphores: int32, from :func:`new_skinny_semaphores`; zero between launches, which leave them so.

    Returns:
        fp32 [T, N].

    Rounding: products are exact, sums fp32: of BLOCK_K columns by the tensor core, then of the parts in a fixed order.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit, or there are too many tokens.
    """
    op = "skinny_gemm"
    checks.require_dimensions(f"{op}: x", x, 2, "[T, K]")
    checks.require_dimensions(f"{op}: weight", weight, 2, "[N, K]")
    tokens, width = x.shape
    rows = weight.shape[0]
    checks.require_range(f"{op}: tokens", tokens, 0, MAX_TOKENS)
    checks.require_shape(f"{op}: weight", weight, (rows, width), "[N, K]")
    for name, tensor in (("x", x), ("weight", weight)):
        checks.require_dtype(f"{op}: {name}", tensor, torch.bfloat16)
    checks.require_rows(f"{op}: x", x)
    checks.require_contiguous(f"{op}: weight", weight)
    blocks, splits = triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(width, BLOCK_K)
    checks.require_shape(f"{op}: semaphores", semaphores, (blocks,), "[blocks of rows]")
    checks.require_dtype(f"{op}: semaphores", semaphores, torch.int32)
    checks.require_same_device("x", x, weight=weight, semaphores=semaphores)
    out = x.new_empty(tokens, rows, dtype=torch.float32)
    if not tokens or not rows:
        return out
    block_tokens = min(size for size in SPLITS_AT_ONCE if tokens <= size)
    _skinny_gemm[(blocks, splits)](
        x,
        weight,
        out,
        x.new_empty(splits, tokens, rows, dtype=torch.float32),
        semaphores,
        tokens,
        rows,
        width,
        x.stride(0),
        splits,
        block_tokens,
        BLOCK_ROWS,
        BLOCK_K,
        min(SPLITS_AT_ONCE[block_tokens], triton.next_power_of_2(splits)),
        num_warps=4,
        **OVERLAPPED,
    )
    return out
