"""Quantisation of activations to MXFP8 in a launch of its own.

The recipe is that of ``nvfp4_sgl.formats.mxfp8.quantize_rows``, bit for bit. All of it is fp32::

    x    = NaN → +0, then clamp to ±1.875·2^127
    s    = least power of two from 2^-127 on with amax of 32 / s ≤ 448, from the bits of amax
    code = e4m3(x · 1/s);  |x · 1/s| ≤ 448, so that nothing saturates

Supports bf16 and fp32 rows, or several groups a row; K a multiple of 32, small enough that a program holds a row in
registers. Any values, NaN and infinities included.

Floor: 2·T·K bytes read (bf16), T·K + T·K/32 written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats import checks
from nvfp4_sgl.formats.fp8_block import VALUE_MAX
from nvfp4_sgl.formats.mxfp8 import BEYOND_TOP, BLOCK, TOP_EXPONENT
from nvfp4_sgl.formats.rows import MxFp8Rows
from nvfp4_sgl.formats.scale_layout import layout_tile, scale_bytes

from ..common.integers import next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import encode_e4m3_bytes, reciprocal_ue8m0
from .rows import block_scale_offset

CODES_ALIGNMENT = 16
"""Alignment of a row's codes in bytes, which the GEMM asks, too."""
WARP_ELEMENTS = 1024
"""Elements of a row that a warp quantises."""
_VALUE_MAX = tl.constexpr(VALUE_MAX)
_BEYOND_TOP = tl.constexpr(BEYOND_TOP)
_TOP_EXPONENT = tl.constexpr(TOP_EXPONENT)


@triton.jit
def quantize_mxfp8_blocks(values):
    """Quantise fp32 blocks [BLOCKS, 32] of any values: codes, uint8 [BLOCKS, 32], and UE8M0 bytes, int32 [BLOCKS]."""
    values = tl.minimum(tl.maximum(tl.where(values != values, 0.0, values), -_VALUE_MAX), _VALUE_MAX)
    amax = tl.max(tl.abs(values), axis=1)
    scale = tl.maximum(((amax.to(tl.int32, bitcast=True) + _BEYOND_TOP) >> 23) - _TOP_EXPONENT, 0)
    return encode_e4m3_bytes(values * reciprocal_ue8m0(scale)[:, None]), scale


@triton.jit
def _quantize_mxfp8_kernel(
    x, x_row, x_group, codes, codes_row, codes_group, scales, groups, blocks, TILE: tl.constexpr, BLOCKS: tl.constexpr
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = column < blocks * 32
    values = tl.load(x + row * x_row + group * x_group + column, mask=inside, other=0.0).to(tl.float32)
    encoded, scale = quantize_mxfp8_blocks(values)
    tl.store(codes + row * codes_row + group * codes_group + column, encoded, mask=inside)
    # What pads the last atom is written, too: the GEMM multiplies zeros with it.
    whole = (blocks + 3) // 4 * 4
    offset = block_scale_offset(row, group * whole + block, groups * whole, TILE)
    tl.store(scales + offset, scale.to(tl.uint8), mask=block < whole)


def quantize_mxfp8(x: Tensor, out: MxFp8Rows) -> None:
    """Quantise rows, or groups of rows, to MXFP8.

    Args:
        x: bf16 or fp32 [T, K] or [T, G, K], the last dimension contiguous, K a multiple of 32.
        out: rows of the shape of ``x``; written. Block scales of rows that pad a tile are left as they are.

    Rounding: bit-equal to ``nvfp4_sgl.formats.mxfp8.quantize_rows``.

    Raises:
        OperandTypeError: a dtype is not one of those above, or not that of ``MxFp8Rows``.
        OperandValueError: a shape, stride, alignment or device does not fit.
    """
    rows, k, groups = _check(x, out)
    if rows and groups:
        grouped = x.dim() == 3
        # Whole atoms, whose padding is written.
        blocks = max(4, next_power_of_2(k // BLOCK))
        _quantize_mxfp8_kernel[(rows, groups)](
            x,
            x.stride(0),
            x.stride(1) if grouped else 0,
            out.codes.view(torch.uint8),
            out.codes.stride(0),
            out.codes.stride(1) if grouped else 0,
            out.block_scales,
            groups,
            k // BLOCK,
            TILE=layout_tile(out.token_tile),
            BLOCKS=blocks,
            num_warps=max(1, min(8, blocks * BLOCK // WARP_ELEMENTS)),
            **OVERLAPPED,
        )


@checks.once
def _check(x: Tensor, out: MxFp8Rows) -> tuple[int, int, int]:
    """Refuse what :func:`quantize_mxfp8` cannot read or write, metadata only; returns rows, K and groups."""
    checks.require_dtype("x", x, torch.bfloat16, torch.float32)
    if x.dim() not in (2, 3):
        raise OperandValueError(f"x: expected shape [T, K] or [T, G, K], found {tuple(x.shape)}")
    checks.require_rows("x", x)
    rows, k, groups = x.shape[0], x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    checks.require_multiple("x", "K", k, BLOCK, "whole blocks")
    checks.require_dtype("out.codes", out.codes, torch.float8_e4m3fn)
    checks.require_shape("out.codes", out.codes, x.shape)
    checks.require_rows("out.codes", out.codes, CODES_ALIGNMENT)
    checks.require_aligned("out.codes", out.codes, CODES_ALIGNMENT)
    checks.require_dtype("out.block_scales", out.block_scales, torch.uint8)
    expected = (scale_bytes(rows, k, out.token_tile, BLOCK, groups),)
    checks.require_shape("out.block_scales", out.block_scales, expected, f"[bytes for token tile {out.token_tile}]")
    checks.require_contiguous("out.block_scales", out.block_scales)
    checks.require_same_device("x", x, **{"out.codes": out.codes, "out.block_scales": out.block_scales})
    return rows, k, groups
