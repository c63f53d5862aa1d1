"""The coefficients of an mHC site from its 24 logits: sigmoids, and a softmax balanced by Sinkhorn (specification §2).

Device functions, fp32 throughout. A logit is ``sum * factor + base``: the sum comes from the GEMM with ``fn``, the
factor is the inverse RMS of the streams times the scale of *pre*, *post* or *comb*, and the base is the site's
constant.

Everything is elementwise over tokens: a program may hold one token in every thread, or a token a lane. Either way the
4 × 4 entries of a token lie in one thread's registers, so threads exchange nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.rounding import INTERPRETED

POST = tl.constexpr(4)
"""The first row of ``fn`` that *post* is computed from. Those before it are of *pre*, those from 8 on of *comb*."""


@triton.jit
def _reciprocal(x):
    """``1 / x`` of a normal fp32, exact but for the last bit.

    Approximate because Sinkhorn is a chain of reciprocals, each of which waits for the one before.
    """
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _divided(a, b, c, d, eps):
    """Four numbers, each divided by their sum plus ``eps``."""
    inverse = _reciprocal((a + b) + (c + d) + eps)
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def _softmax(a, b, c, d, eps):
    """The softmax of four numbers, plus ``eps``."""
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = _divided(tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top), 0.0)
    return a + eps, b + eps, c + eps, d + eps


@triton.jit
def collapse_weights(a, b, c, d, inverse_rms, base, scale, hc_eps):
    """*pre*: the weight of each stream in the collapse, ``sigmoid(logit) + hc_eps``, from the four sums of *pre*."""
    factor = inverse_rms * tl.load(scale)
    return (
        tl.sigmoid(a * factor + tl.load(base)) + hc_eps,
        tl.sigmoid(b * factor + tl.load(base + 1)) + hc_eps,
        tl.sigmoid(c * factor + tl.load(base + 2)) + hc_eps,
        tl.sigmoid(d * factor + tl.load(base + 3)) + hc_eps,
    )


@triton.jit
def _logits(sums, factor, base, FIRST: tl.constexpr):
    """Four logits, those of rows FIRST to FIRST + 3 of ``fn``."""
    return (
        sums[FIRST - POST] * factor + tl.load(base + FIRST),
        sums[FIRST - POST + 1] * factor + tl.load(base + (FIRST + 1)),
        sums[FIRST - POST + 2] * factor + tl.load(base + (FIRST + 2)),
        sums[FIRST - POST + 3] * factor + tl.load(base + (FIRST + 3)),
    )


@triton.jit
def store_post_and_comb(sums, inverse_rms, base, scale, post, comb, here, hc_eps, ITERATIONS: tl.constexpr):
    """Compute and store *post* and *comb*, the coefficients that mix a sublayer's output into the streams.

    sums: a token's fp32 sums with the 20 rows of ``fn`` from :data:`POST` on, a tuple. post, comb: addresses of a
    token's 4 and 16 results. All of them are of one token or vectors over tokens. here: whether the token exists.
    ITERATIONS: of Sinkhorn.
    """
    a, b, c, d = _logits(sums, inverse_rms * tl.load(scale + 1), base, 4)
    tl.store(post, 2 * tl.sigmoid(a), mask=here)
    tl.store(post + 1, 2 * tl.sigmoid(b), mask=here)
    tl.store(post + 2, 2 * tl.sigmoid(c), mask=here)
    tl.store(post + 3, 2 * tl.sigmoid(d), mask=here)
    factor = inverse_rms * tl.load(scale + 2)
    a0, a1, a2, a3 = _logits(sums, factor, base, 8)
    b0, b1, b2, b3 = _logits(sums, factor, base, 12)
    c0, c1, c2, c3 = _logits(sums, factor, base, 16)
    d0, d1, d2, d3 = _logits(sums, factor, base, 20)
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
