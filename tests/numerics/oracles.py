"""Definitions of the formats that share no code with the package: exact fractions, and NumPy on integers and fp64.

Every value and midpoint of E2M1, E4M3, bf16 and fp32 is exact in fp64, so comparisons there are exact as well.
"""

from __future__ import annotations

import bisect
import struct
from fractions import Fraction

import numpy as np
import torch

BF16_MAX = Fraction(255, 128) * Fraction(2) ** 127

FP8_VALUE_MAX = 240 * Fraction(2) ** 120
"""Largest E4M3 value times a power of two that is finite in fp32 (256·2^120 is not)."""

INFINITY = Fraction(2) ** 1000
"""Stands for +inf in exact arithmetic: far above everything that is finite in fp32, and it saturates likewise."""


def minifloat_grid(exponent_bits: int, mantissa_bits: int, bias: int, codes: int) -> list[Fraction]:
    """Values of the non-negative codes 0 .. codes−1 of an IEEE-like small float."""
    grid = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        assert exponent < 1 << exponent_bits
        fraction = Fraction(mantissa, 1 << mantissa_bits)
        if exponent == 0:
            grid.append(fraction * Fraction(2) ** (1 - bias))
        else:
            grid.append((1 + fraction) * Fraction(2) ** (exponent - bias))
    return grid


E2M1_GRID = minifloat_grid(2, 1, 1, 8)
E4M3_GRID = minifloat_grid(4, 3, 7, 127)  # code 127 is NaN


def nearest_code(value: Fraction, grid: list[Fraction]) -> int:
    """Code of the grid value nearest to ``value`` ≥ 0; ties to the even code; saturating."""
    above = bisect.bisect_left(grid, value)
    if above in (0, len(grid)):
        return min(above, len(grid) - 1)
    down, up = value - grid[above - 1], grid[above] - value
    if down == up:
        return above if above % 2 == 0 else above - 1
    return above if up < down else above - 1


def nearest_codes(x: np.ndarray, grid: list[Fraction], sign_bit: int) -> np.ndarray:
    """The same for an array of fp32 (no NaN), with the sign added: vectorised in fp64, where it is exact."""
    points = np.array([float(point) for point in grid])
    middles = (points[:-1] + points[1:]) / 2
    a = np.abs(x.astype(np.float64))
    code = np.searchsorted(middles, a, side="left")
    tie = (code < len(middles)) & (a == middles[np.minimum(code, len(middles) - 1)])
    code = code + (tie & (code % 2 == 1))
    return (code | (np.signbit(x) * sign_bit)).astype(np.uint8)


def e2m1_codes(x: np.ndarray) -> np.ndarray:
    return nearest_codes(x, E2M1_GRID, 8)


def e4m3_codes(x: np.ndarray) -> np.ndarray:
    return nearest_codes(x, E4M3_GRID, 128)


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    points = np.array([float(point) for point in E4M3_GRID] + [np.nan])
    return np.where(codes & 128, -1.0, 1.0) * points[codes & 127]


def round_fp32(value: Fraction) -> Fraction:
    """IEEE round-to-nearest-even of a non-negative fraction to fp32, subnormals included."""
    if value == 0:
        return Fraction(0)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(value / quantum) * quantum  # Python rounds halves to even
    return INFINITY if rounded >= Fraction(2) ** 128 else rounded


def exact(value: float) -> Fraction:
    return Fraction(value)


def ceil_log2(value: Fraction) -> int:
    """Smallest k with 2^k ≥ value > 0."""
    k = value.numerator.bit_length() - value.denominator.bit_length() - 1
    while Fraction(2) ** k < value:
        k += 1
    return k


def bf16_bits(value: float) -> int:
    """bf16 bits of a finite fp32 value, nearest-even, from its integer bits; may round up to infinity."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def all_bf16() -> torch.Tensor:
    """Every bf16 that is neither NaN nor infinite, as bf16 [65280]."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    bits = bits[(bits >> 7) & 0xFF != 0xFF]
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16)


def stress_fp32(grid: list[Fraction], seed: int = 0) -> torch.Tensor:
    """fp32 values around every grid point and midpoint (with both neighbours), all bf16, and random bit patterns."""
    points = np.array([float(point) for point in grid])
    centres = np.concatenate((points, (points[:-1] + points[1:]) / 2, [points[-1] * 1.0625, points[-1] * 1.25]))
    centres = centres.astype(np.float32)
    near = np.concatenate(
        (centres, np.nextafter(centres, np.float32(np.inf)), np.nextafter(centres, np.float32(-np.inf)))
    )
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32)
    random = bits.view(np.float32)
    values = np.concatenate((near, -near, random[np.isfinite(random)], all_bf16().float().numpy()))
    return torch.from_numpy(np.concatenate((values, np.array([np.inf, -np.inf, 0.0, -0.0], dtype=np.float32))))


def awkward_rows(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """bf16 [rows, columns] that uniform noise would never be: outliers of 1e4, zero blocks, blocks that underflow,
    rows of subnormals, of the largest values, of zeros, of NaN and infinities, and rows on exact ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator) * 3)
    x[torch.rand(rows, columns, generator=generator) < 0.01] *= 1e4
    kind = torch.arange(rows) % 12
    x[kind == 1, :16] = 0
    x[kind == 2, :16] *= 1e-9
    x[kind == 3] *= 1e-36  # bf16 subnormals among them
    x[kind == 4] = torch.sign(x[kind == 4]) * 3.3895313892515355e38
    x[kind == 5] = 0
    x[kind == 6, ::7] = float("nan")
    x[kind == 6, 3::11] = float("inf")
    x[kind == 6, 5::13] = -float("inf")
    x[kind == 7] = torch.randint(-12, 13, (int((kind == 7).sum()), columns), generator=generator) / 4.0  # ties
    x[kind == 8, 16:] = -0.0
    x[kind == 9] = float("nan")
    x[kind == 10] *= 2.0**-120
    return x.to(torch.bfloat16)
