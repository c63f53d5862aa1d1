"""E4M3 (OCP ``e4m3fn``): 4 exponent bits, 3 mantissa bits, largest 448, no infinity. Source: specification §3.5, §9.2.

Normal numbers reach down to 2^-6; subnormals are multiples of 2^-9, so everything up to 2^-10 rounds to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.formats.ue8m0 import power_of_two_ceil

__all__ = ["E4M3_MAX", "E4M3_MIN", "power_of_two_ceil", "round_to_e4m3"]

E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
"""Smallest positive value (subnormal)."""


def round_to_e4m3(x: Tensor) -> Tensor:
    """``x`` (read as fp32) as ``float8_e4m3fn``: nearest, ties to even, saturating at ±448.

    Infinities saturate too; the sign of zero is kept. NaN in gives NaN out.
    """
    # The clamp is the saturation: whether a plain cast saturates differs between torch versions and devices.
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
