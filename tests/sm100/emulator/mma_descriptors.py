"""Descriptors of tcgen05.mma and of wgmma: where an operand lies in shared memory, and what tcgen05.mma multiplies.

Source: PTX ISA, tcgen05 matrix descriptor, instruction descriptor, ``.kind``, ``.block_scale``; matrix descriptor of
wgmma.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.emulator.swizzle import swizzle

ROW_BYTES = 32
"""Bytes of K that one instruction takes from each row of an operand, whatever its kind."""
LAYOUT_SPANS = {0: 0, 2: 128, 4: 64, 6: 32}
WARPGROUP_SPANS = {0: 0, 1: 128, 2: 64, 3: 32}
"""Swizzle spans by the layout field of tcgen05's descriptors, and of wgmma's."""
HALVES = {0: "f16", 1: "bf16"}
SINGLES = {2: "tf32"}
NARROW = {0: "e4m3", 1: "e5m2", 3: "e2m3 padded", 4: "e3m2 padded", 5: "e2m1 padded"}
"""Elements of 4 or 6 bits come sixteen at a time, padded to 16 bytes."""
FOUR_BITS = {1: "e2m1"}
ACROSS = ("f16", "bf16", "e4m3", "e5m2")
"""Element types that may be MN-major."""


@dataclass(frozen=True)
class Kind:
    """A ``.kind`` of tcgen05.mma.

    Attributes:
        types: element types by their number in the instruction descriptor.
        depth: elements of K that one instruction takes.
        scales: scale types that each block size allows; empty for a kind without scales.
        block: the block size where the instruction names none, if it may.
    """

    types: dict[int, str]
    depth: int
    scales: dict[int, tuple[str, ...]]
    block: int = 0


KINDS = {
    "f16": Kind(HALVES, 16, {}),
    "tf32": Kind(SINGLES, 8, {}),
    "f8f6f4": Kind(NARROW, 32, {}),
    "mxf8f6f4": Kind(NARROW, 32, {32: ("ue8m0",)}, 32),
    "mxf4": Kind(FOUR_BITS, 64, {32: ("ue8m0",)}, 32),
    "mxf4nvf4": Kind(FOUR_BITS, 64, {16: ("e4m3", "ue8m0"), 32: ("ue8m0",)}),
}


def _bits(value: int, low: int, count: int) -> int:
    return value >> low & ((1 << count) - 1)


@dataclass(frozen=True)
class MatrixDescriptor:
    """Where an operand lies in shared memory; offsets in bytes, ``base`` as ``swizzle`` takes it."""

    start: int
    leading: int
    stride: int
    span: int
    base: int = 0

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

    @classmethod
    def decode_warpgroup(cls, raw: int) -> MatrixDescriptor:
        """Read wgmma's.

        Raises:
            UnsupportedError: a reserved bit, or a base offset without a swizzle.
        """
        span, base = WARPGROUP_SPANS[_bits(raw, 62, 2)], _bits(raw, 49, 3)
        reserved = _bits(raw, 14, 2), _bits(raw, 30, 2), _bits(raw, 46, 3), _bits(raw, 52, 10)
        if any(reserved) or (base and not span):
            raise UnsupportedError(f"matrix descriptor of wgmma {raw:#018x}")
        return cls(_bits(raw, 0, 14) << 4, _bits(raw, 16, 14) << 4, _bits(raw, 32, 14) << 4, span, base)

    def offsets_across(self, rows: int, size: int) -> np.ndarray:
        """Shared offsets [rows, ROW_BYTES] of an MN-major operand (rows are contiguous); ``size`` is an element's."""
        row, depth = np.arange(rows)[:, None], np.arange(ROW_BYTES // size)[None]
        chunk, inside = row * size // 16, row * size % 16
        if self.span == 0:
            # Core matrices of 8 of K by 16 bytes of rows, each contiguous.
            low = self.start + chunk * self.stride + depth % 8 * 16 + depth // 8 * self.leading + inside
        else:
            chunks = self.span // 16
            low = self.start + chunk % chunks * 16 + chunk // chunks * self.leading + inside
            low = swizzle(low + depth % 8 * self.span + depth // 8 * self.stride, self.span, self.base)
        return np.stack([low + byte for byte in range(size)], axis=-1).reshape(rows, ROW_BYTES)

    def offsets(self, rows: int, row_bytes: int) -> np.ndarray:
        """Shared offsets [rows, row_bytes] of a K-major operand."""
        row, byte = np.arange(rows)[:, None], np.arange(row_bytes)[None]
        if self.span == 0:
            # Core matrices of 8 rows by 16 bytes, each contiguous.
            return self.start + row // 8 * self.stride + row % 8 * 16 + byte // 16 * self.leading + byte % 16
        return swizzle(self.start + row // 8 * self.stride + row % 8 * self.span + byte, self.span, self.base)


@dataclass(frozen=True)
class InstructionDescriptor:
    """Shape and types of one instruction.

    Attributes:
        scale_type: "" for a kind without scales.
        a_across, b_across: whether an operand is MN-major.
        block: elements that share a scale.
        depth: elements of K.
        a_scale, b_scale: the first byte of an operand's scales in their 32-bit cells.
    """

    m: int
    n: int
    a_type: str
    b_type: str
    scale_type: str
    negate: bool
    a_across: bool = False
    b_across: bool = False
    block: int = 0
    depth: int = 16
    a_scale: int = 0
    b_scale: int = 0

    @classmethod
    def decode(cls, raw: int, kind: str, block: int = 0) -> InstructionDescriptor:
        """Read the 32-bit descriptor of a kind of ``KINDS``; ``block`` is what the instruction says, 0 for nothing.

        Raises:
            UnsupportedError: sparsity, saturation, fp16 accumulation, types or scales that the kind does not have.
        """
        known = KINDS[kind]
        types = [known.types.get(_bits(raw, low, 3), "") for low in (7, 10)]
        across = bool(_bits(raw, 15, 1)), bool(_bits(raw, 16, 1))
        mixed = any(crosses and name not in ACROSS for crosses, name in zip(across, types, strict=True))
        common = 63 << 7 | 15 << 13 | 63 << 17
        used = common | (3 << 4 | 1 << 23 | 15 << 27 if known.scales else 1 << 4 | 31 << 24)
        if raw & ~used or not all(types) or mixed or (not known.scales and _bits(raw, 4, 2) != 1):
            raise UnsupportedError(f"instruction descriptor {raw:#010x} of kind {kind} (fp32 accumulation only)")
        n, negate = _bits(raw, 17, 6) * 8, bool(_bits(raw, 13, 1) ^ _bits(raw, 14, 1))
        if not known.scales:
            return cls(_bits(raw, 24, 5) * 16, n, types[0], types[1], "", negate, *across, depth=known.depth)
        block = block or known.block
        scale = "ue8m0" if _bits(raw, 23, 1) else "e4m3"
        places = _bits(raw, 29, 2), _bits(raw, 4, 2)
        # The scales of a row fill one, two or four bytes of a cell, at a multiple of their size.
        if scale not in known.scales.get(block, ()) or any(place % (known.depth // block) for place in places):
            raise UnsupportedError(f"{scale} scales of {block} at bytes {places} of kind {kind}")
        return cls(
            _bits(raw, 27, 2) * 128, n, types[0], types[1], scale, negate, *across,
            block=block, depth=known.depth, a_scale=places[0], b_scale=places[1],
        )  # fmt: skip
