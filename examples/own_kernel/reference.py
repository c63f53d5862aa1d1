"""The op and what it must give: the global scale of each activation row, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.formats.checks import require_dtype, require_table

AMAX_FLOOR = 2.0**-100
"""Smallest maximum that a scale is made from: a row of zeros has a scale, too."""
INVERSE_FULL_SCALE = float(torch.tensor(1 / 2688, dtype=torch.float32))
"""fp32(1/2688); 2688 = 6 · 448, the largest code times the largest block scale."""


def row_scales(x: Tensor) -> Tensor:
    """Compute ``max(max|x| of the row, 2^-100) * fp32(1/2688)``, the global scale of each row in NVFP4.

    Args:
        x: bf16 or fp32 [T, K]. NaN counts as 0, infinities as the largest finite bf16.

    Returns:
        fp32 [T].

    Rounding: the maximum is exact; one fp32 product.

    Raises:
        OperandTypeError: another dtype.
        OperandValueError: ``x`` is no matrix.

    Source: specification §9.3.
    """
    require_table("row_scales: x", x)
    require_dtype("row_scales: x", x, torch.bfloat16, torch.float32)
    largest = torch.finfo(torch.bfloat16).max
    finite = x.float().nan_to_num(nan=0.0, posinf=largest, neginf=-largest).clamp(-largest, largest)
    return finite.abs().amax(dim=1).clamp_min(AMAX_FLOOR) * INVERSE_FULL_SCALE
