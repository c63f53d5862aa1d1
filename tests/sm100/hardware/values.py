"""Seeded operands with the hard cases among them."""

from __future__ import annotations

import numpy as np

COUNT = 512
"""Values of a column: a multiple of the block's threads."""
SPECIAL_F32 = np.array(
    [
        0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F812345,  # zeros, infinities, NaN
        0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000,  # around the smallest normal number
        0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0x3F800001, 0x3F7FFFFF, 0xBF800000,  # the largest, around one
        0x4B000001, 0x4B800001, 0x4F000000, 0xCF000000, 0x5F000000,  # around 2^23, 2^24, 2^31 and 2^63
    ],
    np.uint32,
)  # fmt: skip
SPECIAL_U32 = np.array([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFF, 0x10000, 0xFF], np.uint32)


def _with_pairs(random: np.ndarray, special: np.ndarray, axis: int) -> np.ndarray:
    """Put every pair of special values where two columns (``axis`` 0 and 1) begin; others are left random."""
    grid = np.meshgrid(special, special, indexing="ij")
    if axis < 2:
        pairs = grid[axis].ravel()[: len(random) * 3 // 4]
        random[: len(pairs)] = pairs
    return random


def integers(axis: int) -> np.ndarray:
    """u32: pairs of extremes with the column of the other axis, and random bits."""
    random = np.random.default_rng(100 + axis)
    return _with_pairs(random.integers(0, 2**32, COUNT, dtype=np.uint32), SPECIAL_U32, axis)


def wide_integers(axis: int) -> np.ndarray:
    """u64, likewise."""
    random = np.random.default_rng(200 + axis)
    special = np.concatenate((SPECIAL_U32.astype(np.uint64), SPECIAL_U32.astype(np.uint64) << np.uint64(32)))
    special = np.concatenate((special[1:], special[:1] - np.uint64(1)))
    return _with_pairs(random.integers(0, 2**64, COUNT, dtype=np.uint64), special[:19], axis)


def shifts() -> np.ndarray:
    """u32 around the widths of registers."""
    random = np.random.default_rng(300)
    values = random.integers(0, 70, COUNT, dtype=np.uint32)
    values[::37] = SPECIAL_U32[np.arange(len(values[::37])) % len(SPECIAL_U32)]
    return values


def floats(axis: int) -> np.ndarray:
    """f32: pairs of special values, nearby magnitudes (cancellation), and random bits (denormals, huge, NaN)."""
    random = np.random.default_rng(400 + axis)
    bits = random.integers(0, 2**32, COUNT, dtype=np.uint32)
    near = (random.standard_normal(COUNT) * 2.0 ** random.integers(-3, 3, COUNT)).astype(np.float32)
    mixed = np.where(np.arange(COUNT) % 3 == 0, bits, near.view(np.uint32))
    return _with_pairs(mixed, SPECIAL_F32[:19], axis)


def narrow_floats(seed: int) -> np.ndarray:
    """f32 near what E4M3, E5M2, f16 and bf16 can hold: ties, the largest values, denormals of each."""
    random = np.random.default_rng(500 + seed)
    mantissa = random.integers(0, 64, COUNT).astype(np.float64) / 32
    values = (mantissa * 2.0 ** random.integers(-18, 18, COUNT) * random.choice([-1, 1], COUNT)).astype(np.float32)
    edges = np.array(
        [448, 464, 464.001, 480, 57344, 61440, 61440.01, 65504, 65520, 65519.99, 2.0**-9, 2.0**-10, 2.0**-10 * 1.001,
         2.0**-16, 2.0**-17, 2.0**-24, 2.0**-25, 3.38e38, 3.3961775e38],
        np.float32,
    )  # fmt: skip
    bits = values.view(np.uint32)
    bits[: len(edges)] = edges.view(np.uint32)
    bits[len(edges) : 2 * len(edges)] = (-edges).view(np.uint32)
    bits[-len(SPECIAL_F32) :] = SPECIAL_F32
    return random.permutation(bits)


def moderate_floats(axis: int) -> np.ndarray:
    """f32 for approximate functions: magnitudes from 2^-20 to 2^6, both signs, and special values."""
    random = np.random.default_rng(600 + axis)
    values = (2.0 ** random.uniform(-20, 6, COUNT) * random.choice([-1, 1], COUNT)).astype(np.float32).view(np.uint32)
    values[: len(SPECIAL_F32)] = SPECIAL_F32
    return values if axis == 0 else random.permutation(values)


def half_pairs(kind: type[np.floating], axis: int) -> np.ndarray:
    """u32 of two f16 (``kind`` np.float16) or bf16 (np.float32): magnitudes around one, and a fifth of any bits."""
    random = np.random.default_rng(800 + axis)
    numbers = (random.standard_normal(2 * COUNT) * 2.0 ** random.integers(-3, 4, 2 * COUNT)).astype(kind)
    width = numbers.itemsize
    bits = (numbers.view(f"u{width}") >> (8 * (width - 2))).astype(np.uint16)
    anything = random.integers(0, 2**16, 2 * COUNT, dtype=np.uint16)
    return np.where(random.random(2 * COUNT) < 0.2, anything, bits).view(np.uint32)


def halves() -> np.ndarray:
    """u16 of any bits: f16, bf16 or pairs of 8-bit floats."""
    values = np.random.default_rng(700).integers(0, 2**16, COUNT, dtype=np.uint16)
    values[:256] = np.arange(256, dtype=np.uint16) * 257
    return values
