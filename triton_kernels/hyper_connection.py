"""Manifold-constrained hyper-connections (mHC) around a sublayer: four residual streams (spec section 2).

Between two sublayers three things happen to a token's streams X [4, d]: the sublayer's output h is mixed in (*post*),
24 products with the flattened result give the next site's coefficients, and the streams are collapsed into the next
sublayer's input and normalised (*pre*). :func:`hyper_connection_next` does all of it, in these kernels:

``_mix``          reads X and h, writes the next X, and multiplies it by ``fn`` while it is in registers, along with its
                  sum of squares. Split over tokens, and for few tokens over d, too: the parts are summed later in a
                  fixed order.
``_coefficients`` sigmoids and Sinkhorn of many tokens, a token a lane, all 16 entries in a lane's registers. For few
                  tokens programs of the next kernel do this, every thread the same, beside those of the rows.
``_collapse``     reads the next X again, collapses, normalises and, if wanted, quantises to NVFP4; a row a program.

The products use bf16 tensor cores without loss: X is bf16, and the fp32 ``fn`` is the sum of three bf16.

Floor in bytes: 20·d a token (streams read and written 16·d, h read and x written 4·d), and ``fn``, 384·d, once. What
is above it: ``_collapse`` reads 8·d a token more, from L2 while the tokens' streams fit there (rows are taken last
first, as the end is what L2 still holds), else from memory; and the parts of the products, 128 bytes each. The whole
row must be known before it can be collapsed, and a program that kept it on chip would have too few tokens to share
``fn`` among. On an H200 (2026-11-21, d = 4096) ``hyper_connection_next`` reaches 42 % of the floor at 8192 tokens (378
us), ``hyper_connection_pre`` 37 % (212 us); one token takes 8 us.

Only four streams of bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import target_info

from .checks import (
    OperandValueError,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_same_device,
    require_shape,
)
from .nvfp4 import BLOCK, block_scale_bytes, layout_tile, load_halves, store_halves, store_quantized_row
from .quantize import check_outputs
from .rounding import INTERPRETED, round_for, round_to_bf16

STREAMS = 4
SITE_ROWS = (2 + STREAMS) * STREAMS
"""Rows of ``fn`` at a site: pre, post, comb."""
COLUMNS = tl.constexpr(32)
"""Columns of the products: the rows of ``fn``, the sum of squares, padding."""
MAX_WIDTH = 16384
"""Largest d: ``_collapse`` holds a row in registers."""
FEW_TOKENS = 256
"""Up to here ``_collapse`` computes the coefficients itself: one launch less."""
BLOCK_D = 32
"""Columns of each stream that ``_mix`` takes at a time."""
SMALL_TILE = 16
"""Tokens of one program of ``_mix``, which share a reading of ``fn``, where there are up to twice as many."""
LARGE_TILE, LARGE_TILE_WARPS, LARGE_TILE_STAGES = 64, 4, 3
"""Where there are more. With 128 the compiler spills; with eight warps a multiprocessor holds one program only."""
PROGRAMS = 264
"""What ``_mix`` is split into where possible: two programs for each multiprocessor of an H200."""


@triton.jit
def _products(x, weight):
    """``x @ weight^T`` from bf16 x [T, K] and fp32 weight [N, K], products exact, sums fp32."""
    if not INTERPRETED and not (x.shape[0] >= 64 and target_info.cuda_capability_geq(10, 0)):
        # Keeps the compiler from computing x a second time in the layout that the tensor core wants, which costs
        # more registers than there are. tcgen05, taken from 64 rows on, reads x from shared memory.
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    total = tl.zeros((x.shape[0], weight.shape[0]), tl.float32)
    for _ in tl.static_range(3):
        part = round_to_bf16(weight)
        if INTERPRETED:
            total = tl.dot(x.to(tl.float32), tl.trans(part), total, input_precision="ieee")
        else:
            total = tl.dot(x, tl.trans(part.to(tl.bfloat16)), total)
        weight -= part
    return total


@triton.jit
def _by_column(x0, x1, x2, x3):
    """Four [N, K] as [N, 4 * K], those of a column next to each other."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (x0.shape[0], 4 * x0.shape[1]))


@triton.jit
def _mixed(h, x0, x1, x2, x3, post, c0, c1, c2, c3):
    """``post_k h + sum_j comb[j, k] x_j`` of one stream k, fp32."""
    return post * h.to(tl.float32) + (
        (c0 * x0.to(tl.float32) + c1 * x1.to(tl.float32)) + (c2 * x2.to(tl.float32) + c3 * x3.to(tl.float32))
    )


