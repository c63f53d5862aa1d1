"""Quantise the output of attention to NVFP4, where the next GEMM (o_a, grouped) takes NVFP4 activations.

A group's heads are one row of that GEMM and share a row scale; the heads of a program are whole groups
(``tiling.fuses_quantization``). Values are rounded to bf16 first, so the rows are those of the quantised bf16 output,
bit for bit (``quantize.nvfp4``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.rounding import finite, round_to_bf16
from ..quantize.nvfp4 import block_maxima, halves, quantize_blocks, row_scale
from ..quantize.rows import block_scale_offset

BLOCKS_PER_HEAD = tl.constexpr(512 // 16)
"""Blocks of 16 values in a head's output."""


@triton.jit
def rounded(values):
    """Round fp32 to the bf16 that is quantised: nearest even; NaN gives 0, infinities the largest finite value."""
    return finite(round_to_bf16(values)).to(tl.bfloat16)


@triton.jit
def head_maxima(values):
    """Find the largest magnitude of each head: bf16 [HEADS, n] → fp32 [HEADS]."""
    return tl.max(tl.abs(values.to(tl.float32)), axis=1)


@triton.jit
def group_scales(maxima, GROUP: tl.constexpr):
    """Compute each head's row scale, that of its group of GROUP heads, from the heads' maxima: fp32 [HEADS]."""
    HEADS: tl.constexpr = maxima.shape[0]
    largest = tl.max(tl.reshape(maxima, (HEADS // GROUP, GROUP)), axis=1)
    return tl.reshape(tl.broadcast_to(row_scale(largest)[:, None], (HEADS // GROUP, GROUP)), (HEADS,))


@triton.jit
def store_group_scales(scales, rows, token, first_head, heads, GROUP: tl.constexpr):
    """Store the row scales from :func:`group_scales` of the heads from ``first_head`` on, one for each group."""
    HEADS: tl.constexpr = scales.shape[0]
    head = first_head + tl.arange(0, HEADS)
    tl.store(rows.scale + token * rows.groups + head // GROUP, scales, mask=(head < heads) & (head % GROUP == 0))


@triton.jit
def store_quantized(values, scales, rows, token, first_head, heads, begin, GROUP: tl.constexpr):
    """Quantise and store a slice of columns of the heads from ``first_head`` on.

    Args:
        values: bf16 [HEADS, n] from :func:`rounded`.
        scales: fp32 [HEADS] from :func:`group_scales`.
        rows: ``quantize.rows.RowsArguments``.
        token: int64.
        begin: the first column, a multiple of 16.
    """
    HEADS: tl.constexpr = values.shape[0]
    BLOCKS_PER_SLICE: tl.constexpr = values.shape[1] // 16
    BLOCKS: tl.constexpr = HEADS * BLOCKS_PER_SLICE
    low, high = halves(values, BLOCKS)
    low, high = low.to(tl.float32), high.to(tl.float32)
    g = tl.reshape(tl.broadcast_to(scales[:, None], (HEADS, BLOCKS_PER_SLICE)), (BLOCKS,))
    words, scale = quantize_blocks(low, high, block_maxima(low, high, BLOCKS), g, BLOCKS)
    block = tl.arange(0, BLOCKS)
    head = first_head + block // BLOCKS_PER_SLICE
    head_mask = head < heads
    group, within = head // GROUP, head % GROUP * BLOCKS_PER_HEAD + begin // 16 + block % BLOCKS_PER_SLICE
    codes = rows.codes + token * rows.codes_row + group.to(tl.int64) * rows.codes_group + within * 8
    word = codes.to(tl.pointer_type(tl.int32), bitcast=True)[:, None] + tl.arange(0, 2)[None, :]
    tl.store(word, words, mask=head_mask[:, None])
    column = group * (GROUP * BLOCKS_PER_HEAD) + within
    offset = block_scale_offset(token, column, rows.groups * (GROUP * BLOCKS_PER_HEAD), rows.TILE)
    tl.store(rows.block_scales + offset, scale.to(tl.uint8), mask=head_mask)


@triton.jit
def store_whole(pieces, rows, token, first_head, heads, GROUP: tl.constexpr):
    """Quantise and store whole heads from ``first_head`` on: fp32 [HEADS, ...], their 512 columns in pieces."""
    pieces = [rounded(piece) for piece in pieces]
    LAST: tl.constexpr = len(pieces) - 1
    maxima = head_maxima(pieces[0])
    for piece in tl.static_range(1, LAST - 1):
        maxima = tl.maximum(maxima, head_maxima(pieces[piece]))
    maxima = tl.maximum(maxima, tl.maximum(head_maxima(pieces[LAST - 1]), head_maxima(pieces[LAST])))
    scales = group_scales(maxima, GROUP)
    store_group_scales(scales, rows, token, first_head, heads, GROUP)
    begin = 0
    for piece in tl.static_range(len(pieces)):
        store_quantized(pieces[piece], scales, rows, token, first_head, heads, begin, GROUP)
        begin += pieces[piece].shape[1]
