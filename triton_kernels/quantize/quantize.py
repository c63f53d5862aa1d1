"""Quantisation of activations to NVFP4 in a launch of its own, if the kernel that makes them cannot quantise them.

The recipe is that of :mod:`.nvfp4`, bit for bit. Supports bf16 and fp32 rows, each with a scale of its own, or several
groups a row with a scale each; K a multiple of 64, small enough that a program holds a row in registers.

Floor: 2·T·K bytes read (bf16), T·K/2 + T·K/16 written. On an H200 :func:`quantize` reaches 60 to 75 % of its floor for
8192 rows: encoding takes some 17 instructions an element in the compiled code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats import checks
from nvfp4_sgl.formats.nvfp4 import BLOCK
from nvfp4_sgl.formats.rows import Rows

from ..common.integers import next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from .nvfp4 import load_halves
from .rows import check_rows, rows_arguments, store_quantized_row

SINGLE_BLOCK_MAX_ROWS = 511
"""Most rows of a launch whose threads quantise one block each, which has the least latency. More rows fill the device,
and then a thread quantises two.

Two blocks take 0.9 of the time of one for 8192 rows (``launch/results/tunings_h200.md``)."""


@triton.jit
def _quantize_kernel(x, x_row, x_group, out, blocks, BLOCKS: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    first, last = load_halves(x + row * x_row + group * x_group, blocks * 16, BLOCKS)
    store_quantized_row(first, last, out, row, group, blocks, BLOCKS)


def quantize(x: Tensor, out: Rows) -> None:
    """Quantise rows to NVFP4, each row (or each group of a row) with a scale of its own.

    Args:
        x: bf16 or fp32 [T, K] or [T, G, K], the last dimension contiguous, K a multiple of 64.
        out: rows of the shape of ``x``; written. Block scales of the padding are left as they are.

    Rounding: as in :mod:`.nvfp4`, bit-equal to ``nvfp4_sgl.formats.nvfp4.quantize_rows``.

    Raises:
        OperandTypeError: a dtype is not one of those above, or not that of ``Rows``.
        OperandValueError: a shape, stride, alignment or device does not fit.

    Floor: 2·T·K bytes read (bf16), T·K/2 + T·K/16 written.
    Source: specification §9.2, §9.3.
    """
    _check(x, out)
    k = x.shape[-1]
    rows, groups = x.shape[0], x.shape[1] if x.dim() == 3 else 1
    if rows and groups:
        blocks = next_power_of_2(k // BLOCK)
        _quantize_kernel[(rows, groups)](
            x,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            rows_arguments(out),
            k // BLOCK,
            BLOCKS=blocks,
            num_warps=row_warps(blocks, rows * groups),
            **OVERLAPPED,
        )


def row_warps(blocks: int, rows: int) -> int:
    """Warps of a program that quantises a row of ``blocks`` blocks, in a launch of ``rows`` rows."""
    each = 1 if rows <= SINGLE_BLOCK_MAX_ROWS else 2
    return max(1, min(16, blocks // (32 * each)))


@checks.once
def _check(x: Tensor, out: Rows) -> None:
    """Refuse what :func:`quantize` cannot read or write; metadata only."""
    checks.require_dtype("x", x, torch.bfloat16, torch.float32)
    if x.dim() not in (2, 3):
        raise OperandValueError(f"x: expected shape [T, K] or [T, G, K], found {tuple(x.shape)}")
    checks.require_rows("x", x)
    check_rows("out", out, x.shape[:-1], x.shape[-1], x)
