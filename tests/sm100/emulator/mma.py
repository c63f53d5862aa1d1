"""tcgen05.mma: matrix and instruction descriptors, and the product.

Source: PTX ISA, tcgen05 matrix descriptor, instruction descriptor, data-path layouts. Modelled: B in shared memory, A
there or (half precision, 128 rows per CTA) in tensor memory; K-major, and for half precision MN-major, too; 128 rows
per CTA, or 64: of one CTA in half precision, of each CTA of a pair.

Arithmetic: products are exact; one instruction's sum is taken in fp64 and rounded once to fp32 with the
accumulator. The hardware's last bits may differ (it aligns and truncates).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.sm100.emulator import formats
from tests.sm100.emulator.actors import Actor
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.swizzle import swizzle
from tests.sm100.emulator.tensor_layouts import Accumulator
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

    def offsets_across(self, rows: int) -> np.ndarray:
        """Shared offsets [rows, ROW_BYTES] of an MN-major operand of 16-bit elements (rows are contiguous)."""
        row, depth = np.arange(rows)[:, None], np.arange(ROW_BYTES // 2)[None]
        chunk, inside = row // 8, row % 8 * 2
        if self.span == 0:
            # Core matrices of 8 of K by 16 bytes of rows, each contiguous.
            low = self.start + chunk * self.stride + depth % 8 * 16 + depth // 8 * self.leading + inside
        else:
            chunks = self.span // 16
            low = self.start + chunk % chunks * 16 + chunk // chunks * self.leading + inside
            low = swizzle(low + depth % 8 * self.span + depth // 8 * self.stride, self.span)
        return np.stack((low, low + 1), axis=-1).reshape(rows, ROW_BYTES)

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
    a_across: bool = False
    b_across: bool = False
    """Whether an operand is MN-major."""

    @classmethod
    def decode(cls, raw: int, kind: str) -> InstructionDescriptor:
        """Read the 32-bit descriptor of kind ``mxf4nvf4`` or ``f16``.

        Raises:
            UnsupportedError: sparsity, saturation, other types, scale-factor ids.
        """
        n = _bits(raw, 17, 6) * 8
        negate = bool(_bits(raw, 13, 1) ^ _bits(raw, 14, 1))
        if kind == "mxf4nvf4":
            used = 3 << 13 | 63 << 17 | 1 << 23 | 3 << 27 | 1 << 7 | 1 << 10
            if raw & ~used or _bits(raw, 7, 3) != 1 or _bits(raw, 10, 2) != 1:
                raise UnsupportedError(f"instruction descriptor {raw:#010x} of kind {kind}")
            scale = "ue8m0" if _bits(raw, 23, 1) else "e4m3"
            return cls(_bits(raw, 27, 2) * 128, n, "e2m1", "e2m1", scale, negate)
        used = 15 << 13 | 63 << 17 | 31 << 24 | 1 << 7 | 1 << 10 | 1 << 4
        if raw & ~used or _bits(raw, 4, 2) != 1:
            raise UnsupportedError(f"instruction descriptor {raw:#010x} of kind {kind} (fp32 accumulation only)")
        types = "f16", "bf16"
        across = bool(_bits(raw, 15, 1)), bool(_bits(raw, 16, 1))
        return cls(_bits(raw, 24, 5) * 16, n, types[_bits(raw, 7, 3)], types[_bits(raw, 10, 3)], "", negate, *across)


def elements(raw: np.ndarray, kind: str) -> np.ndarray:
    """fp64 values of operand bytes [rows, bytes]."""
    if kind == "e2m1":
        codes = np.stack((raw & 15, raw >> 4), axis=-1).reshape(len(raw), -1)
        return formats.E2M1[codes].astype(np.float64)
    halves = np.ascontiguousarray(raw).view(np.uint16)
    return (formats.from_bf16(halves) if kind == "bf16" else formats.from_f16(halves)).astype(np.float64)


def block_scales(cta: Cta, address: int, rows: int, scale_type: str, actor: Actor, halves: int = 1) -> np.ndarray:
    """fp64 [rows, 4]: scales of 16-element blocks from tensor memory (``scale_vec::4X``).

    Row r is in lane r % 32, column r // 32, one byte per block. All four quarters of the lanes must hold the same
    (``tcgen05.cp … warpx4`` writes them so); with ``halves`` = 2, the first two have the first half of the rows and the
    others the second.
    """
    column = address & 0xFFFF
    if address >> 16:
        raise UnsupportedError(f"scale-factor address {address:#010x}: expected lane 0 and id 0")
    share = rows // halves
    count = -(-share // 32)
    cells = cta.tensor_memory.read(slice(0, TENSOR_LANES), slice(column, column + count), actor)
    cells = cells.reshape(halves, -1, 32, count)
    if (cells != cells[:, :1]).any():
        raise HazardError(f"scale factors at column {column} differ between groups of lanes")
    raw = [np.ascontiguousarray(half[0].T).view(np.uint8).reshape(-1, 4)[:share] for half in cells]
    return formats.__dict__[scale_type.upper()][np.concatenate(raw)].astype(np.float64)


def check_shape(descriptor: InstructionDescriptor, ctas: int) -> None:
    """Raise unless M and N are possible for ``ctas`` CTAs."""
    m, n = descriptor.m, descriptor.n
    step = 8 * ctas
    sizes = (64, 128) if ctas == 1 and descriptor.a_type != "e2m1" else (128, 128 * ctas)
    if m not in sizes or not step <= n <= 256 or n % step:
        raise UnsupportedError(f"tcgen05.mma of M = {m}, N = {n} over {ctas} CTA(s)")


def _operand(cta: Cta, source: MatrixDescriptor | int, rows: int, kind: str, across: bool, actor: Actor) -> np.ndarray:
    """fp64 [rows, K] of an operand in shared memory, or in tensor memory from an address on."""
    if isinstance(source, MatrixDescriptor):
        offsets = source.offsets_across(rows) if across else source.offsets(rows, ROW_BYTES)
        return elements(cta.shared.gather(offsets, actor), kind)
    lane, column = source >> 16, source & 0xFFFF
    if lane or across or rows != TENSOR_LANES or kind == "e2m1":
        raise UnsupportedError(f"operand A of {rows} rows in tensor memory at {source:#010x}")
    cells = cta.tensor_memory.read(slice(0, rows), slice(column, column + ROW_BYTES // 4), actor)
    return elements(np.ascontiguousarray(cells).view(np.uint8), kind)


def multiply(
    ctas: list[Cta],
    address: int,
    a: MatrixDescriptor | int,
    b: MatrixDescriptor,
    descriptor: InstructionDescriptor,
    scales: tuple[int, int] | None,
    accumulate: bool,
    actor: Actor,
) -> int:
    """Execute one instruction of ``actor`` over one CTA or a pair; returns the multiply-adds done.

    Of a pair, each CTA holds its half of A's rows and half of B's N rows; the accumulator rows stay where A's are.
    """
    check_shape(descriptor, len(ctas))
    m, n = descriptor.m, descriptor.n
    share, rows_each = n // len(ctas), m // len(ctas)
    weights = np.concatenate([_operand(cta, b, share, descriptor.b_type, descriptor.b_across, actor) for cta in ctas])
    accumulator = Accumulator.at(address, m, n, len(ctas))
    halves = 2 if rows_each == 64 else 1
    for cta in ctas:
        rows = _operand(cta, a, rows_each, descriptor.a_type, descriptor.a_across, actor)
        scaled = weights
        if scales is not None:
            rows = rows * np.repeat(block_scales(cta, scales[0], rows_each, descriptor.scale_type, actor), 16, axis=1)
            factors = block_scales(cta, scales[1], n, descriptor.scale_type, actor, halves)
            scaled = weights * np.repeat(factors, 16, axis=1)
        product = rows @ scaled.T
        if descriptor.negate:
            product = -product
        if accumulate:
            before = np.ascontiguousarray(cta.tensor_memory.read(accumulator.lanes, accumulator.columns, actor))
            product = before.view(np.float32).astype(np.float64) + product
        rounded = product.astype(np.float32).view(np.uint32)
        cta.tensor_memory.write(accumulator.lanes, accumulator.columns, rounded, actor)
    return m * n * weights.shape[1]
