"""tcgen05.mma: the product.

Source: PTX ISA, tcgen05 data-path layouts, scale factors, packing formats in shared memory. Modelled: B in shared
memory, A there or (8 or 16 bits, without scales, 128 rows per CTA) in tensor memory; K-major, and for 8 or 16 bits
MN-major, too; 128 rows per CTA, or 64: of one CTA without scales, of each CTA of a pair.

Arithmetic: products are exact; one instruction's sum is taken in fp64 and rounded once to fp32 with the
accumulator. The hardware's last bits may differ (it aligns and truncates).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.sm100.emulator import formats
from tests.sm100.emulator.actors import Actor
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.mma_descriptors import ACROSS, ROW_BYTES, InstructionDescriptor, MatrixDescriptor
from tests.sm100.emulator.tensor_layouts import Accumulator
from tests.sm100.emulator.tensor_memory import TENSOR_LANES

if TYPE_CHECKING:
    from tests.sm100.emulator.cluster import Cta

CHUNK = 16
"""Elements of 4 or 6 bits that are padded to 16 bytes."""
TF32_BITS = np.uint32(0xFFFFE000)
"""Bits of 32 that TF32 has."""


def elements(raw: np.ndarray, kind: str) -> np.ndarray:
    """fp64 values of operand bytes [rows, bytes]."""
    if kind in ("f16", "bf16"):
        halves = np.ascontiguousarray(raw).view(np.uint16)
        return (formats.from_bf16(halves) if kind == "bf16" else formats.from_f16(halves)).astype(np.float64)
    if kind == "tf32":
        # The lowest 13 bits of an element count for nothing (PTX ISA, alternate floating-point data formats).
        cells = np.ascontiguousarray(raw).view(np.uint32) & TF32_BITS
        return cells.view(np.float32).astype(np.float64)
    name = kind.removesuffix(" padded")
    table = formats.__dict__[name.upper()]
    codes, width = raw, len(table).bit_length() - 1
    if kind != name:
        raw = np.ascontiguousarray(raw).reshape(len(raw), -1, CHUNK)[:, :, : CHUNK * width // 8]
    if width < 8:
        bits = np.unpackbits(np.ascontiguousarray(raw).reshape(len(raw), -1), axis=1, bitorder="little")
        codes = np.packbits(bits.reshape(len(raw), -1, width), axis=2, bitorder="little")[:, :, 0]
    return table[codes].astype(np.float64)


def block_scales(
    cta: Cta, address: int, place: int, rows: int, descriptor: InstructionDescriptor, actor: Actor, halves: int = 1
) -> np.ndarray:
    """fp64 [rows, depth]: for each element the scale of its block, from tensor memory.

    Row r is in lane r % 32, column r // 32, one byte per block from byte ``place`` on. All four quarters of the lanes
    must hold the same (``tcgen05.cp … warpx4`` writes them so); with ``halves`` = 2, the first two have the first half
    of the rows and the others the second. The address may name ``place`` in its two highest bits, as CUTLASS's do.
    """
    column = address & 0xFFFF
    if address >> 16 & 0x3FFF or address >> 30 not in (0, place):
        raise UnsupportedError(f"scale-factor address {address:#010x}: expected lane 0 and byte {place}")
    share = rows // halves
    count = -(-share // 32)
    cells = cta.tensor_memory.read(slice(0, TENSOR_LANES), slice(column, column + count), actor)
    cells = cells.reshape(halves, -1, 32, count)
    if (cells != cells[:, :1]).any():
        raise HazardError(f"scale factors at column {column} differ between groups of lanes")
    raw = [np.ascontiguousarray(half[0].T).view(np.uint8).reshape(-1, 4)[:share] for half in cells]
    blocks = np.concatenate(raw)[:, place : place + descriptor.depth // descriptor.block]
    values = formats.__dict__[descriptor.scale_type.upper()][blocks].astype(np.float64)
    return np.repeat(values, descriptor.block, axis=1)


def check_shape(descriptor: InstructionDescriptor, ctas: int) -> None:
    """Raise unless M and N are possible for ``ctas`` CTAs."""
    m, n = descriptor.m, descriptor.n
    step = 8 * ctas
    sizes = (64, 128) if ctas == 1 and not descriptor.scale_type else (128, 128 * ctas)
    if m not in sizes or not step <= n <= 256 or n % step:
        raise UnsupportedError(f"tcgen05.mma of M = {m}, N = {n} over {ctas} CTA(s)")


def _operand(cta: Cta, source: MatrixDescriptor | int, rows: int, kind: str, across: bool, actor: Actor) -> np.ndarray:
    """fp64 [rows, K] of an operand in shared memory, or in tensor memory from an address on."""
    if isinstance(source, MatrixDescriptor):
        size = 2 if kind in ("f16", "bf16") else 1
        offsets = source.offsets_across(rows, size) if across else source.offsets(rows, ROW_BYTES)
        return elements(cta.shared.gather(offsets, actor), kind)
    lane, column = source >> 16, source & 0xFFFF
    if lane or across or rows != TENSOR_LANES or kind not in ACROSS:
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
            rows = rows * block_scales(cta, scales[0], descriptor.a_scale, rows_each, descriptor, actor)
            scaled = weights * block_scales(cta, scales[1], descriptor.b_scale, n, descriptor, actor, halves)
        product = rows @ scaled.T
        if descriptor.negate:
            product = -product
        if accumulate:
            before = np.ascontiguousarray(cta.tensor_memory.read(accumulator.lanes, accumulator.columns, actor))
            product = before.view(np.float32).astype(np.float64) + product
        rounded = product.astype(np.float32).view(np.uint32)
        cta.tensor_memory.write(accumulator.lanes, accumulator.columns, rounded, actor)
    return m * n * weights.shape[1]
