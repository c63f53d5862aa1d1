"""NVFP4 rows as kernels write them: checks, kernel arguments and stores for ``nvfp4_sgl.formats.rows.Rows``.

Nothing is allocated. Block scales that pad the last atoms are not written: the GEMM multiplies them only into rows of
its output that nobody keeps. The layout is that of ``nvfp4_sgl.formats.scale_layout`` (specification §9.4).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.formats.scale_layout import TOKEN_TILES, layout_tile, scale_bytes
from nvfp4_sgl.limits import NVFP4_K_MULTIPLE

from ..common.constants import constant
from .nvfp4 import quantize_row

CODES_ALIGNMENT = 4
"""Alignment of a row's codes in bytes: eight codes, four bytes, are stored at a time."""


TILE = {tile: constant(layout_tile(tile)) for tile in TOKEN_TILES}
"""The rows that share a row of atoms, by the token tile of :class:`Rows`."""


class RowsArguments(NamedTuple):
    """:class:`Rows` as a kernel takes them; strides are in bytes.

    ``groups`` is 1 for rows without groups. TILE, the rows that share a row of atoms, is a compile-time constant.
    """

    codes: Tensor
    block_scales: Tensor
    scale: Tensor
    groups: int
    codes_row: int
    codes_group: int
    TILE: tl.constexpr


@checks.once
def check_rows(name: str, rows: Rows, leading: tuple[int, ...], k: int, x: Tensor) -> None:
    """Refuse rows that are not [*leading, k] or not on the device of ``x``; from metadata and addresses alone.

    Args:
        name: of the rows, for messages.
        rows: what a kernel is to write.
        leading: (T,), or (T, G) if each of G groups has a scale of its own.
        k: K, a multiple of 64.
        x: the tensor that is quantised.

    Raises:
        OperandTypeError: a dtype is not that of ``Rows``.
        OperandValueError: a shape, stride, alignment or device does not fit.
    """
    checks.require_multiple(name, "K", k, NVFP4_K_MULTIPLE)
    meaning = "[T]" if len(leading) == 1 else "[T, G]"
    codes, scales = f"{name}.codes", f"{name}.block_scales"
    checks.require_dtype(codes, rows.codes, torch.uint8)
    checks.require_shape(codes, rows.codes, (*leading, k // 2), f"{meaning[:-1]}, K/2]")
    checks.require_rows(codes, rows.codes, CODES_ALIGNMENT)
    checks.require_aligned(codes, rows.codes, CODES_ALIGNMENT)
    checks.require_dtype(scales, rows.block_scales, torch.uint8, torch.float8_e4m3fn)
    expected = scale_bytes(leading[0], k * (leading[1] if len(leading) == 2 else 1), rows.token_tile)
    checks.require_shape(scales, rows.block_scales, (expected,), f"[bytes for token tile {rows.token_tile}]")
    checks.require_contiguous(scales, rows.block_scales)
    checks.require_dtype(f"{name}.scale", rows.scale, torch.float32)
    checks.require_shape(f"{name}.scale", rows.scale, leading, meaning)
    checks.require_contiguous(f"{name}.scale", rows.scale)
    checks.require_same_device("x", x, **{codes: rows.codes, scales: rows.block_scales, f"{name}.scale": rows.scale})


def rows_arguments(rows: Rows) -> RowsArguments:
    """``rows`` as a kernel takes them."""
    grouped = rows.codes.dim() == 3
    return RowsArguments(
        codes=rows.codes,
        block_scales=rows.block_scales.view(torch.uint8),
        scale=rows.scale,
        groups=rows.codes.shape[1] if grouped else 1,
        codes_row=rows.codes.stride(0),
        codes_group=rows.codes.stride(1) if grouped else 0,
        TILE=TILE[rows.token_tile],
    )


@triton.jit
def block_scale_offset(row, block, matrix_blocks, TILE: tl.constexpr):
    """The byte offset of a block's scale in a matrix of ``matrix_blocks`` blocks a row, a multiple of 4; row int64.

    Atoms of 128 rows by 4 blocks, 512 bytes, are stored in row-major order; row r, block b of an atom is at
    ``r % 32 * 16 + r // 32 * 4 + b``. Each row of atoms holds TILE rows.
    """
    atom = row // TILE * (matrix_blocks // 4) + block // 4
    within = row % TILE
    return atom * 512 + within % 32 * 16 + within // 32 * 4 + block % 4


@triton.jit
def store_codes_and_scales(words, scale, out, row, group, blocks, BLOCKS: tl.constexpr):
    """Store codes and block scales from :func:`quantize_row`; arguments as those of :func:`store_quantized_row`."""
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    codes = out.codes + row * out.codes_row + group * out.codes_group
    word = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(codes.to(tl.pointer_type(tl.int32), bitcast=True) + word, words, mask=inside[:, None])
    offset = block_scale_offset(row, group * blocks + block, out.groups * blocks, out.TILE)
    tl.store(out.block_scales + offset, scale.to(tl.uint8), mask=inside)


@triton.jit
def store_quantized_row(first, last, out, row, group, blocks, BLOCKS: tl.constexpr):
    """Quantise a row, or a group of it, and store its codes, block scales and row scale.

    first, last: fp32 [BLOCKS, 8], any values; 0 beyond ``blocks``. out: :class:`RowsArguments`. row: int64. group: 0 if
    rows have no groups. blocks: blocks of a row or group, at most BLOCKS.
    """
    words, scale, g = quantize_row(first, last, BLOCKS)
    tl.store(out.scale + row * out.groups + group, g)
    store_codes_and_scales(words, scale, out, row, group, blocks, BLOCKS)
