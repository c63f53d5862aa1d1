"""Operands of 4, 6 and 8 bits of tcgen05.mma's narrow kinds: random codes, their values, their bytes in shared memory.

Values follow from the definition of the formats and bytes are packed element by element: nothing is the emulator's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TYPES = {"e4m3": (0, 4, 3), "e5m2": (1, 5, 2), "e2m3": (3, 2, 3), "e3m2": (4, 3, 2), "e2m1": (5, 2, 1)}
"""Types by name: number in the instruction descriptor of f8f6f4 and mxf8f6f4, bits of exponent and of mantissa."""
PADDED = 16
"""Elements that fill 16 bytes whatever their bits."""
POISON = 0xA5


def bits_of(name: str) -> int:
    """Bits of an element: sign, exponent, mantissa."""
    return 1 + sum(TYPES[name][1:])


@dataclass(frozen=True)
class NarrowOperand:
    """Codes u8 [rows, k] of a type."""

    name: str
    codes: np.ndarray

    @classmethod
    def random(cls, name: str, rows: int, k: int, seed: int) -> NarrowOperand:
        """All codes of finite numbers; those of 8 bits without the largest, so that sums stay exact."""
        random = np.random.default_rng(seed)
        bits = bits_of(name)
        if bits < 8:
            return cls(name, random.integers(0, 1 << bits, (rows, k), dtype=np.uint8))
        low, high = {"e4m3": (0x28, 0x50), "e5m2": (0x34, 0x48)}[name]
        magnitude = random.integers(low, high, (rows, k), dtype=np.uint8)
        return cls(name, magnitude | random.integers(0, 2, (rows, k), dtype=np.uint8) << 7)

    @property
    def number(self) -> int:
        return TYPES[self.name][0]

    def values(self) -> np.ndarray:
        """fp64 [rows, k]."""
        _, exponents, mantissas = TYPES[self.name]
        mantissa = (self.codes & (1 << mantissas) - 1) / 2.0**mantissas
        exponent = (self.codes >> mantissas & (1 << exponents) - 1).astype(int)
        sign = np.where(self.codes >> exponents + mantissas & 1, -1.0, 1.0)
        bias = (1 << exponents - 1) - 1
        return sign * np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))

    def padded(self) -> np.ndarray:
        """u8 [rows, k]: sixteen elements in the low bits of 16 bytes, with poison behind them."""
        bits = bits_of(self.name)
        out = np.full(self.codes.shape, POISON, np.uint8)
        for row, codes in enumerate(self.codes):
            for first in range(0, len(codes), PADDED):
                packed = sum(int(code) << bits * i for i, code in enumerate(codes[first : first + PADDED]))
                size = PADDED * bits // 8
                out[row, first : first + size] = np.frombuffer(packed.to_bytes(size, "little"), np.uint8)
        return out

    def packed(self) -> np.ndarray:
        """u8 [rows, k/2] of codes of 4 bits, the first in the low half."""
        return self.codes[:, ::2] | self.codes[:, 1::2] << 4


def scale_cells(scales: np.ndarray, place: int) -> np.ndarray:
    """u32 [128, columns]: scales u8 [rows, n] as tensor memory holds them, from byte ``place`` of each cell on."""
    rows, count = scales.shape
    columns = -(-rows // 32)
    cells = np.full((columns * 32, 4), POISON, np.uint8)
    cells[:rows, place : place + count] = scales
    return np.tile(cells.view(np.uint32).reshape(columns, 32).T, (4, 1))
