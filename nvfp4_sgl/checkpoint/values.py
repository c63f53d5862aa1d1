"""What the values of a stored tensor may be: one rule a kind of tensor.

A rule takes a tensor, or the part of it that was read, and returns where it holds what it must not (bool, of the same
shape, or ``None`` if any value may be there) and, in words, what was expected. It does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Rule: TypeAlias = "Callable[[Tensor], tuple[Tensor | None, str]]"


def anything(part: Tensor) -> tuple[Tensor | None, str]:
    """Packed codes: every byte means something."""
    return None, ""


def finite(part: Tensor) -> tuple[Tensor | None, str]:
    """BF16 or F32 values."""
    return ~part.isfinite(), "finite values"


def e4m3_values(part: Tensor) -> tuple[Tensor | None, str]:
    """E4M3 weights, which have no infinity."""
    import torch

    return (part.view(torch.uint8) & 0x7F) == 0x7F, "no NaN"


def e4m3_scales(part: Tensor) -> tuple[Tensor | None, str]:
    """NVFP4 block scales: no sign, no NaN, not all zero."""
    import torch

    bits = part.view(torch.uint8)
    return (bits >= 0x7F) | (bits.amax() == 0), "block scales that are numbers >= +0, of which one at least is > 0"


def power_scales(part: Tensor) -> tuple[Tensor | None, str]:
    """UE8M0 scales: byte 255 is NaN."""
    import torch

    return part.view(torch.uint8) == 0xFF, "no NaN scale"


def fp32_scales(part: Tensor) -> tuple[Tensor | None, str]:
    """Scales of FP8 blocks in BF16 or F32; a block of zeros may have scale 0."""
    return ~(part.isfinite() & (part >= 0)), "finite scales >= 0"


def global_scale(part: Tensor) -> tuple[Tensor | None, str]:
    """Scalar that multiplies. Beyond the bounds the largest value or a reciprocal is not a normal fp32 number."""
    from nvfp4_sgl.formats import nvfp4

    low, high = nvfp4.SCALE_MIN, nvfp4.SCALE_MAX
    return ~((part >= low) & (part <= high)), "a scale > 0 from 2^-117 to 2^116"


def inverse_global_scale(part: Tensor) -> tuple[Tensor | None, str]:
    """Scalar that divides: the reciprocal of a :func:`global_scale`."""
    from nvfp4_sgl.formats import nvfp4

    low, high = 1 / nvfp4.SCALE_MAX, 1 / nvfp4.SCALE_MIN
    return ~((part >= low) & (part <= high)), "an inverse scale > 0 from 2^-116 to 2^117"
