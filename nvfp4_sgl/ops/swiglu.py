"""Clamped SwiGLU (specification §6.2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` in fp32.

    The gate is clamped from above only, ``up`` on both sides, both before the SiLU and on dequantised values.
    Since ``|silu(g)| <= limit`` for ``g <= limit`` (limit >= 0.3), the result is bounded by ``limit**2``.

    Args:
        gate, up: fp32 [..., I].

    Returns:
        fp32 [..., I].
    """
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
