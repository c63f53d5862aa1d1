"""The router's logits of up to 64 tokens: a small bf16 GEMM in one launch (specification §6.1).

``logits[t, e] = sum_k x[t, k] · weight[e, k]``, fp32. The matrix is never quantised. The indexer's head weights of 9 to
64 tokens are such a GEMM, too (specification §5): heads then stand for experts. For so few tokens what counts is the
chain of latencies, not the bytes (2 MB): a library's GEMM splits K and adds the parts in a launch of its own. Here it
is one launch, whose programs have loaded their part of the matrix before the previous kernel ends. There are two
kernels:

* Up to :data:`WHOLE_ROWS_MAX_TOKENS` tokens a program holds whole rows of the matrix and reads all tokens.
* For more tokens that is too much for each program to read. There a program takes a block of experts, a part of K and
  up to :data:`BLOCK_TOKENS` tokens, multiplies by tensor cores (``mma.sync``) and stores its sums. Of the programs of a
  block of experts and tokens, the one that comes last adds the sums of all parts, in their order.

Supports up to :data:`MAX_TOKENS` tokens, any number of experts and any width. Floor: the matrix read once, 2·E·d bytes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks

from ..common.dot import dot_bf16
from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import INTERPRETED

MAX_TOKENS = 64
"""Most tokens."""
LARGE_VALUES, LARGE_MAX_TOKENS = 2**21, 32
"""Matrices of more values use this kernel up to so many tokens, smaller ones up to ``MAX_TOKENS``; beyond, cuBLAS is
faster. It takes 2.9 µs for Flash's matrix and 16 tokens, cuBLAS 6.2 (``launch/results/tunings_h200.md``)."""
WHOLE_ROWS_MAX_TOKENS = 2
"""Most tokens of the kernel whose programs hold whole rows and read all tokens. Interpolated: it takes 2.3 µs for one
token and 3.8 for four, where the other kernel takes 2.9 (``launch/results/tunings_h200.md``)."""
BLOCK_ROWS = 2
"""Rows of the matrix, that is experts, of one of its programs: 128 programs for 256 experts, one a multiprocessor."""
SPLIT_BLOCK_ROWS = 16
"""Experts of a program that takes a part of K: the rows of an ``mma.sync``."""
BLOCK_TOKENS = 16
"""Tokens of such a program: 3.5 µs for 32 tokens instead of 4.0 with twice as many
(``launch/results/tunings_h200.md``)."""
SLICES, SLICE = 4, 128
"""Slices of a part of K, one a warp, and the columns of each; the program adds their sums. For each 16 tokens these are
128 programs for 256 experts of 4096 columns. Others have not been measured."""
PARTS_AT_ONCE = tl.constexpr(8)
"""Parts whose sums are loaded before the first is added."""


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


@triton.jit
def _not_before_here(values):
    """Return bf16 ``values``, unchanged. The compiler moves nothing that uses the result before this point.

    Else it copies the matrix to shared memory where it is loaded: a program would wait for it first, and for the
    previous kernel and the tokens only then.
    """
    if INTERPRETED:
        return values
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=tl.bfloat16, is_pure=False, pack=2)


