"""Functions that read a tensor's values: a check that waits for the device, sanitising, division."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError

BF16_MAX = 3.3895313892515355e38
"""Largest finite bf16, (2 − 2^-7)·2^127; exact in fp32."""
POWER_SCALE_MAX = 2.0**127
"""Largest weight that formats with a power-of-two scale take: rounding up from above it can reach 2^128, infinity."""


def require_finite(name: str, tensor: Tensor, limit: float | None = None) -> None:
    """Raise OperandValueError for NaN, infinities and, if given, magnitudes above ``limit``; waits for the device."""
    good = torch.isfinite(tensor.float()) if limit is None else tensor.float().abs() <= limit
    bad = int((~good).sum())
    if bad:
        bound = "" if limit is None else f" up to {limit:.4g}"
        kind = "NaN or infinite" if limit is None else "NaN, infinite or larger"
        raise OperandValueError(f"{name}: expected finite values{bound}, found {bad} {kind} of {tensor.numel()}")


def divide(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor``, correctly rounded in fp32 on every device.

    Dividing by a Python number is a multiplication by its rounded reciprocal in torch's CUDA code, one ulp off now
    and then; dividing by a tensor is a division.
    """
    return x / torch.full((), divisor, dtype=torch.float32, device=x.device)


def as_finite_fp32(x: Tensor) -> Tensor:
    """``x`` read as fp32, with NaN → +0 and magnitudes above :data:`BF16_MAX` (±inf included) → ±BF16_MAX.

    This is what every activation and cache quantiser reads, so that no input makes a NaN leave. Finite bf16 is
    unchanged, the sign of zero included. The order matters to kernels: the NaN is replaced before the clamp.
    """
    x = x.float()
    return torch.where(torch.isnan(x), torch.zeros((), device=x.device), x).clamp(-BF16_MAX, BF16_MAX)
