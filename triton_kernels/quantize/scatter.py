"""Quantisation of activations to NVFP4 right into the rows of their experts, each token once.

The recipe is that of :mod:`.nvfp4`, bit for bit. Supports bf16 and fp32 rows without groups, K a multiple of 64, small
enough that a program holds a row in registers. Destinations are data on the device and are not checked.

Floor: 2·S·K bytes read (bf16), S·k·(K/2 + K/16) written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks
from nvfp4_sgl.formats.nvfp4 import BLOCK
from nvfp4_sgl.formats.rows import Rows

from ..common.integers import next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from .nvfp4 import load_halves, quantize_row
from .quantize import row_warps
from .rows import check_rows, rows_arguments, store_codes_and_scales


@triton.jit
def _quantize_scattered_kernel(x, x_row, destination, out, blocks, COPIES: tl.constexpr, BLOCKS: tl.constexpr):
    after_previous()
    source = tl.program_id(0).to(tl.int64)
    first, last = load_halves(x + source * x_row, blocks * 16, BLOCKS)
    words, scale, g = quantize_row(first, last, BLOCKS)
    for copy in range(COPIES):
        row = tl.load(destination + source * COPIES + copy).to(tl.int64)
        if row >= 0:
            tl.store(out.scale + row, g)
            store_codes_and_scales(words, scale, out, row, 0, blocks, BLOCKS)


def quantize_scattered(x: Tensor, destination: Tensor, out: Rows) -> None:
    """Quantise each row once and store it in several rows of the output: each token in the rows of its experts.

    Args:
        x: bf16 or fp32 [S, K], the last dimension contiguous, K a multiple of 64.
        destination: int32 [S, k], contiguous: the rows of ``out`` that each row of ``x`` is stored to, as in
            ``permutation.Routes``; −1 for none. All others must be different rows of ``out``, which is not checked.
        out: [T, K], written. Rows that are no destination are left as they are.

    Rounding: bit-equal to :func:`quantize` of the gathered rows.

    Raises:
        OperandTypeError: a dtype is not one of those above, or not that of ``Rows``.
        OperandValueError: a shape, stride, alignment or device does not fit.

    Floor: 2·S·K bytes read (bf16), S·k·(K/2 + K/16) written. An H200 reaches 38 % of it for 8192 tokens to 6 rows each.
    Source: specification §6.3, §9.3.
    """
    _check(x, destination, out)
    sources, k = x.shape
    if sources and destination.shape[1]:
        blocks = next_power_of_2(k // BLOCK)
        _quantize_scattered_kernel[(sources,)](
            x,
            x.stride(0),
            destination,
            rows_arguments(out),
            k // BLOCK,
            COPIES=destination.shape[1],
            BLOCKS=blocks,
            num_warps=row_warps(blocks, sources),
            **OVERLAPPED,
        )


@checks.once
def _check(x: Tensor, destination: Tensor, out: Rows) -> None:
    """Refuse what :func:`quantize_scattered` cannot read or write; metadata only."""
    checks.require_dtype("x", x, torch.bfloat16, torch.float32)
    checks.require_dimensions("x", x, 2, "[S, K]")
    checks.require_rows("x", x)
    sources, k = x.shape
    checks.require_dimensions("destination", destination, 2, "[S, k]")
    checks.require_shape("destination", destination, (sources, destination.shape[1]), "[S, k]")
    checks.require_dtype("destination", destination, torch.int32)
    checks.require_contiguous("destination", destination)
    checks.require_same_device("x", x, destination=destination)
    check_rows("out", out, (out.codes.shape[0],), k, x)
