"""SwiGLU of a gate and an up that a thread of the epilogue holds."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = 1.4426950408889634


def clamped_swiglu(gate: Any, up: Any, limit: float) -> Any:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``; +0 where that would be NaN (specification §6.2).

    The sigmoid takes the hardware's ex2.approx and rcp.approx: relative error below 2^-21.
    """
    # Without ``nan`` a NaN would become the limit: the largest value that there is.
    gate = cute.arch.fmin(gate, limit, nan=True)
    up = cute.arch.fmax(cute.arch.fmin(up, limit, nan=True), -limit, nan=True)
    sigmoid = cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp2(gate * Float32(-LOG2_E)))
    hidden = (gate * sigmoid) * up
    return cutlass.select_(hidden == hidden, hidden, Float32(0.0))
