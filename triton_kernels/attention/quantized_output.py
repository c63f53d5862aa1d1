"""The output of attention in NVFP4, where the GEMM after it (o_a, grouped) takes its activations so.

A group's heads are one row of that GEMM and share a row scale; the heads of a program are whole groups
(``tiling.fuses_quantization``). Values are rounded to bf16 first: the rows are those of the bf16 output, bit for bit
(``quantize.nvfp4``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.rounding import finite, round_to_bf16
from ..quantize.nvfp4 import block_maxima, halves, quantize_blocks, row_scale
from ..quantize.rows import block_scale_offset

HEAD_BLOCKS = tl.constexpr(512 // 16)
"""Blocks of a head's output."""


@triton.jit
def rounded(values):
    """fp32 → the bf16 that is quantised: nearest; NaN is 0, and nothing is infinite."""
    return finite(round_to_bf16(values)).to(tl.bfloat16)


@triton.jit
def head_maxima(values):
    """bf16 [HEADS, n] → fp32 [HEADS]: largest magnitudes."""
    return tl.max(tl.abs(values.to(tl.float32)), axis=1)


@triton.jit
def group_scales(maxima, GROUP: tl.constexpr):
    """fp32 [HEADS]: of each head the row scale of its group, from the heads' maxima."""
    HEADS: tl.constexpr = maxima.shape[0]
    largest = tl.max(tl.reshape(maxima, (HEADS // GROUP, GROUP)), axis=1)
    return tl.reshape(tl.broadcast_to(row_scale(largest)[:, None], (HEADS // GROUP, GROUP)), (HEADS,))


@triton.jit
def store_group_scales(scales, rows, token, first, heads, GROUP: tl.constexpr):
    """Store what :func:`group_scales` gave for the heads from ``first`` on."""
    HEADS: tl.constexpr = scales.shape[0]
    head = first + tl.arange(0, HEADS)
    tl.store(rows.scale + token * rows.groups + head // GROUP, scales, mask=(head < heads) & (head % GROUP == 0))


@triton.jit
def store_quantized(values, scales, rows, token, first, heads, begin, GROUP: tl.constexpr):
    """Quantise and store columns from ``begin``, a multiple of 16, of the heads from ``first`` on.

    values: bf16 [HEADS, n], what :func:`rounded` gave. scales: of :func:`group_scales`. rows:
    ``quantize.rows.RowsArguments``. token: int64.
    """
    HEADS: tl.constexpr = values.shape[0]
    EACH: tl.constexpr = values.shape[1] // 16
    BLOCKS: tl.constexpr = HEADS * EACH
    low, high = halves(values, BLOCKS)
    low, high = low.to(tl.float32), high.to(tl.float32)
    g = tl.reshape(tl.broadcast_to(scales[:, None], (HEADS, EACH)), (BLOCKS,))
    words, scale = quantize_blocks(low, high, block_maxima(low, high, BLOCKS), g, BLOCKS)
    block = tl.arange(0, BLOCKS)
    head = first + block // EACH
    known = head < heads
    group, within = head // GROUP, head % GROUP * HEAD_BLOCKS + begin // 16 + block % EACH
    codes = rows.codes + token * rows.codes_row + group.to(tl.int64) * rows.codes_group + within * 8
    word = codes.to(tl.pointer_type(tl.int32), bitcast=True)[:, None] + tl.arange(0, 2)[None, :]
    tl.store(word, words, mask=known[:, None])
    column = group * (GROUP * HEAD_BLOCKS) + within
    offset = block_scale_offset(token, column, rows.groups * (GROUP * HEAD_BLOCKS), rows.TILE)
    tl.store(rows.block_scales + offset, scale.to(tl.uint8), mask=known)


@triton.jit
def store_whole(low, mid, high, tail, rows, token, first, heads, GROUP: tl.constexpr):
    """Quantise and store whole heads from ``first`` on, fp32 [HEADS, ...] in four pieces of their 512 columns."""
    low, mid, high, tail = rounded(low), rounded(mid), rounded(high), rounded(tail)
    maxima = tl.maximum(head_maxima(low), head_maxima(mid))
    maxima = tl.maximum(maxima, tl.maximum(head_maxima(high), head_maxima(tail)))
    scales = group_scales(maxima, GROUP)
    store_group_scales(scales, rows, token, first, heads, GROUP)
    store_quantized(low, scales, rows, token, first, heads, 0, GROUP)
    store_quantized(mid, scales, rows, token, first, heads, 256, GROUP)
    store_quantized(high, scales, rows, token, first, heads, 384, GROUP)
    store_quantized(tail, scales, rows, token, first, heads, 448, GROUP)
