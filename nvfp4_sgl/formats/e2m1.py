"""E2M1, the 4-bit float of NVFP4 and MXFP4: codes, rounding, packing. Source: specification §9.1, §9.2; OCP MX 1.0.

Codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign, so code 8 is −0. There is no NaN and no infinity.
Two codes share a byte along the last dimension: low nibble = even index.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from nvfp4_sgl.formats.checks import require_dtype, require_multiple

E2M1_MAX = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(x: Tensor) -> Tensor:
    """Nearest E2M1 code of ``x`` (fp32, any shape) as uint8 in 0..15; ties go to the even code.

    Saturates: |x| > 5 gives ±6, infinities included. The sign bit of ``x`` is always kept, so −0 and negative
    values that round to zero give code 8. NaN is the caller's to exclude (``checks.require_finite`` or
    ``checks.as_finite_fp32``): here it would give magnitude 0.
    """
    a = x.abs()
    # Each midpoint between neighbours counts up when reached or when passed, whichever lands ties on even codes.
    code = (a > 0.25).to(torch.uint8)
    code += a >= 0.75
    code += a > 1.25
    code += a >= 1.75
    code += a > 2.5
    code += a >= 3.5
    code += a > 5.0
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode(codes: Tensor) -> Tensor:
    """fp32 values of uint8 ``codes``; the upper nibble must be 0 (it is ignored)."""
    require_dtype("E2M1 codes", codes, torch.uint8)
    return _values(codes.device)[(codes & 15).int()]


def pack(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] → uint8 [..., K/2]: byte j = code[2j] | code[2j+1] << 4. K must be even."""
    require_dtype("E2M1 codes", codes, torch.uint8)
    require_multiple("E2M1 codes", "K", codes.shape[-1], 2)
    return (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] → uint8 codes [..., K]; inverse of :func:`pack`."""
    require_dtype("packed E2M1", packed, torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_packed(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] → fp32 values [..., K]: ``decode(unpack(packed))`` with one look-up a byte."""
    require_dtype("packed E2M1", packed, torch.uint8)
    return _pairs(packed.device)[packed.int()].flatten(-2)


@functools.cache
def _values(device: torch.device) -> Tensor:
    """fp32 [16]: the value of each code."""
    positive = torch.tensor(MAGNITUDES, dtype=torch.float32, device=device)
    return torch.cat((positive, -positive))


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """fp32 [256, 2]: the two values of each byte."""
    byte = torch.arange(256, device=device)
    return _values(device)[torch.stack((byte & 15, byte >> 4), dim=-1)]