@triton.jit
def _mix(
    streams,
    output,
    post,
    comb,
    fn,
    next_streams,
    parts,
    tokens,
    d,
    d_per_split,
    POST: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    first = (tl.program_id(0) * BLOCK_T).to(tl.int64)
    split = tl.program_id(1)
    # From here on tokens count from the program's first: offsets within its block fit int32.
    token = tl.arange(0, BLOCK_T)
    here = token < tokens - first
    streams += first * 4 * d
    next_streams += first * 4 * d
    row = tl.arange(0, COLUMNS)
    total = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    if POST:
        output += first * d
        post += first * 4
        comb += first * 16
        p0 = tl.load(post + token * 4, mask=here, other=0.0)[:, None]
        p1 = tl.load(post + token * 4 + 1, mask=here, other=0.0)[:, None]
        p2 = tl.load(post + token * 4 + 2, mask=here, other=0.0)[:, None]
        p3 = tl.load(post + token * 4 + 3, mask=here, other=0.0)[:, None]
        c = comb + token * 16
        c00 = tl.load(c, mask=here, other=0.0)[:, None]
        c01 = tl.load(c + 1, mask=here, other=0.0)[:, None]
        c02 = tl.load(c + 2, mask=here, other=0.0)[:, None]
        c03 = tl.load(c + 3, mask=here, other=0.0)[:, None]
        c10 = tl.load(c + 4, mask=here, other=0.0)[:, None]
        c11 = tl.load(c + 5, mask=here, other=0.0)[:, None]
        c12 = tl.load(c + 6, mask=here, other=0.0)[:, None]
        c13 = tl.load(c + 7, mask=here, other=0.0)[:, None]
        c20 = tl.load(c + 8, mask=here, other=0.0)[:, None]
        c21 = tl.load(c + 9, mask=here, other=0.0)[:, None]
        c22 = tl.load(c + 10, mask=here, other=0.0)[:, None]
        c23 = tl.load(c + 11, mask=here, other=0.0)[:, None]
        c30 = tl.load(c + 12, mask=here, other=0.0)[:, None]
        c31 = tl.load(c + 13, mask=here, other=0.0)[:, None]
        c32 = tl.load(c + 14, mask=here, other=0.0)[:, None]
        c33 = tl.load(c + 15, mask=here, other=0.0)[:, None]
    for start in tl.range(split * d_per_split, min((split + 1) * d_per_split, d), BLOCK_D):
        # The tensor core takes the columns of all streams at a time: each product with it waits for the one before.
        if POST:
            column = start + tl.arange(0, BLOCK_D)
            inside = (column < d) | EVEN
            mask = here[:, None] & inside[None, :]
            at = token[:, None] * (4 * d) + column[None, :]
            x0 = tl.load(streams + at, mask=mask, other=0.0)
            x1 = tl.load(streams + at + d, mask=mask, other=0.0)
            x2 = tl.load(streams + at + 2 * d, mask=mask, other=0.0)
            x3 = tl.load(streams + at + 3 * d, mask=mask, other=0.0)
            h = tl.load(output + token[:, None] * d + column[None, :], mask=mask, other=0.0)
            y0 = round_for(_mixed(h, x0, x1, x2, x3, p0, c00, c10, c20, c30), next_streams)
            y1 = round_for(_mixed(h, x0, x1, x2, x3, p1, c01, c11, c21, c31), next_streams)
            y2 = round_for(_mixed(h, x0, x1, x2, x3, p2, c02, c12, c22, c32), next_streams)
            y3 = round_for(_mixed(h, x0, x1, x2, x3, p3, c03, c13, c23, c33), next_streams)
            tl.store(next_streams + at, y0, mask=mask)
            tl.store(next_streams + at + d, y1, mask=mask)
            tl.store(next_streams + at + 2 * d, y2, mask=mask)
            tl.store(next_streams + at + 3 * d, y3, mask=mask)
            x = _by_column(y0, y1, y2, y3)
            at = fn + row[:, None] * (4 * d) + column[None, :]
            w_mask = (row < ROWS)[:, None] & inside[None, :]
            w0 = tl.load(at, mask=w_mask, other=0.0)
            w1 = tl.load(at + d, mask=w_mask, other=0.0)
            w2 = tl.load(at + 2 * d, mask=w_mask, other=0.0)
            w3 = tl.load(at + 3 * d, mask=w_mask, other=0.0)
            weight = _by_column(w0, w1, w2, w3)
        else:
            # A token's streams are one row.
            column = 4 * start + tl.arange(0, 4 * BLOCK_D)
            inside = (column < 4 * d) | EVEN
            at = token[:, None] * (4 * d) + column[None, :]
            x = tl.load(streams + at, mask=here[:, None] & inside[None, :], other=0.0)
            at = row[:, None] * (4 * d) + column[None, :]
            weight = tl.load(fn + at, mask=(row < ROWS)[:, None] & inside[None, :], other=0.0)
        # The tensor core cuts a sum off where fp32 would round it; over thousands of additions that is a drift, so
        # the long sum is not left to it.
        total += _products(x, weight)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
    total = tl.where((row == ROWS)[None, :], squares[:, None], total)
    parts += (split.to(tl.int64) * tokens + first) * COLUMNS
    at = token[:, None] * COLUMNS + row[None, :]
    tl.store(parts + at, total, mask=here[:, None])


@triton.jit
def _reciprocal(x):
    """``1 / x`` of a normal fp32, to its last bit but one: Sinkhorn is a chain of these, and waits for each."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _divided(a, b, c, d, eps):
    """Four numbers over their sum plus ``eps``."""
    inverse = _reciprocal((a + b) + (c + d) + eps)
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def _softmax(a, b, c, d, eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = _divided(tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top), 0.0)
    return a + eps, b + eps, c + eps, d + eps


@triton.jit
def _logits(mix, inverse_rms, scale, base, FIRST: tl.constexpr):
    """Four of a site's logits, ``mix * scale + base`` of the columns from ``FIRST`` on; ``mix``: one row or more."""
    factor = inverse_rms * scale
    return (
        tl.load(mix + FIRST, cache_modifier=".cg") * factor + tl.load(base + FIRST),
        tl.load(mix + (FIRST + 1), cache_modifier=".cg") * factor + tl.load(base + (FIRST + 1)),
        tl.load(mix + (FIRST + 2), cache_modifier=".cg") * factor + tl.load(base + (FIRST + 2)),
        tl.load(mix + (FIRST + 3), cache_modifier=".cg") * factor + tl.load(base + (FIRST + 3)),
    )


@triton.jit
def _pre(mix, inverse_rms, base, scale, hc_eps):
    """What each stream counts in the collapse."""
    a, b, c, d = _logits(mix, inverse_rms, tl.load(scale), base, 0)
    return tl.sigmoid(a) + hc_eps, tl.sigmoid(b) + hc_eps, tl.sigmoid(c) + hc_eps, tl.sigmoid(d) + hc_eps


@triton.jit
def _store_post_and_comb(mix, inverse_rms, base, scale, post, comb, here, hc_eps, ITERATIONS: tl.constexpr):
    """Sigmoids of the output's weights, and Sinkhorn; addresses are those of one token, or vectors of tokens'."""
    a, b, c, d = _logits(mix, inverse_rms, tl.load(scale + 1), base, 4)
    tl.store(post, 2 * tl.sigmoid(a), mask=here)
    tl.store(post + 1, 2 * tl.sigmoid(b), mask=here)
    tl.store(post + 2, 2 * tl.sigmoid(c), mask=here)
    tl.store(post + 3, 2 * tl.sigmoid(d), mask=here)
    factor = tl.load(scale + 2)
    a0, a1, a2, a3 = _logits(mix, inverse_rms, factor, base, 8)
    b0, b1, b2, b3 = _logits(mix, inverse_rms, factor, base, 12)
    c0, c1, c2, c3 = _logits(mix, inverse_rms, factor, base, 16)
    d0, d1, d2, d3 = _logits(mix, inverse_rms, factor, base, 20)
    a0, a1, a2, a3 = _softmax(a0, a1, a2, a3, hc_eps)
    b0, b1, b2, b3 = _softmax(b0, b1, b2, b3, hc_eps)
    c0, c1, c2, c3 = _softmax(c0, c1, c2, c3, hc_eps)
    d0, d1, d2, d3 = _softmax(d0, d1, d2, d3, hc_eps)
    a0, b0, c0, d0 = _divided(a0, b0, c0, d0, hc_eps)
    a1, b1, c1, d1 = _divided(a1, b1, c1, d1, hc_eps)
    a2, b2, c2, d2 = _divided(a2, b2, c2, d2, hc_eps)
    a3, b3, c3, d3 = _divided(a3, b3, c3, d3, hc_eps)
    for _ in range(ITERATIONS - 1):
        a0, a1, a2, a3 = _divided(a0, a1, a2, a3, hc_eps)
        b0, b1, b2, b3 = _divided(b0, b1, b2, b3, hc_eps)
        c0, c1, c2, c3 = _divided(c0, c1, c2, c3, hc_eps)
        d0, d1, d2, d3 = _divided(d0, d1, d2, d3, hc_eps)
        a0, b0, c0, d0 = _divided(a0, b0, c0, d0, hc_eps)
        a1, b1, c1, d1 = _divided(a1, b1, c1, d1, hc_eps)
        a2, b2, c2, d2 = _divided(a2, b2, c2, d2, hc_eps)
        a3, b3, c3, d3 = _divided(a3, b3, c3, d3, hc_eps)
    tl.store(comb, a0, mask=here)
    tl.store(comb + 1, a1, mask=here)
    tl.store(comb + 2, a2, mask=here)
    tl.store(comb + 3, a3, mask=here)
    tl.store(comb + 4, b0, mask=here)
    tl.store(comb + 5, b1, mask=here)
    tl.store(comb + 6, b2, mask=here)
    tl.store(comb + 7, b3, mask=here)
    tl.store(comb + 8, c0, mask=here)
    tl.store(comb + 9, c1, mask=here)
    tl.store(comb + 10, c2, mask=here)
    tl.store(comb + 11, c3, mask=here)
    tl.store(comb + 12, d0, mask=here)
    tl.store(comb + 13, d1, mask=here)
    tl.store(comb + 14, d2, mask=here)
    tl.store(comb + 15, d3, mask=here)


@triton.jit
def _sum_parts(parts, mix, token, tokens, splits, BLOCK_T: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Sum the parts of some tokens' products in a fixed order; leave the sums in ``mix`` for the program to read."""
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
    at = token.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    here = (token < tokens)[:, None]
    part = tl.arange(0, BLOCK_SPLITS)
    for first in range(0, splits, BLOCK_SPLITS):
        mask = here[None, :, :] & (first + part < splits)[:, None, None]
        offset = ((first + part).to(tl.int64) * tokens * COLUMNS)[:, None, None] + at[None, :, :]
        total += tl.sum(tl.load(parts + offset, mask=mask, other=0.0), axis=0)
    tl.store(mix + at, total, mask=here)
    tl.debug_barrier()


@triton.jit
def _coefficients(
    parts, mix, base, scale, pre, post, comb, tokens, splits, mean_of, hc_eps, norm_eps,
    ROWS: tl.constexpr, HEAD: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    _sum_parts(parts, mix, token, tokens, splits, BLOCK_T, 1)
    here = token < tokens
    # Lanes beyond the last token compute what the last one does.
    token = tl.minimum(token, tokens - 1).to(tl.int64)
    mix += token * COLUMNS
    inverse_rms = tl.rsqrt(tl.load(mix + ROWS, cache_modifier=".cg") / mean_of + norm_eps)
    a, b, c, d = _pre(mix, inverse_rms, base, scale, hc_eps)
    tl.store(pre + token * 4, a, mask=here)
    tl.store(pre + token * 4 + 1, b, mask=here)
    tl.store(pre + token * 4 + 2, c, mask=here)
    tl.store(pre + token * 4 + 3, d, mask=here)
    if not HEAD:
        _store_post_and_comb(
            mix, inverse_rms, base, scale, post + token * 4, comb + token * 16, here, hc_eps, ITERATIONS
        )


@triton.jit
def _collapse_row(
    streams, parts, mix, base, scale, pre, weight, out, codes, block_scales, row_scale, constant, row,
    tokens, d, splits, mean_of, hc_eps, norm_eps,
    FEW: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, QUANTIZE: tl.constexpr, CONSTANT: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = row.to(tl.int64)
    BLOCKS: tl.constexpr = BLOCK_D // 16
    at = streams + token * (4 * d)
    # Ahead of the coefficients, so that they are computed while these arrive.
    first0, last0 = load_halves(at, d, BLOCKS)
    first1, last1 = load_halves(at + d, d, BLOCKS)
    first2, last2 = load_halves(at + 2 * d, d, BLOCKS)
    first3, last3 = load_halves(at + 3 * d, d, BLOCKS)
    if FEW:
        _sum_parts(parts, mix, row + tl.arange(0, 1), tokens, splits, 1, BLOCK_SPLITS)
        mix += token * COLUMNS
        mix_rms = tl.rsqrt(tl.load(mix + ROWS, cache_modifier=".cg") / mean_of + norm_eps)
        p0, p1, p2, p3 = _pre(mix, mix_rms, base, scale, hc_eps)
    else:
        pre += token * 4
        p0, p1, p2, p3 = tl.load(pre), tl.load(pre + 1), tl.load(pre + 2), tl.load(pre + 3)
    first = round_to_bf16((p0 * first0 + p1 * first1) + (p2 * first2 + p3 * first3))
    last = round_to_bf16((p0 * last0 + p1 * last1) + (p2 * last2 + p3 * last3))
    if NORM:
        # The row as the sublayer would read it: the statistics are those of the rounded values.
        inverse_rms = tl.rsqrt(tl.sum(tl.sum(first * first + last * last, axis=1), axis=0) / d + norm_eps)
        first_weight, last_weight = load_halves(weight, d, BLOCKS)
        first = round_to_bf16(first * inverse_rms * first_weight)
        last = round_to_bf16(last * inverse_rms * last_weight)
    store_halves(out + token * d, first.to(tl.bfloat16), last.to(tl.bfloat16), d, BLOCKS)
    if QUANTIZE:
        store_quantized_row(
            first, last, constant, codes + token * (d // 2), block_scales, row_scale + token, token, 0, d // 16,
            d // 16, CONSTANT, TILE, BLOCKS,
        )  # fmt: skip


@triton.jit
def _collapse(
    streams, parts, mix, base, scale, pre, post, comb, weight, out, codes, block_scales, row_scale, constant,
    tokens, d, splits, mean_of, hc_eps, norm_eps,
    FEW: tl.constexpr, ROWS: tl.constexpr, ITERATIONS: tl.constexpr, NORM: tl.constexpr,
    QUANTIZE: tl.constexpr, CONSTANT: tl.constexpr, TILE: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tokens - 1 - tl.program_id(0)
    if FEW and tl.program_id(1) == 1:
        # The same sums as the row's other program leaves in ``mix``, bit for bit. Sinkhorn takes as long as all else.
        _sum_parts(parts, mix, row + tl.arange(0, 1), tokens, splits, 1, BLOCK_SPLITS)
        token = row.to(tl.int64)
        sums = mix + token * COLUMNS
        mix_rms = tl.rsqrt(tl.load(sums + ROWS, cache_modifier=".cg") / mean_of + norm_eps)
        _store_post_and_comb(sums, mix_rms, base, scale, post + token * 4, comb + token * 16, None, hc_eps, ITERATIONS)
    else:
        _collapse_row(
            streams, parts, mix, base, scale, pre, weight, out, codes, block_scales, row_scale, constant, row,
            tokens, d, splits, mean_of, hc_eps, norm_eps, FEW, ROWS, NORM, QUANTIZE, CONSTANT, TILE, BLOCK_SPLITS,
            BLOCK_D,
        )  # fmt: skip


@triton.jit
def _post(output, streams, post, comb, out, d, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < d
    at = token * (4 * d) + column
    h = tl.load(output + token * d + column, mask=inside)
    x0 = tl.load(streams + at, mask=inside)
    x1 = tl.load(streams + at + d, mask=inside)
    x2 = tl.load(streams + at + 2 * d, mask=inside)
    x3 = tl.load(streams + at + 3 * d, mask=inside)
    for k in tl.static_range(4):
        c = comb + token * 16 + k
        weight = tl.load(post + token * 4 + k)
        y = _mixed(h, x0, x1, x2, x3, weight, tl.load(c), tl.load(c + 4), tl.load(c + 8), tl.load(c + 12))
        tl.store(out + at + k * d, round_for(y, out), mask=inside)


@dataclass(frozen=True)
class Site:
    """What one mHC site, or the final collapse, computes with.

    Attributes:
        fn: fp32 [24, 4 * d], stream-major columns; rows are pre (4), post (4), comb (16). The final collapse has
            pre alone.
        base: fp32, one for each row of ``fn``.
        scale: fp32 [3], for pre, post and comb; [1] for the final collapse.
        hc_eps: added to ``pre``, to the softmax and to Sinkhorn's sums.
        norm_eps: added to the mean squares, that of all 4 * d values and RMSNorm's.
        norm: bf16 or fp32 [d], the weight of the sublayer's RMSNorm; ``None`` leaves the collapsed row as it is.
        iterations: of Sinkhorn; the final collapse has none.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    hc_eps: float
    norm_eps: float
    norm: Tensor | None = None
    iterations: int = 0

    @property
    def is_head(self) -> bool:
        return self.fn.shape[0] == STREAMS


@dataclass(frozen=True)
class Quantized:
    """``x`` in NVFP4, too, as :func:`quantize.quantize` would write it, bit for bit; d a multiple of 64.

    Attributes:
        codes: uint8 [T, d/2].
        block_scales: uint8 or float8_e4m3fn, :func:`nvfp4.block_scale_bytes` long.
        row_scale: fp32 [T] to be written, or the constant for all rows.
        token_tile: of the product that reads the block scales.
    """

    codes: Tensor
    block_scales: Tensor
    row_scale: Tensor | float
    token_tile: int = 128

    @classmethod
    def allocate(cls, tokens: int, d: int, token_tile: int, device: torch.device | str) -> Quantized:
        """With row scales."""
        return cls(
            torch.empty(tokens, d // 2, dtype=torch.uint8, device=device),
            torch.empty(block_scale_bytes(tokens, d, token_tile), dtype=torch.uint8, device=device),
            torch.empty(tokens, dtype=torch.float32, device=device),
            token_tile,
        )

    def first(self, tokens: int) -> Quantized:
        """The part for the first ``tokens`` tokens."""
        scales = self.block_scales[: block_scale_bytes(tokens, self.codes.shape[1] * 2, self.token_tile)]
        row_scale = self.row_scale if isinstance(self.row_scale, float) else self.row_scale[:tokens]
        return Quantized(self.codes[:tokens], scales, row_scale, self.token_tile)


@dataclass(frozen=True)
class SiteState:
    """What passes from one site to the next, and room to work; larger ones may be used for fewer tokens.

    ``post`` and ``comb`` are of the sublayer under way. Allocate once: nothing here allocates on a step.

    Attributes:
        x: bf16 [T, d], the sublayer's input.
        post: fp32 [T, 4]. comb: fp32 [T, 4, 4].
        workspace: fp32, :func:`workspace_size` of T.
        quantized: where ``x`` goes in NVFP4, if it is wanted so.
    """

    x: Tensor
    post: Tensor
    comb: Tensor
    workspace: Tensor
    quantized: Quantized | None = None

    @classmethod
    def allocate(cls, tokens: int, d: int, device: torch.device | str) -> SiteState:
        """Room for up to ``tokens`` tokens."""
        return cls(
            torch.empty(tokens, d, dtype=torch.bfloat16, device=device),
            torch.empty(tokens, STREAMS, dtype=torch.float32, device=device),
            torch.empty(tokens, STREAMS, STREAMS, dtype=torch.float32, device=device),
            torch.empty(workspace_size(tokens), dtype=torch.float32, device=device),
        )

    def first(self, tokens: int) -> SiteState:
        """The part for the first ``tokens`` tokens."""
        quantized = None if self.quantized is None else self.quantized.first(tokens)
        return SiteState(self.x[:tokens], self.post[:tokens], self.comb[:tokens], self.workspace, quantized)


def _block_t(tokens: int) -> int:
    """Tokens of one program of ``_mix``."""
    return SMALL_TILE if tokens <= 2 * SMALL_TILE else LARGE_TILE


def _splits(tokens: int, d: int) -> tuple[int, int]:
    """Into how many parts ``_mix`` splits d, and how long they are; from sizes alone."""
    steps = triton.cdiv(d, BLOCK_D)
    length = triton.cdiv(steps, max(1, min(steps, PROGRAMS // triton.cdiv(tokens, _block_t(tokens))))) * BLOCK_D
    return triton.cdiv(d, length), length


def workspace_size(tokens: int) -> int:
    """fp32 values of workspace that are enough for up to ``tokens`` tokens of any width."""
    block_t = _block_t(tokens)
    parts = block_t * max(PROGRAMS, triton.cdiv(tokens, block_t))
    return (parts + tokens) * COLUMNS.value + tokens * STREAMS


def _enter(op: str, site: Site, streams: Tensor, state: SiteState, mixed: tuple[Tensor, Tensor] | None) -> None:
    """Pre of a site, after post of the one before if ``mixed`` is given: its output, and where the next streams go."""
    _check_streams(op, streams)
    tokens, _, d = streams.shape
    _check_site(op, site, streams, state)
    codes, block_scales, row_scale, constant, tile = state.x, state.x, state.x, 0.0, 128
    if (quantized := state.quantized) is not None:
        row_scale, constant = check_outputs(
            streams, (tokens,), d, quantized.codes, quantized.block_scales, quantized.row_scale, quantized.token_tile
        )
        require_contiguous(f"{op}: codes", quantized.codes)
        codes, block_scales = quantized.codes, quantized.block_scales.view(torch.uint8)
        tile = layout_tile(quantized.token_tile)
    if tokens == 0:
        return
    splits, d_per_split = _splits(tokens, d)
    block_t = _block_t(tokens)
    parts = state.workspace
    mix = parts[splits * tokens * COLUMNS.value :]
    pre = mix[tokens * COLUMNS.value :]
    rows, head, few, large = site.fn.shape[0], site.is_head, tokens <= FEW_TOKENS, block_t == LARGE_TILE
    output, next_streams = mixed or (None, streams)
    _mix[(triton.cdiv(tokens, block_t), splits)](
        streams, output, state.post, state.comb, site.fn, next_streams, parts, tokens, d, d_per_split,
        POST=mixed is not None, ROWS=rows, EVEN=d % BLOCK_D == 0, BLOCK_T=block_t, BLOCK_D=BLOCK_D,
        num_warps=LARGE_TILE_WARPS if large else 4, num_stages=LARGE_TILE_STAGES if large else 2,
    )  # fmt: skip
    constants = {"ROWS": rows, "ITERATIONS": site.iterations}
    if not few:
        _coefficients[(triton.cdiv(tokens, 32),)](
            parts, mix, site.base, site.scale, pre, state.post, state.comb, tokens, splits, STREAMS * d,
            site.hc_eps, site.norm_eps, HEAD=head, BLOCK_T=32, num_warps=1, **constants,
        )  # fmt: skip
    # Of few tokens, but for the final collapse, a second program a row computes what is passed on.
    _collapse[(tokens, 2 if few and not head else 1)](
        next_streams, parts, mix, site.base, site.scale, pre, state.post, state.comb, site.norm, state.x, codes,
        block_scales, row_scale, constant, tokens, d, splits, STREAMS * d, site.hc_eps, site.norm_eps, FEW=few,
        NORM=site.norm is not None, QUANTIZE=quantized is not None, CONSTANT=constant != 0.0, TILE=tile,
        BLOCK_SPLITS=min(triton.next_power_of_2(splits), 64), BLOCK_D=max(triton.next_power_of_2(d), BLOCK),
        num_warps=8 if d > 2048 else 4, **constants,
    )  # fmt: skip


def hyper_connection_pre(site: Site, streams: Tensor, state: SiteState) -> None:
    """Collapse the streams into a sublayer's input, normalise it, and compute how its output is mixed back.

    Args:
        site: the sublayer's; with a final collapse's, ``state.post`` and ``state.comb`` stay as they are.
        streams: bf16 [T, 4, d], contiguous.
        state: written. ``x``: ``sum_k pre_k x_k``, rounded once, then RMSNorm over the rounded values, rounded once.

    Coefficients are fp32: ``post`` within 1e-5 of exact arithmetic for mixes of ordinary size, ``comb`` within 1e-5.
    """
    _enter("hyper_connection_pre", site, streams, state, None)


def hyper_connection_next(
    site: Site, output: Tensor, streams: Tensor, state: SiteState, *, out: Tensor | None = None
) -> Tensor:
    """:func:`hyper_connection_post` of a sublayer and :func:`hyper_connection_pre` of the next (or the final collapse).

    Args:
        site: the next sublayer's.
        output: bf16 or fp32 [T, d], the sublayer's output; all ranks' sum.
        streams: bf16 [T, 4, d] as they were before the sublayer.
        state: ``post`` and ``comb`` of the sublayer are read, then all is overwritten with the next one's.
        out: the streams after the sublayer; ``streams`` itself unless given.

    Returns:
        ``out``, equal to :func:`hyper_connection_post`'s bit for bit.
    """
    op = "hyper_connection_next"
    out = streams if out is None else out
    _check_output(op, output, streams, out)
    _enter(op, site, streams, state, (output, out))
    return out


def hyper_connection_post(
    output: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Mix a sublayer's output into the streams: ``x'_k = post_k h + sum_j comb[j, k] x_j``.

    ``comb`` acts transposed: its row index is the stream that is read. fp32 throughout, one rounding.

    Args:
        output: bf16 or fp32 [T, d], the sublayer's output.
        streams: bf16 [T, 4, d] as they were before the sublayer.
        post: fp32 [T, 4]. comb: fp32 [T, 4, 4].
        out: bf16 [T, 4, d]; may be ``streams`` itself; allocated unless given.
    """
    op = "hyper_connection_post"
    _check_streams(op, streams)
    tokens, _, d = streams.shape
    out = torch.empty_like(streams) if out is None else out
    _check_output(op, output, streams, out)
    _check_coefficients(op, post, comb, streams)
    if tokens:
        block = min(triton.next_power_of_2(d), 1024)
        _post[(tokens, triton.cdiv(d, block))](output, streams, post, comb, out, d, BLOCK_D=block, num_warps=4)
    return out


def _check_streams(op: str, streams: Tensor) -> None:
    require_dimensions(f"{op}: streams", streams, 3, "[tokens, 4, d]")
    _, count, d = streams.shape
    if count != STREAMS or not 0 < d <= MAX_WIDTH:
        raise OperandValueError(
            f"{op}: streams: expected shape [tokens, {STREAMS}, d], d at most {MAX_WIDTH}, found {tuple(streams.shape)}"
        )
    require_dtype(f"{op}: streams", streams, torch.bfloat16)
    require_contiguous(f"{op}: streams", streams)


def _check_output(op: str, output: Tensor, streams: Tensor, out: Tensor) -> None:
    tokens, _, d = streams.shape
    require_shape(f"{op}: output", output, (tokens, d), "[tokens, d]")
    require_dtype(f"{op}: output", output, torch.bfloat16, torch.float32)
    require_contiguous(f"{op}: output", output)
    require_shape(f"{op}: out", out, streams.shape, "[tokens, 4, d]")
    require_dtype(f"{op}: out", out, torch.bfloat16)
    require_contiguous(f"{op}: out", out)
    require_same_device("streams", streams, **{f"{op}: output": output, f"{op}: out": out})


def _check_coefficients(op: str, post: Tensor, comb: Tensor, streams: Tensor) -> None:
    tokens = streams.shape[0]
    require_shape(f"{op}: post", post, (tokens, STREAMS), "[tokens, 4]")
    require_shape(f"{op}: comb", comb, (tokens, STREAMS, STREAMS), "[tokens, 4, 4]")
    for name, tensor in {f"{op}: post": post, f"{op}: comb": comb}.items():
        require_dtype(name, tensor, torch.float32)
        require_contiguous(name, tensor)
        require_same_device("streams", streams, **{name: tensor})


def _check_site(op: str, site: Site, streams: Tensor, state: SiteState) -> None:
    tokens, _, d = streams.shape
    rows, scales = (STREAMS, 1) if site.is_head else (SITE_ROWS, 3)
    require_shape(f"{op}: fn", site.fn, (rows, STREAMS * d), "[24 (4 for the final collapse), 4 * d]")
    require_shape(f"{op}: base", site.base, (rows,), "[rows of fn]")
    require_shape(f"{op}: scale", site.scale, (scales,), "[3] (1 for the final collapse)")
    if not site.is_head and site.iterations < 1:
        raise OperandValueError(f"{op}: iterations: expected at least 1, found {site.iterations}")
    for name, tensor in {f"{op}: fn": site.fn, f"{op}: base": site.base, f"{op}: scale": site.scale}.items():
        require_dtype(name, tensor, torch.float32)
        require_contiguous(name, tensor)
        require_same_device("streams", streams, **{name: tensor})
    if site.norm is not None:
        require_shape(f"{op}: norm", site.norm, (d,), "[d]")
        require_dtype(f"{op}: norm", site.norm, torch.bfloat16, torch.float32)
        require_contiguous(f"{op}: norm", site.norm)
    require_shape(f"{op}: x", state.x, (tokens, d), "[tokens, d]")
    require_dtype(f"{op}: x", state.x, torch.bfloat16)
    require_contiguous(f"{op}: x", state.x)
    _check_coefficients(op, state.post, state.comb, streams)
    require_dtype(f"{op}: workspace", state.workspace, torch.float32)
    require_contiguous(f"{op}: workspace", state.workspace)
    require_same_device(
        "streams", streams, **{f"{op}: norm": site.norm, f"{op}: x": state.x, f"{op}: workspace": state.workspace}
    )
    needed = workspace_size(tokens)
    if state.workspace.numel() < needed:
        raise OperandValueError(
            f"{op}: workspace: expected at least {needed} values for {tokens} tokens, found {state.workspace.numel()}"
        )