@triton.jit
def _sum_slices(sums):
    """Add [SLICES, M, N] over the slices, the second half to the first and so on: [M, N].

    Warps exchange their sums once, with two barriers; by ``tl.sum`` they would with 34 for 64 tokens (Triton 3.8.0).
    """
    SLICES: tl.constexpr = sums.shape[0]
    if SLICES == 1:
        return tl.reshape(sums, (sums.shape[1], sums.shape[2]))
    else:
        halves = tl.reshape(sums, (2, SLICES // 2, sums.shape[1], sums.shape[2]))
        first, last = tl.split(tl.permute(halves, (1, 2, 3, 0)))
        return _sum_slices(first + last)


@triton.jit(do_not_specialize=["tokens"])
def _router_logits_split(
    x, weight, sums, out, semaphores, tokens, rows, width, x_row,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of ROWS experts, parts of K of SLICES * SLICE columns, blocks of TOKENS tokens).

    sums: fp32 [blocks of tokens, blocks of experts, parts, TOKENS, ROWS], workspace. semaphores: int32 [blocks of
    tokens, blocks of experts], see :func:`router_logits`.
    """
    block, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = block * ROWS + tl.arange(0, ROWS)
    column = (part * SLICES + tl.arange(0, SLICES)[:, None]) * SLICE + tl.arange(0, SLICE)[None, :]
    inside = column < width
    # The matrix is a constant: it may be read before the previous kernel has ended.
    at = weight + row[None, :, None] * width + column[:, None, :]
    loaded = tl.load(at, mask=(row < rows)[None, :, None] & inside[:, None, :], other=0.0)
    after_previous()
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    values = tl.load(
        x + token[None, None, :] * x_row + column[:, :, None], mask=here[None, None, :] & inside[:, :, None], other=0.0
    )
    total = dot_bf16(_not_before_here(loaded), values, tl.zeros((SLICES, ROWS, TOKENS), tl.float32))
    size: tl.constexpr = TOKENS * ROWS
    block_of_all = tl.program_id(2) * tl.num_programs(0) + block
    place = sums + block_of_all * parts * size + tl.arange(0, TOKENS)[None, :] * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(place + part * size, _sum_slices(total), mask=here[None, :])
    # All stores of the program's warps must be in memory before the semaphore is raised.
    tl.debug_barrier()
    if tl.atomic_add(semaphores + block_of_all, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(semaphores + block_of_all, 0)
        logits = tl.zeros((ROWS, TOKENS), tl.float32)
        for first in range(0, parts, PARTS_AT_ONCE):
            for i in tl.static_range(PARTS_AT_ONCE):
                # Past L1, because other programs have stored the sums.
                stored = here[None, :] & (first + i < parts)
                logits += tl.load(place + (first + i) * size, mask=stored, other=0.0, cache_modifier=".cg")
        tl.store(out + token[None, :] * rows + row[:, None], logits, mask=here[None, :] & (row < rows)[:, None])


def max_tokens(experts: int, width: int) -> int:
    """Up to how many tokens :func:`router_logits` is faster than a library's GEMM, for a matrix of that shape.

    Of the index weights' matrices, [64, 4096] and [64, 7168], no time alone is known, only inside a step.
    """
    return MAX_TOKENS if experts * width <= LARGE_VALUES else LARGE_MAX_TOKENS


def semaphores_size(experts: int) -> int:
    """Semaphores that :func:`router_logits` needs for so many experts."""
    return cdiv(MAX_TOKENS, BLOCK_TOKENS) * cdiv(experts, SPLIT_BLOCK_ROWS)


def router_logits(x: Tensor, weight: Tensor, semaphores: Tensor, *, planned_tokens: int | None = None) -> Tensor:
    """Compute ``x @ weight^T`` in fp32.

    Args:
        x: bf16 [T, d], the last dimension contiguous, T from 1 to ``MAX_TOKENS``.
        weight: bf16 [E, d], contiguous; nothing before this launch in its stream may still be writing it.
        semaphores: int32 [:func:`semaphores_size` of E, or more], contiguous; each counts the programs of a block of
            experts and tokens that have stored their sums. Zero between launches, which leave them so.
        planned_tokens: the kernel is chosen for so many; for T unless given.

    Returns:
        fp32 [T, E].

    Rounding: products are exact, sums are fp32. Their order is one for up to ``WHOLE_ROWS_MAX_TOKENS`` tokens, another
    for more, and depends on T in no other way, nor on the order of programs. For more tokens the tensor core cuts off
    what the sum of a slice of 128 columns, added 16 at a time, has beyond fp32; it does not round.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit, there are too many tokens or too few semaphores.

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
    checks.require_dtype(f"{op}: semaphores", semaphores, torch.int32)
    checks.require_contiguous(f"{op}: semaphores", semaphores)
    checks.require_range(f"{op}: number of semaphores", semaphores.numel(), semaphores_size(rows), math.inf)
    checks.require_same_device("x", x, weight=weight, semaphores=semaphores)
    out = x.new_empty(tokens, rows, dtype=torch.float32)
    if (planned_tokens or tokens) > WHOLE_ROWS_MAX_TOKENS:
        _split(x, weight, semaphores, out)
        return out
    _router_logits[(cdiv(rows, BLOCK_ROWS),)](
        x,
        weight,
        out,
        tokens,
        rows,
        width,
        x.stride(0),
        next_power_of_2(tokens),
        BLOCK_ROWS,
        next_power_of_2(width),
        num_warps=4,
        **OVERLAPPED,
    )
    return out


def _split(x: Tensor, weight: Tensor, semaphores: Tensor, out: Tensor) -> None:
    """Launch the kernel that splits K."""
    tokens, width = x.shape
    rows = weight.shape[0]
    grid = cdiv(rows, SPLIT_BLOCK_ROWS), cdiv(width, SLICES * SLICE), cdiv(tokens, BLOCK_TOKENS)
    _router_logits_split[grid](
        x,
        weight,
        out.new_empty(math.prod(grid) * BLOCK_TOKENS * SPLIT_BLOCK_ROWS),
        out,
        semaphores,
        tokens,
        rows,
        width,
        x.stride(0),
        BLOCK_TOKENS,
        SPLIT_BLOCK_ROWS,
        SLICES,
        SLICE,
        num_warps=SLICES,
        **OVERLAPPED,
    )
