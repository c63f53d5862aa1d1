"""Products of matrices by tensor cores, the same on a GPU and in Triton's interpreter: a device function."""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import INTERPRETED


@triton.jit
def dot_bf16(a, b, total):
    """Compute ``total + a @ b`` of bf16 ``a``, ``b``: products exact, sums fp32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total)
