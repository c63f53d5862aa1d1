"""Quantisation of one row to NVFP4: device functions that every kernel which writes NVFP4 calls.

The recipe is that of ``nvfp4_sgl.formats.nvfp4.quantize_rows`` (specification §9.2), bit for bit. All of it is fp32,
and each operation rounds once to nearest even, so that nothing can be fused::

    x    = NaN → +0, then clamp to ±(largest finite bf16)
    g    = max(max|x| over the row, 2^-100) * fp32(1/2688)
    r    = 1 / g
    s    = e4m3((amax of 16 * r) * fp32(1/6)),  saturating at 448
    inv  = 1 / (s * g)
    code = e2m1(x * inv), saturating;  0 in a block with s = 0

A row is held as two tiles [blocks, 8], the first and the last eight elements of each block. One load takes eight bf16,
and as both tiles have the same layout a whole block lies in one thread, which computes the block's maximum, its scale
and its two words of codes alone.

Supports rows of a multiple of 16 elements that one program holds in registers; any values, NaN and infinities included.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.rounding import BF16_MAX_BITS, decode_e4m3, encode_e2m1_word, encode_e4m3, finite, reciprocal

AMAX_FLOOR = tl.constexpr(2.0**-100)
"""Least maximum of a row that its scale is computed from."""
INVERSE_FULL_SCALE = tl.constexpr(1.0 / 2688.0)
"""1 / (6 * 448): over the largest E2M1 code times the largest E4M3 block scale."""
INVERSE_E2M1_MAX = tl.constexpr(1.0 / 6.0)
"""1 over the largest E2M1 code."""


@triton.jit
def _columns(BLOCKS: tl.constexpr):
    """int32 [BLOCKS, 8]: the columns of the first tile's elements; those of the last tile are eight higher."""
    return tl.arange(0, BLOCKS)[:, None] * 16 + tl.arange(0, 8)[None, :]


@triton.jit
def load_halves(row_ptr, k, BLOCKS: tl.constexpr, CACHE: tl.constexpr = ""):
    """Load the row of ``k`` elements at ``row_ptr`` as two fp32 tiles, 0 beyond. CACHE: cache modifier of the loads."""
    column = _columns(BLOCKS)
    first = tl.load(row_ptr + column, mask=column < k, other=0.0, cache_modifier=CACHE)
    last = tl.load(row_ptr + 8 + column, mask=column + 8 < k, other=0.0, cache_modifier=CACHE)
    return first.to(tl.float32), last.to(tl.float32)


@triton.jit
def store_halves(row_ptr, first, last, k, BLOCKS: tl.constexpr):
    """Store two tiles, in the dtype of the memory, as the row of ``k`` elements at ``row_ptr``."""
    column = _columns(BLOCKS)
    tl.store(row_ptr + column, first, mask=column < k)
    tl.store(row_ptr + 8 + column, last, mask=column + 8 < k)


@triton.jit
def halves(values, BLOCKS: tl.constexpr):
    """Split values in registers, of any shape of 16·BLOCKS elements in row-major order, into the two tiles."""
    return tl.split(tl.permute(tl.reshape(values, (BLOCKS, 2, 8)), (0, 2, 1)))


@triton.jit
def split_pairs(half, BLOCKS: tl.constexpr):
    """Split a tile [BLOCKS, 8] into its even and its odd columns, [BLOCKS, 4] each."""
    return tl.split(tl.reshape(half, (BLOCKS, 4, 2)))


@triton.jit
def _larger(a, b):
    """Elementwise maximum; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_maxima(first, last, BLOCKS: tl.constexpr):
    """The largest magnitude of each block, fp32 [BLOCKS]; NaN if the block has one."""
    a, b = split_pairs(_larger(tl.abs(first), tl.abs(last)), BLOCKS)
    a, b = tl.split(tl.reshape(_larger(a, b), (BLOCKS, 2, 2)))
    a, b = tl.split(_larger(a, b))
    return _larger(a, b)


@triton.jit
def _words(half, inverse, BLOCKS: tl.constexpr):
    """Encode a tile times the inverse of its blocks' steps: int32 [BLOCKS], eight codes a word."""
    even, odd = split_pairs(half * inverse[:, None], BLOCKS)
    x04, x26 = tl.split(tl.reshape(even, (BLOCKS, 2, 2)))
    x15, x37 = tl.split(tl.reshape(odd, (BLOCKS, 2, 2)))
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return encode_e2m1_word(x0, x1, x2, x3, x4, x5, x6, x7)


@triton.jit
def quantize_blocks(first, last, amax, g, BLOCKS: tl.constexpr):
    """Quantise blocks, given their maxima and the row scale.

    first, last: fp32 [BLOCKS, 8], finite. amax: fp32 [BLOCKS]. g: the row scale, one fp32 value.
    Returns the codes, int32 [BLOCKS, 2] of eight codes each, and the block scales' E4M3 codes, int32 [BLOCKS].
    """
    scale = encode_e4m3((amax * reciprocal(g)) * INVERSE_E2M1_MAX)
    step = tl.where(scale == 0, 1.0, decode_e4m3(scale) * g)
    inverse = reciprocal(step)
    words = tl.join(_words(first, inverse, BLOCKS), _words(last, inverse, BLOCKS))
    return tl.where((scale == 0)[:, None], 0, words), scale


@triton.jit
def row_scale(maximum):
    """The fp32 row scales of rows with these largest magnitudes."""
    return tl.maximum(maximum, AMAX_FLOOR) * INVERSE_FULL_SCALE


@triton.jit
def quantize_row(first, last, BLOCKS: tl.constexpr):
    """Quantise a row, or one group of it that has a scale of its own.

    first, last: fp32 [BLOCKS, 8], any values; 0 beyond the row.
    Returns codes and block scales as :func:`quantize_blocks` does, and the row scale.
    """
    maxima = block_maxima(first, last, BLOCKS)
    # Compared as integers: in the order of bits NaN is above infinity, so one comparison finds both.
    row_maximum = tl.max(maxima.to(tl.int32, bitcast=True), axis=0)
    if row_maximum > BF16_MAX_BITS:  # almost never: a NaN, an infinity or more than bf16 holds
        first, last = finite(first), finite(last)
        maxima = block_maxima(first, last, BLOCKS)
        row_maximum = tl.max(maxima.to(tl.int32, bitcast=True), axis=0)
    g = row_scale(row_maximum.to(tl.float32, bitcast=True))
    words, scale = quantize_blocks(first, last, maxima, g, BLOCKS)
    return words, scale, g
