"""Quantisation of one row to NVFP4: the device functions that every kernel writing NVFP4 goes through.

Recipe (``nvfp4_sgl.numerics.nvfp4.quantize_rows``; DEEPSEEK_V4.md §9.2), all in fp32, each line one rounding to nearest
even, so that nothing can be fused; equal bit for bit::

    x    = NaN → +0, then clamp to ±(largest finite bf16)
    g    = max(max|x| over the row, 2^-100) * fp32(1/2688)        or a constant
    r    = 1 / g
    s    = e4m3((amax of 16 * r) * fp32(1/6)),  saturating at 448
    inv  = 1 / (s * g)
    code = e2m1(x * inv), saturating;  0 in a block with s = 0

A row is held as two tiles fp32 [blocks, 8], its even and its odd elements, which share bytes of codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import BF16_MAX_BITS, decode_e4m3, encode_e2m1_pair, encode_e4m3, finite

BLOCK = 16
ATOM_ROWS = 128
ATOM_BLOCKS = 4
TOKEN_TILES = (8, 16, 32, 64, 128, 256)
"""Token tiles of the block-scaled products."""

AMAX_FLOOR = tl.constexpr(2.0**-100)
INVERSE_FULL_SCALE = tl.constexpr(1.0 / 2688.0)
INVERSE_E2M1_MAX = tl.constexpr(1.0 / 6.0)


def layout_tile(token_tile: int) -> int:
    """Rows that share a row of atoms. A tile narrower than an atom has atoms of its own."""
    return min(token_tile, ATOM_ROWS)


def block_scale_bytes(rows: int, k: int, token_tile: int = ATOM_ROWS) -> int:
    """Size of the block scales of a matrix [rows, k], k a multiple of 64, for a product of that token tile."""
    return -(-rows // layout_tile(token_tile)) * ATOM_ROWS * (k // BLOCK)


@triton.jit
def block_scale_offset(row, block, matrix_blocks, TILE: tl.constexpr):
    """Byte of a block's scale in a matrix of ``matrix_blocks`` columns, a multiple of 4; row int64.

    Atoms of 128 rows by 4 blocks, 512 bytes, in row-major order; row r, block b of an atom at
    ``r % 32 * 16 + r // 32 * 4 + b``. TILE rows to each row of atoms.
    """
    atom = row // TILE * (matrix_blocks // 4) + block // 4
    within = row % TILE
    return atom * 512 + within % 32 * 16 + within // 32 * 4 + block % 4


@triton.jit
def split_pairs(row, BLOCKS: tl.constexpr):
    """[BLOCKS·16] → its even and its odd elements, [BLOCKS, 8] each."""
    return tl.split(tl.reshape(row, (BLOCKS, 8, 2)))


@triton.jit
def block_maxima(even, odd):
    """Largest magnitude of each block as the bits of fp32, int32 [blocks]. In this order NaN is above infinity."""
    even_bits = even.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    odd_bits = odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.maximum(even_bits, odd_bits), axis=1)


@triton.jit
def quantize_blocks(even, odd, amax, g, BLOCKS: tl.constexpr):
    """Codes and scales of blocks, given their maxima and the row's scale.

    even, odd: fp32 [BLOCKS, 8], without NaN and infinity. amax: fp32 [BLOCKS]. g: fp32, one value.
    Returns int32 [BLOCKS, 2], eight codes each, and int32 [BLOCKS], E4M3 codes of the scales.
    """
    scale = encode_e4m3((amax * tl.div_rn(1.0, g)) * INVERSE_E2M1_MAX)
    step = tl.where(scale == 0, 1.0, decode_e4m3(scale) * g)
    inverse = tl.div_rn(1.0, step)[:, None]
    pairs = encode_e2m1_pair(even * inverse, odd * inverse)
    words = tl.reshape(pairs << (tl.arange(0, 8) % 4 * 8)[None, :], (BLOCKS, 2, 4))
    return tl.where((scale == 0)[:, None], 0, tl.sum(words, axis=2)), scale


@triton.jit
def store_quantized_row(
    even,
    odd,
    constant,
    codes_ptr,
    block_scales_ptr,
    row_scale_ptr,
    row,
    first_block,
    blocks,
    matrix_blocks,
    CONSTANT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Quantise a row, or a group of it, and store codes, block scales and row scale.

    even, odd: fp32 [BLOCKS, 8], anything; 0 beyond ``blocks``. constant: the row scale if CONSTANT, which is then not
    stored. codes_ptr (uint8, a multiple of 4) and row_scale_ptr: of this row. block_scales_ptr: of the whole matrix of
    ``matrix_blocks`` columns, in which this is ``row`` (int64) from column ``first_block`` on.
    """
    maxima = block_maxima(even, odd)
    row_maximum = tl.max(maxima, axis=0)
    if row_maximum > BF16_MAX_BITS:  # almost never: a NaN, an infinity or more than bf16 holds
        even, odd = finite(even), finite(odd)
        maxima = block_maxima(even, odd)
        row_maximum = tl.max(maxima, axis=0)
    if CONSTANT:
        g = constant
    else:
        g = tl.maximum(row_maximum.to(tl.float32, bitcast=True), AMAX_FLOOR) * INVERSE_FULL_SCALE
        tl.store(row_scale_ptr, g)
    words, scale = quantize_blocks(even, odd, maxima.to(tl.float32, bitcast=True), g, BLOCKS)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    word = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word, words, mask=inside[:, None])
    offset = block_scale_offset(row, first_block + block, matrix_blocks, TILE)
    tl.store(block_scales_ptr + offset, scale.to(tl.uint8), mask=inside)
