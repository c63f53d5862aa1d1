"""Exact sums and products, rounded to odd so that rounding them again to fewer bits is right.

Rounding to odd: an inexact value becomes that one of its two neighbours whose last bit is one. Rounding the result to
nearest in a format at least two bits shorter gives what rounding the exact value would (Boldo and Melquiond, 2008).
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator import formats


def to_odd(nearest: np.ndarray, error: np.ndarray) -> np.ndarray:
    """``nearest`` + ``error`` (what rounding to nearest lost), rounded to odd in the format of ``nearest``."""
    even = nearest.view(f"u{nearest.itemsize}") & 1 == 0
    inexact = np.isfinite(nearest) & (error != 0) & even
    towards = np.where(error > 0, np.inf, -np.inf).astype(nearest.dtype)
    return np.where(inexact, np.nextafter(nearest, towards), nearest)


def sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """fp64 a + b."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    if not np.count_nonzero(error):
        return total
    return to_odd(total, np.where(np.isfinite(error), error, 0.0))


def narrow(values: np.ndarray, name: str) -> np.ndarray:
    """fp64 values, exact or rounded to odd, to the bits of ``f16`` or ``bf16``, nearest even."""
    if name == "f16":
        return np.where(np.isnan(values), np.uint16(0x7FFF), values.astype(np.float16).view(np.uint16))
    single = values.astype(np.float32)
    if not np.count_nonzero(single != values):
        return formats.to_bf16(single)
    error = values - single.astype(np.float64)
    return formats.to_bf16(to_odd(single, np.where(np.isfinite(error), error, 0.0)))
