"""Sinkhorn, which balances the 4 × 4 softmax of an mHC site (specification §2), and functions for its coefficients.

Device functions, fp32 throughout. Sinkhorn divides the entries K of the softmax by the sums of columns, plus
``hc_eps``, then in turn by those of rows and of columns. What it has divided by so far is kept as four products x of
divisors of rows, and four y of columns: an entry has become K_ij / (x_i y_j). The next divisor of row i turns x_i into

    x_i (sum_j K_ij / (x_i y_j) + hc_eps) = sum_j K_ij / y_j + hc_eps x_i,

and likewise for columns. Twenty iterations are 39 such steps, and each waits for the one before. A step so takes one
reciprocal rather than four, and adds up while it waits for that one: 1 / y_j is the product of the other three y times
1 / (y_0 y_1 y_2 y_3).

fp32 must hold the product of four x or y:

* Products are at most about 1. x begins with 1, and the y of the first step sum to 4. Behind a division of columns all
  entries sum to 4 at most, so the four sums of rows that the next step divides by have a product of at most 1, but for
  ``hc_eps``. Likewise for columns.
* Products are at least ``hc_eps``^3 / 5. Entries that have been divided are at most 1, so for each permutation p the
  product of K_ip(i) is at most that of all x and y. Each entry of K is at least ``hc_eps``, and the largest of a row at
  least 1/4.

Hence the bounds of ``limits.MIN_HC_EPS``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.rounding import INTERPRETED

POST = tl.constexpr(4)
"""The first row of ``fn`` that *post* is computed from; those before it are of *pre*."""
COMB = tl.constexpr(8)
"""The first row of ``fn`` that *comb* is computed from, the last kind."""


@triton.jit
def reciprocal(x):
    """``1 / x`` of a positive fp32, exact but for the last bit; 0 if it is less than 2^-126."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def power_of_2(x):
    """``2 ** x`` of an fp32, exact but for the last two bits; 0 if it is less than 2^-126."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _reciprocals(a, b, c, d):
    """The reciprocals of four numbers as a factor common to all, and four further factors."""
    ab, cd = a * b, c * d
    return reciprocal(ab * cd), b * cd, a * cd, d * ab, c * ab


@triton.jit
def _dot(a, b, c, d, w0, w1, w2, w3):
    return tl.fma(a, w0, tl.fma(b, w1, tl.fma(c, w2, d * w3)))


@triton.jit
def balance(
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, eps, ITERATIONS: tl.constexpr
):  # fmt: skip
    """The factors of the four rows and of the four columns that balance the entries of a softmax, rows a to d.

    Arguments are of one token or vectors over tokens. Either way a token's entries lie in one thread's registers, so
    threads exchange nothing.
    """
    x0 = tl.full(a0.shape, 1.0, tl.float32)
    x1, x2, x3 = x0, x0, x0
    y0 = (a0 + b0) + (c0 + d0) + eps
    y1 = (a1 + b1) + (c1 + d1) + eps
    y2 = (a2 + b2) + (c2 + d2) + eps
    y3 = (a3 + b3) + (c3 + d3) + eps
    for _ in range(ITERATIONS - 1):
        common, w0, w1, w2, w3 = _reciprocals(y0, y1, y2, y3)
        x0 = tl.fma(common, _dot(a0, a1, a2, a3, w0, w1, w2, w3), eps * x0)
        x1 = tl.fma(common, _dot(b0, b1, b2, b3, w0, w1, w2, w3), eps * x1)
        x2 = tl.fma(common, _dot(c0, c1, c2, c3, w0, w1, w2, w3), eps * x2)
        x3 = tl.fma(common, _dot(d0, d1, d2, d3, w0, w1, w2, w3), eps * x3)
        common, w0, w1, w2, w3 = _reciprocals(x0, x1, x2, x3)
        y0 = tl.fma(common, _dot(a0, b0, c0, d0, w0, w1, w2, w3), eps * y0)
        y1 = tl.fma(common, _dot(a1, b1, c1, d1, w0, w1, w2, w3), eps * y1)
        y2 = tl.fma(common, _dot(a2, b2, c2, d2, w0, w1, w2, w3), eps * y2)
        y3 = tl.fma(common, _dot(a3, b3, c3, d3, w0, w1, w2, w3), eps * y3)
    common, w0, w1, w2, w3 = _reciprocals(x0, x1, x2, x3)
    x0, x1, x2, x3 = common * w0, common * w1, common * w2, common * w3
    common, w0, w1, w2, w3 = _reciprocals(y0, y1, y2, y3)
    y0, y1, y2, y3 = common * w0, common * w1, common * w2, common * w3
    return x0, x1, x2, x3, y0, y1, y2, y3
