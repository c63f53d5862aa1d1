"""Activations rounded to NVFP4 or MXFP8 and kept as bf16, for tensor cores that multiply neither (Hopper's).

A product of an E2M1 code and an E4M3 block scale has at most 6 significant bits, and an E4M3 code times a power of two
has 4: bf16 holds both exactly. So a bf16 GEMM on rounded rows multiplies what SM100's tensor cores multiply.

* :func:`round_to_nvfp4` writes code times block scale, and the fp32 row scales apart; :func:`scale_rows` multiplies the
  rows of the GEMM's fp32 result by them.
* :func:`round_to_mxfp8` writes whole values: MXFP8 has no row scale.

The recipes are those of :mod:`.nvfp4` and :mod:`.mxfp8`, by the same device functions: any values, NaN and infinities
included, and no result but :func:`scale_rows`'s can be anything but finite. Supports bf16 and fp32 rows, or several
groups a row; K a multiple of 64 (NVFP4) or 32 (MXFP8), small enough that a program holds a row in registers.

Floors: 4·T·K bytes moved where rows are rounded; :func:`scale_rows` reads and writes the result once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats import checks, mxfp8, nvfp4
from nvfp4_sgl.limits import NVFP4_K_MULTIPLE

from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import decode_e2m1, decode_e4m3, round_for
from .mxfp8 import WARP_ELEMENTS, quantize_mxfp8_blocks
from .nvfp4 import load_halves, quantize_row, store_halves

WARP_BLOCKS = 32
"""NVFP4 blocks of a row that a warp rounds, one a thread."""
SCALED_COLUMNS = 1024
"""Columns that a program of :func:`scale_rows` multiplies at most."""


@triton.jit
def _half(words, scale):
    """Decode words [BLOCKS] of eight codes times the fp32 block scales [BLOCKS]: bf16 [BLOCKS, 8], exactly."""
    code = (words[:, None] >> (tl.arange(0, 8) * 4)[None, :]) & 15
    return (decode_e2m1(code) * scale[:, None]).to(tl.bfloat16)


@triton.jit
def decoded_halves(words, scale):
    """Decode what ``quantize_blocks`` returns: the two tiles of code times block scale, bf16 [BLOCKS, 8], exactly."""
    first, last = tl.split(words)
    values = decode_e4m3(scale)
    return _half(first, values), _half(last, values)


@triton.jit
def _round_to_nvfp4(x, x_row, x_group, out, scale, blocks, BLOCKS: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    first, last = load_halves(x + row * x_row + group * x_group, blocks * 16, BLOCKS)
    words, block_scale, row_scale = quantize_row(first, last, BLOCKS)
    number = row * tl.num_programs(1) + group
    tl.store(scale + number, row_scale)
    first_values, last_values = decoded_halves(words, block_scale)
    store_halves(out + number * blocks * 16, first_values, last_values, blocks * 16, BLOCKS)


def round_to_nvfp4(x: Tensor, out: Tensor, scale: Tensor) -> Tensor:
    """Round rows, or groups of rows, to NVFP4, each with a row scale of its own.

    Args:
        x: bf16 or fp32 [T, K] or [T, G, K], the last dimension contiguous, K a multiple of 64.
        out: bf16, shape of ``x``, contiguous; written: code times block scale, without the row scale.
        scale: fp32 [T] or [T, G], contiguous; written: the row scales.

    Returns:
        ``out``.

    Rounding: ``out`` and ``scale`` equal ``unscaled()`` and ``global_scale`` of
    ``nvfp4_sgl.formats.nvfp4.quantize_rows`` bit for bit.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit.

    Floor: 2·T·K bytes read (bf16) and as many written.
    Source: specification §9.3.
    """
    rows, groups, k = _check("round_to_nvfp4", x, out, NVFP4_K_MULTIPLE, scale)
    if rows and groups:
        blocks = next_power_of_2(k // nvfp4.BLOCK)
        _round_to_nvfp4[(rows, groups)](
            x,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            out,
            scale,
            k // nvfp4.BLOCK,
            BLOCKS=blocks,
            num_warps=max(1, min(16, blocks // WARP_BLOCKS)),
            **OVERLAPPED,
        )
    return out


@triton.jit
def _power_of_two(byte):
    """Decode int32 UE8M0 bytes, 0..254, to fp32 2^(byte - 127); that of 0 is subnormal."""
    return tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_mxfp8(x, x_row, x_group, out, blocks, BLOCKS: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCKS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = column < blocks * 32
    values = tl.load(x + row * x_row + group * x_group + column, mask=inside, other=0.0).to(tl.float32)
    codes, scale = quantize_mxfp8_blocks(values)
    code = codes.to(tl.int32)
    sign = (code & 128) << 24
    magnitude = (decode_e4m3(code & 127) * _power_of_two(scale)[:, None]).to(tl.int32, bitcast=True)
    rounded = (magnitude | sign).to(tl.float32, bitcast=True).to(tl.bfloat16)
    number = row * tl.num_programs(1) + group
    tl.store(out + number * blocks * 32 + column, rounded, mask=inside)


def round_to_mxfp8(x: Tensor, out: Tensor) -> Tensor:
    """Round rows, or groups of rows, to MXFP8.

    Args:
        x: bf16 or fp32 [T, K] or [T, G, K], the last dimension contiguous, K a multiple of 32.
        out: bf16, shape of ``x``, contiguous; written: code times block scale.

    Returns:
        ``out``.

    Rounding: ``out`` equals ``dequantize()`` of ``nvfp4_sgl.formats.mxfp8.quantize_rows`` bit for bit, where that is at
    least 2^-133 or 0; all values of bf16 rows are. Smaller ones, of fp32 rows, are rounded to bf16.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit.

    Floor: 2·T·K bytes read (bf16) and as many written.
    """
    rows, groups, k = _check("round_to_mxfp8", x, out, mxfp8.BLOCK)
    if rows and groups:
        blocks = next_power_of_2(k // mxfp8.BLOCK)
        _round_to_mxfp8[(rows, groups)](
            x,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            out,
            k // mxfp8.BLOCK,
            BLOCKS=blocks,
            num_warps=max(1, min(8, blocks * mxfp8.BLOCK // WARP_ELEMENTS)),
            **OVERLAPPED,
        )
    return out


@checks.once
def _check(op: str, x: Tensor, out: Tensor, multiple: int, scale: Tensor | None = None) -> tuple[int, int, int]:
    """Check rows, where they are rounded to and where their scales go; the rows, the groups of each and K."""
    checks.require_dtype(f"{op}: x", x, torch.bfloat16, torch.float32)
    if x.dim() not in (2, 3):
        raise OperandValueError(f"{op}: x: expected shape [T, K] or [T, G, K], found {tuple(x.shape)}")
    checks.require_rows(f"{op}: x", x)
    checks.require_multiple(f"{op}: x", "K", x.shape[-1], multiple, "whole blocks")
    checks.require_dtype(f"{op}: out", out, torch.bfloat16)
    checks.require_shape(f"{op}: out", out, x.shape)
    checks.require_contiguous(f"{op}: out", out)
    checks.require_same_device("x", x, **{f"{op}: out": out, f"{op}: scale": scale})
    if scale is not None:
        checks.require_dtype(f"{op}: scale", scale, torch.float32)
        checks.require_shape(f"{op}: scale", scale, x.shape[:-1], "[T] or [T, G]")
        checks.require_contiguous(f"{op}: scale", scale)
    return x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.shape[-1]


@triton.jit
def _scale_rows(x, scale, out, width, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    values = tl.load(x + at, mask=inside, other=0.0) * tl.load(scale + row)
    tl.store(out + at, round_for(values, out), mask=inside)


def scale_rows(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Multiply each row, or each group of a row, by its scale.

    Args:
        x: fp32 [T, F] or [T, G, F], contiguous.
        scale: fp32 [T] or [T, G], contiguous.
        out: bf16 or fp32, shape of ``x``, contiguous; written. May be ``x``.

    Returns:
        ``out``.

    Rounding: the fp32 product, then one rounding to the dtype of ``out``.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit.

    Floor: ``x`` read and ``out`` written once.
    """
    _check_scaled(x, scale, out)
    rows, width = scale.numel(), x.shape[-1]
    if rows and width:
        block = min(next_power_of_2(width), SCALED_COLUMNS)
        _scale_rows[(rows, cdiv(width, block))](x, scale, out, width, BLOCK=block, num_warps=4, **OVERLAPPED)
    return out


@checks.once
def _check_scaled(x: Tensor, scale: Tensor, out: Tensor) -> None:
    """Refuse what :func:`scale_rows` cannot read or write; metadata only."""
    op = "scale_rows"
    checks.require_dtype(f"{op}: x", x, torch.float32)
    if x.dim() not in (2, 3):
        raise OperandValueError(f"{op}: x: expected shape [T, F] or [T, G, F], found {tuple(x.shape)}")
    checks.require_contiguous(f"{op}: x", x)
    checks.require_dtype(f"{op}: scale", scale, torch.float32)
    checks.require_shape(f"{op}: scale", scale, x.shape[:-1], "[T] or [T, G]")
    checks.require_contiguous(f"{op}: scale", scale)
    checks.require_dtype(f"{op}: out", out, torch.bfloat16, torch.float32)
    checks.require_shape(f"{op}: out", out, x.shape)
    checks.require_contiguous(f"{op}: out", out)
    checks.require_same_device("x", x, **{f"{op}: scale": scale, f"{op}: out": out})
