"""Input checks, input sanitising and exact division, shared by the format modules."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.errors import Nvfp4SglError

BF16_MAX = 3.3895313892515355e38
"""Largest finite bf16, (2 − 2^-7)·2^127; exact in fp32."""


class FormatError(Nvfp4SglError, ValueError):
    """A tensor handed to a format function has the wrong shape, dtype or values."""


def require_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """:class:`FormatError` unless ``tensor.dtype`` is one of ``dtypes``."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise FormatError(f"{name}: expected dtype {expected}, found {tensor.dtype}; convert or view it explicitly")


def require_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """:class:`FormatError` unless ``tensor`` has exactly the shape ``expected``."""
    if tuple(tensor.shape) != tuple(expected):
        raise FormatError(f"{name}: expected shape {tuple(expected)}, found {tuple(tensor.shape)}")


def require_rows(name: str, tensor: Tensor, width: int | None = None) -> None:
    """:class:`FormatError` unless ``tensor`` is [rows, columns], of ``width`` columns where given."""
    if tensor.dim() != 2 or (width is not None and tensor.shape[1] != width):
        raise FormatError(f"{name}: expected shape [rows, {width or 'K'}], found {tuple(tensor.shape)}")


def require_matrix(name: str, tensor: Tensor, multiple: int = 1) -> None:
    """:class:`FormatError` unless ``tensor`` is [..., N, K] with K a multiple of ``multiple``."""
    if tensor.dim() < 2:
        raise FormatError(f"{name}: expected shape [..., N, K], found {tuple(tensor.shape)}")
    require_multiple(name, tensor.shape[-1], multiple)


def require_multiple(name: str, k: int, multiple: int) -> None:
    """:class:`FormatError` unless the last dimension ``k`` is a positive multiple of ``multiple``."""
    if k <= 0 or k % multiple:
        raise FormatError(f"{name}: expected K (the last dimension) to be a positive multiple of {multiple}, found {k}")


POWER_SCALE_MAX = 2.0**127
"""Largest weight that formats with a power-of-two scale take: rounding up from above it can reach 2^128, infinity."""


def require_finite(name: str, tensor: Tensor, limit: float | None = None) -> None:
    """:class:`FormatError` if ``tensor`` holds a NaN, an infinity or, where given, a magnitude above ``limit``.

    Reads the data: not for the hot path.
    """
    good = torch.isfinite(tensor.float()) if limit is None else tensor.float().abs() <= limit
    bad = int((~good).sum())
    if bad:
        bound = "" if limit is None else f" up to {limit:.4g}"
        kind = "NaN or infinite" if limit is None else "NaN, infinite or larger"
        raise FormatError(f"{name}: expected finite values{bound}, found {bad} {kind} of {tensor.numel()}")


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
