"""Number formats below 32 bits: decoding tables and round-to-nearest-even encoders.

Sources: OCP Microscaling formats 1.0 (E2M1, E2M3, E3M2, E4M3, E5M2, UE8M0); PTX ISA, ``cvt`` (what ``satfinite`` does
with NaN).
"""

from __future__ import annotations

import numpy as np


def _minifloat(bits: int, exponent_bits: int, bias: int) -> np.ndarray:
    """Values of the non-negative codes of a float with no special codes, fp64."""
    mantissa_bits = bits - 1 - exponent_bits
    codes = np.arange(1 << (bits - 1))
    exponent, mantissa = codes >> mantissa_bits, (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    return np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - float(bias)))


def _signed(magnitudes: np.ndarray) -> np.ndarray:
    return np.concatenate((magnitudes, -magnitudes)).astype(np.float32)


_E2M1 = _minifloat(4, 2, 1)
_E4M3 = _minifloat(8, 4, 7)
_E5M2 = _minifloat(8, 5, 15)
E2M1 = _signed(_E2M1)
"""fp32 value of each of the 16 codes."""
E2M3 = _signed(_minifloat(6, 2, 1))
"""fp32 value of each of the 64 codes."""
E3M2 = _signed(_minifloat(6, 3, 3))
"""fp32 value of each of the 64 codes."""
E4M3 = _signed(np.where(np.arange(128) == 127, np.nan, _E4M3))
"""fp32 value of each byte; 0x7F and 0xFF are NaN."""
E5M2 = _signed(np.where(np.arange(128) < 124, _E5M2, np.where(np.arange(128) == 124, np.inf, np.nan)))
"""fp32 value of each byte; 0x7C is infinity, 0x7D and up NaN."""
UE8M0 = np.concatenate((2.0 ** (np.arange(255) - 127.0), [np.nan])).astype(np.float32)
"""fp32 value of each byte; 0xFF is NaN."""

NAN = np.uint32(0x7FFFFFFF).view(np.float32)


def _encode(values: np.ndarray, finite: np.ndarray) -> np.ndarray:
    """Index of the entry of ``finite`` (ascending) nearest to |value|, ties to the even index, saturating."""
    magnitude = np.abs(values.astype(np.float64))
    above = np.clip(np.searchsorted(finite, magnitude), 1, len(finite) - 1)
    low, high = finite[above - 1], finite[above]
    nearer_high = (magnitude - low > high - magnitude) | ((magnitude - low == high - magnitude) & (above % 2 == 0))
    code = np.where(nearer_high, above, above - 1)
    return np.where(magnitude >= finite[-1], len(finite) - 1, code)


def to_e2m1(values: np.ndarray) -> np.ndarray:
    """fp32 to E2M1 codes (u8, 0…15), saturating; NaN becomes +6 as ``cvt.satfinite`` says."""
    codes = _encode(np.where(np.isnan(values), 6.0, values), _E2M1)
    return (codes | np.where(np.signbit(values) & ~np.isnan(values), 8, 0)).astype(np.uint8)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """fp32 to E4M3 bytes, saturating at 448; NaN becomes 0x7F."""
    codes = _encode(np.where(np.isnan(values), 0.0, values), _E4M3[:127]) | np.where(np.signbit(values), 128, 0)
    return np.where(np.isnan(values), 127, codes).astype(np.uint8)


def to_e5m2(values: np.ndarray) -> np.ndarray:
    """fp32 to E5M2 bytes, saturating at 57344; NaN becomes 0x7F."""
    codes = _encode(np.where(np.isnan(values), 0.0, values), _E5M2[:124]) | np.where(np.signbit(values), 128, 0)
    return np.where(np.isnan(values), 127, codes).astype(np.uint8)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bits (u16), nearest even, overflow to infinity; NaN becomes 0x7FFF as the hardware's does."""
    values = np.ascontiguousarray(values, np.float32)
    bits, half = values.view(np.uint32), np.uint32(16)
    rounded = ((bits + (bits >> half & np.uint32(1)) + np.uint32(0x7FFF)) >> half).astype(np.uint16)
    lost = values != values
    return np.where(lost, np.uint16(0x7FFF), rounded) if np.count_nonzero(lost) else rounded


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 bits to fp32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def canonical(values: np.ndarray) -> np.ndarray:
    """f32 with every NaN the one that f32 instructions give, whatever their operands' payload (seen on sm_90)."""
    lost = values != values
    return np.where(lost, NAN, values) if np.count_nonzero(lost) else values


def to_f16(values: np.ndarray) -> np.ndarray:
    """fp32 to fp16 bits, nearest even; NaN becomes 0x7FFF."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isnan(values), np.uint16(0x7FFF), values.astype(np.float16).view(np.uint16))


def from_f16(bits: np.ndarray) -> np.ndarray:
    """fp16 bits to fp32, without a NaN's payload."""
    return canonical(bits.astype(np.uint16).view(np.float16).astype(np.float32))
