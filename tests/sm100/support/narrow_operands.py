"""Operands of 4, 6 and 8 bits of tcgen05.mma's narrow kinds: random codes, their values, their bytes in shared memory.

Values are ml_dtypes' and bytes are packed element by element, so nothing here is the emulator's.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

TYPES = {
    "e4m3": (0, 8, ml_dtypes.float8_e4m3fn),
    "e5m2": (1, 8, ml_dtypes.float8_e5m2),
    "e2m3": (3, 6, ml_dtypes.float6_e2m3fn),
    "e3m2": (4, 6, ml_dtypes.float6_e3m2fn),
    "e2m1": (5, 4, ml_dtypes.float4_e2m1fn),
}
"""By name: number in the instruction descriptor of f8f6f4 and mxf8f6f4, bits, dtype."""
PADDED = 16
"""Elements that fill 16 bytes whatever their bits."""
POISON = 0xA5


@dataclass(frozen=True)
class NarrowOperand:
    """Codes u8 [rows, k] of a type."""

    name: str
    codes: np.ndarray

    @classmethod
    def random(cls, name: str, rows: int, k: int, seed: int) -> NarrowOperand:
        """All codes of finite numbers; those of 8 bits without the largest, so that sums stay exact."""
        random = np.random.default_rng(seed)
        _, bits, _ = TYPES[name]
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
        return self.codes.view(TYPES[self.name][2]).astype(np.float64)

    def padded(self) -> np.ndarray:
        """u8 [rows, k]: sixteen elements in the low bits of 16 bytes, with poison behind them."""
        bits = TYPES[self.name][1]
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
