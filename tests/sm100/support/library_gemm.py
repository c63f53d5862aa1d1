"""A bf16 GEMM in place of the library's, which the decoder calls for router, index weights and head.

On a GPU cuBLAS computes them; its kernels come without PTX. This one can be compiled for sm_100a and emulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl import standalone
from nvfp4_sgl.targets.fused import gemm_bf16
from nvfp4_sgl.triton_kernels.common.overlap import OVERLAPPED, after_previous

ROWS, COLUMNS, DEPTH = 16, 32, 64


@triton.jit
def library_gemm(x, weight, out, rows, columns, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """``x @ weight^T`` with fp32 sums, rounded to what ``out`` holds."""
    after_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = depth[None, :] < k
        a = tl.load(x + row[:, None] * k + depth[None, :], mask=inside & (row < rows)[:, None], other=0.0)
        b = tl.load(weight + column[:, None] * k + depth[None, :], mask=inside & (column < columns)[:, None], other=0.0)
        total = tl.dot(a, tl.trans(b), total)
    known = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=known)


def multiply(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``gemm_bf16.multiply``, of contiguous operands."""
    assert x.is_contiguous() and weight.is_contiguous()
    rows, k = x.shape
    out = x.new_empty(rows, weight.shape[0], dtype=dtype)
    grid = triton.cdiv(rows, ROWS), triton.cdiv(weight.shape[0], COLUMNS)
    library_gemm[grid](x, weight, out, rows, weight.shape[0], k, ROWS, COLUMNS, DEPTH, **OVERLAPPED)
    return out


@contextmanager
def emulated_library() -> Iterator[None]:
    """The decoder's bf16 GEMMs inside are this kernel."""
    with ExitStack() as patches:
        for module in (standalone, gemm_bf16):
            patches.enter_context(mock.patch.object(module, "multiply", multiply))
        yield
