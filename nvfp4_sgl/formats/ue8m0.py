"""UE8M0, the power-of-two scale: one byte e stands for 2^(e − 127).

Source: specification (notation), §3.5; OCP MX 1.0.

Byte 0 is 2^-127 (subnormal in fp32), byte 254 is 2^127, byte 255 is NaN. Everything is done on the bits of fp32:
log2 and exp2 of a library round, and one wrong rounding at a power of two is a factor of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.formats.checks import require_dtype

BIAS = 127
NAN_BYTE = 255


def encode_ceil(s: Tensor) -> Tensor:
    """uint8 byte of the smallest UE8M0 value not below ``s`` (fp32, s ≥ 0, sign ignored).

    s ≤ 2^-127 (zero included) gives byte 0. s > 2^127 finite saturates at byte 254; infinity and NaN give 255.
    """
    require_dtype("scale", s, torch.float32)
    bits = s.contiguous().view(torch.int32) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    byte = (exponent + (mantissa != 0)).clamp(max=254)
    # Subnormal fp32 up to 2^-127 (mantissa 0x400000) would otherwise land on byte 1.
    byte = torch.where(bits <= 0x400000, 0, byte)
    return torch.where(exponent == 255, NAN_BYTE, byte).to(torch.uint8)


def decode(byte: Tensor) -> Tensor:
    """fp32 value 2^(byte − 127) of uint8 ``byte``, exact; byte 255 gives NaN."""
    require_dtype("UE8M0 scale", byte, torch.uint8)
    e = byte.int()
    bits = torch.where(e == 0, 0x400000, e << 23)
    return torch.where(e == NAN_BYTE, 0x7FC00000, bits).view(torch.float32)


def decode_reciprocal(byte: Tensor) -> Tensor:
    """fp32 value 2^(127 − byte), exact for bytes 0..254; byte 255 gives NaN. x·this equals x / decode(byte)."""
    require_dtype("UE8M0 scale", byte, torch.uint8)
    return decode(torch.where(byte == NAN_BYTE, byte, 254 - byte))


def power_of_two_ceil(s: Tensor) -> Tensor:
    """Smallest power of two not below ``s`` as fp32, within UE8M0's range: ``decode(encode_ceil(s))``."""
    return decode(encode_ceil(s))


def as_bytes(scale: Tensor, name: str = "UE8M0 scale") -> Tensor:
    """uint8 view of a scale tensor stored as ``float8_e8m0fnu`` or as uint8; OperandTypeError for any other dtype."""
    require_dtype(name, scale, torch.float8_e8m0fnu, torch.uint8)
    return scale.view(torch.uint8)
