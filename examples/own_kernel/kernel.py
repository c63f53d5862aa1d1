"""The op on a GPU: one program a row, in blocks of columns.

Supports bf16 and fp32 rows of any width. Floor: every value read once, one written a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats.checks import (
    require_dtype,
    require_rows,
    require_same_device,
    require_shape,
    require_table,
)
from nvfp4_sgl.triton_kernels.common.overlap import OVERLAPPED, after_previous
from nvfp4_sgl.triton_kernels.common.rounding import finite

from .reference import AMAX_FLOOR, INVERSE_FULL_SCALE

BLOCK_COLUMNS = 1024
"""Columns that a program reads at once."""


@triton.jit
def _row_scales(x, out, width, x_row, floor, factor, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_row + columns, mask=columns < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(finite(value)))
    tl.store(out + row, tl.maximum(tl.max(largest, axis=0), floor) * factor)


def row_scales(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute the global scale of each row in NVFP4: :func:`examples.own_kernel.reference.row_scales`, bit for bit.

    Args:
        x: bf16 or fp32 [T, K], the last dimension contiguous, rows of one stride.
        out: fp32 [T], contiguous; allocated unless given.

    Returns:
        ``out``.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit.
    """
    op = "row_scales"
    require_table(f"{op}: x", x)
    require_dtype(f"{op}: x", x, torch.bfloat16, torch.float32)
    require_rows(f"{op}: x", x)
    if out is None:
        out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    require_shape(f"{op}: out", out, (x.shape[0],), "[T]")
    require_dtype(f"{op}: out", out, torch.float32)
    require_same_device("x", x, **{f"{op}: out": out})
    if x.shape[0]:
        _row_scales[(x.shape[0],)](
            x, out, x.shape[1], x.stride(0), AMAX_FLOOR, INVERSE_FULL_SCALE,
            BLOCK=min(triton.next_power_of_2(x.shape[1]), BLOCK_COLUMNS), num_warps=4,
            **OVERLAPPED,
        )  # fmt: skip
    return out
