"""tcgen05.mma: matrix and instruction descriptors, and the product.

Source: PTX ISA, tcgen05 matrix descriptor, instruction descriptor, data-path layouts. Modelled: both operands in
shared memory, K-major, M = 128 per CTA (one CTA, or M = 256 over a pair).

Arithmetic: products are exact; one instruction's sum is taken in fp64 and rounded once to fp32 with the
accumulator. The hardware's last bits may differ (it aligns and truncates).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.sm100.emulator import formats
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.swizzle import swizzle
from tests.sm100.emulator.tensor_memory import TENSOR_LANES

if TYPE_CHECKING:
    from tests.sm100.emulator.cluster import Cta

ROW_BYTES = 32
"""Bytes of K that one instruction takes from each row: 64 FP4 or 16 half-precision elements."""
LAYOUT_SPANS = {0: 0, 2: 128, 4: 64, 6: 32}


def _bits(value: int, low: int, count: int) -> int:
    return value >> low & ((1 << count) - 1)


@dataclass(frozen=True)
class MatrixDescriptor:
    """Where an operand lies in shared memory; offsets in bytes."""

    start: int
    leading: int
    stride: int
    span: int

    @classmethod
    def decode(cls, raw: int) -> MatrixDescriptor:
        """Read the 64-bit descriptor.

        Raises:
            UnsupportedError: an absolute leading offset, a base offset, an unknown layout or a reserved bit.
        """
        layout = _bits(raw, 61, 3)
        reserved = _bits(raw, 14, 2), _bits(raw, 30, 2), _bits(raw, 53, 8)
        if layout not in LAYOUT_SPANS or any(reserved) or _bits(raw, 46, 3) != 1 or _bits(raw, 49, 4):
            raise UnsupportedError(f"matrix descriptor {raw:#018x}")
        return cls(_bits(raw, 0, 14) << 4, _bits(raw, 16, 14) << 4, _bits(raw, 32, 14) << 4, LAYOUT_SPANS[layout])

    def offsets(self, rows: int, row_bytes: int) -> np.ndarray:
        """Shared offsets [rows, row_bytes] of a K-major operand."""
        row, byte = np.arange(rows)[:, None], np.arange(row_bytes)[None]
        if self.span == 0:
            # Core matrices of 8 rows by 16 bytes, each contiguous.
            return self.start + row // 8 * self.stride + row % 8 * 16 + byte // 16 * self.leading + byte % 16
        return swizzle(self.start + row // 8 * self.stride + row % 8 * self.span + byte, self.span)


@dataclass(frozen=True)
class InstructionDescriptor:
    """Shape and types of one instruction."""

    m: int
    n: int
    a_type: str
    b_type: str
    scale_type: str
    negate: bool

    @classmethod
    def decode(cls, raw: int, kind: str) -> InstructionDescriptor:
        """Read the 32-bit descriptor of kind ``mxf4nvf4`` or ``f16``.

        Raises:
            UnsupportedError: sparsity, saturation, transposed operands, other types, scale-factor ids.
        """
        n = _bits(raw, 17, 6) * 8
        negate = bool(_bits(raw, 13, 1) ^ _bits(raw, 14, 1))
        if kind == "mxf4nvf4":
            used = 3 << 13 | 63 << 17 | 1 << 23 | 3 << 27 | 1 << 7 | 1 << 10
            if raw & ~used or _bits(raw, 7, 3) != 1 or _bits(raw, 10, 2) != 1:
                raise UnsupportedError(f"instruction descriptor {raw:#010x} of kind {kind}")
            scale = "ue8m0" if _bits(raw, 23, 1) else "e4m3"
            return cls(_bits(raw, 27, 2) * 128, n, "e2m1", "e2m1", scale, negate)
        used = 3 << 13 | 63 << 17 | 31 << 24 | 1 << 7 | 1 << 10 | 1 << 4
        if raw & ~used or _bits(raw, 4, 2) != 1:
            raise UnsupportedError(f"instruction descriptor {raw:#010x} of kind {kind} (fp32 accumulation only)")
        types = "f16", "bf16"
        return cls(_bits(raw, 24, 5) * 16, n, types[_bits(raw, 7, 3)], types[_bits(raw, 10, 3)], "", negate)


def elements(raw: np.ndarray, kind: str) -> np.ndarray:
    """fp64 values of operand bytes [rows, bytes]."""
    if kind == "e2m1":
        codes = np.stack((raw & 15, raw >> 4), axis=-1).reshape(len(raw), -1)
        return formats.E2M1[codes].astype(np.float64)
    halves = np.ascontiguousarray(raw).view(np.uint16)
    return (formats.from_bf16(halves) if kind == "bf16" else formats.from_f16(halves)).astype(np.float64)


def block_scales(cta: Cta, address: int, rows: int, scale_type: str) -> np.ndarray:
    """fp64 [rows, 4]: scales of 16-element blocks from tensor memory (``scale_vec::4X``).

    Row r is in lane r % 32, column r // 32, one byte per block. All four groups of 32 lanes must hold the same
    (``tcgen05.cp … warpx4`` writes them so).
    """
    column = address & 0xFFFF
    if address >> 16:
        raise UnsupportedError(f"scale-factor address {address:#010x}: expected lane 0 and id 0")
    count = -(-rows // 32)
    cells = cta.tensor_memory.read(slice(0, TENSOR_LANES), slice(column, column + count)).reshape(4, 32, count)
    if (cells != cells[0]).any():
        raise HazardError(f"scale factors at column {column} differ between the four groups of lanes")
    raw = np.ascontiguousarray(cells[0].T).view(np.uint8).reshape(-1, 4)[:rows]
    return formats.__dict__[scale_type.upper()][raw].astype(np.float64)


def check_shape(descriptor: InstructionDescriptor, ctas: int) -> None:
    """Raise unless M and N are those of ``ctas`` CTAs with 128 rows each."""
    m, n = descriptor.m, descriptor.n
    step = 16 if ctas == 2 or descriptor.a_type != "e2m1" else 8
    if m != TENSOR_LANES * ctas or not step <= n <= 256 or n % step:
        raise UnsupportedError(f"tcgen05.mma of M = {m}, N = {n} over {ctas} CTA(s)")


def multiply(
    ctas: list[Cta],
    accumulator: int,
    a: MatrixDescriptor,
    b: MatrixDescriptor,
    descriptor: InstructionDescriptor,
    scales: tuple[int, int] | None,
    accumulate: bool,
) -> int:
    """Execute one instruction over one CTA or a pair; returns the multiply-adds done.

    Of a pair, each CTA holds its 128 rows of A and half of B's N rows; the accumulator rows stay where A's are.
    """
    check_shape(descriptor, len(ctas))
    share = descriptor.n // len(ctas)
    weights = np.concatenate(
        [elements(cta.shared.gather(b.offsets(share, ROW_BYTES)), descriptor.b_type) for cta in ctas]
    )
    columns = slice(accumulator & 0xFFFF, (accumulator & 0xFFFF) + descriptor.n)
    lanes = slice(0, TENSOR_LANES)
    for cta in ctas:
        rows = elements(cta.shared.gather(a.offsets(TENSOR_LANES, ROW_BYTES)), descriptor.a_type)
        scaled = weights
        if scales is not None:
            rows = rows * np.repeat(block_scales(cta, scales[0], TENSOR_LANES, descriptor.scale_type), 16, axis=1)
            scaled = weights * np.repeat(block_scales(cta, scales[1], descriptor.n, descriptor.scale_type), 16, axis=1)
        product = rows @ scaled.T
        if descriptor.negate:
            product = -product
        if accumulate:
            before = np.ascontiguousarray(cta.tensor_memory.read(lanes, columns)).view(np.float32)
            product = before.astype(np.float64) + product
        cta.tensor_memory.write(lanes, columns, product.astype(np.float32).view(np.uint32))
    return TENSOR_LANES * len(ctas) * descriptor.n * weights.shape[1]
