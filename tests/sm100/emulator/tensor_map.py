"""Tensor maps: the 128-byte descriptor of a tiled tensor, and the rows that a box touches.

The format is not published. The fields below are what CuTeDSL's host code writes; every bit that is not one of them
must have the value always seen, else the map is refused.

Bytes: 0–7 global address; 8–11 flags (rank − 1 in bits 4–6, element type 7–10, swizzle 13–14); 12–27 strides of
dimensions 1…4 over 16; 32–51 extents − 1; 52–54 element strides; 55–59 box − 1. Bytes 64–127 hold nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.sm100.emulator.errors import MemoryFaultError, UnsupportedError

ELEMENTS = {
    0: ("u8", 8), 1: ("u16", 16), 2: ("u32", 32), 3: ("s32", 32), 4: ("u64", 64), 5: ("s64", 64), 6: ("f16", 16),
    7: ("f32", 32), 8: ("f64", 64), 10: ("bf16", 16), 11: ("e2m1", 4),
}  # fmt: skip
"""Type and bits of an element, by the number of its type."""
SPANS = (0, 32, 64, 128)
_RANK, _TYPE, _SWIZZLE = 0x7 << 4, 0xF << 7, 0x3 << 13
KNOWN_FLAGS = frozenset({0x40002, 0x240002})
"""The other flag bits: the values seen. Bit 21 is set for tensors of at least 128 KiB, without effect here."""
FIELD_BYTES = 64
"""Bytes that hold fields, of the 128 that a map takes."""
MAX_RANK = 5
MAX_BOX = 256


@dataclass(frozen=True)
class Row:
    """One run of a box along dimension 0: where it begins in the box, and its part inside the tensor."""

    box_offset: int
    """Bytes from the box's begin to the part inside the tensor."""
    address: int
    """Global address of that part."""
    size: int
    """Its bytes."""


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor: dimension 0 is contiguous. ``strides`` are in bytes, of dimensions 1 and up."""

    address: int
    element: str
    bits: int
    swizzle: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    @classmethod
    def decode(cls, raw: bytes) -> TensorMap:
        """Read a descriptor.

        Raises:
            UnsupportedError: a field that is not modelled.
            MemoryFaultError: a field outside its documented range.
        """
        words = np.frombuffer(raw, np.uint32)
        flags = int(words[2])
        rank, kind = (flags >> 4 & 7) + 1, flags >> 7 & 15
        rest = flags & ~(_RANK | _TYPE | _SWIZZLE)
        if kind not in ELEMENTS or rank > MAX_RANK or rest not in KNOWN_FLAGS:
            raise UnsupportedError(f"tensor map flags {flags:#010x} (rank {rank}, type {kind}, others {rest:#x})")
        address = int(words[0]) | int(words[1]) << 32
        strides = tuple(int(words[3 + axis]) * 16 for axis in range(rank - 1))
        unused = [int(words[i]) for i in (7, *range(3 + rank - 1, 7), *range(8 + rank, 13), 15)]
        if any(unused) or any(raw[52:55]) or any(raw[55 + rank : 60]):
            raise UnsupportedError(f"tensor map with further fields: {raw.hex()}")
        box = tuple(raw[55 + axis] + 1 for axis in range(rank))
        found = cls(
            address, *ELEMENTS[kind], SPANS[flags >> 13 & 3],
            tuple(int(words[8 + axis]) + 1 for axis in range(rank)), strides, box,
        )  # fmt: skip
        if address % 16:
            raise MemoryFaultError(f"tensor map of address {address:#x}: expected a multiple of 16")
        if found.row_bytes % 16 or (found.swizzle and found.row_bytes > found.swizzle):
            raise MemoryFaultError(f"box row of {found.row_bytes} B with a {found.swizzle} B swizzle")
        if found.row_bytes < found.swizzle and math.prod(found.box[1:]) > 1:
            # Hardware faulted on what CuTeDSL makes of it (seen on sm_90): rows seem to lie apart by the swizzle.
            raise UnsupportedError(f"box rows of {found.row_bytes} B, narrower than the {found.swizzle} B swizzle")
        return found

    @property
    def row_bytes(self) -> int:
        """Bytes of a box along dimension 0."""
        return self.box[0] * self.bits // 8

    @property
    def box_bytes(self) -> int:
        """Bytes of a whole box: what a load brings into shared memory and tells its mbarrier."""
        return int(np.prod(self.box)) * self.bits // 8

    def rows(self, coordinates: tuple[int, ...], store: bool = False) -> Iterator[Row]:
        """The rows of the box at ``coordinates`` that lie at least partly inside the tensor.

        Loads fill with zeros from the tensor's last element on; stores end at the next multiple of 16 bytes only, and
        so write a row's padding (both seen on sm_90).

        Raises:
            UnsupportedError: another number of coordinates than the tensor has.
            MemoryFaultError: what hardware calls an illegal instruction (seen on sm_90): a first coordinate that is
                no multiple of 16 bytes, or a store at a negative coordinate.
        """
        if len(coordinates) != len(self.box):
            raise UnsupportedError(f"{len(coordinates)} coordinates for a tensor of rank {len(self.box)}")
        if coordinates[0] * self.bits % 128:
            raise MemoryFaultError(f"first coordinate {coordinates[0]} of {self.bits} bits: no multiple of 16 bytes")
        if store and min(coordinates) < 0:
            raise MemoryFaultError(f"tensor store at {coordinates}: negative")
        low = max(0, -coordinates[0])
        unit = 128 // self.bits if store else 1
        high = min(self.box[0], -(-self.extents[0] // unit) * unit - coordinates[0])
        if high <= low:
            return
        size = (high - low) * self.bits // 8
        for number in range(int(np.prod(self.box[1:], dtype=int))):
            rest, address, inside = number, self.address + (coordinates[0] + low) * self.bits // 8, True
            for axis, stride in enumerate(self.strides, start=1):
                rest, step = divmod(rest, self.box[axis])
                position = coordinates[axis] + step
                inside &= 0 <= position < self.extents[axis]
                address += position * stride
            if inside:
                yield Row(number * self.row_bytes + low * self.bits // 8, address, size)


def replace_field(raw: bytes, name: str, position: int, value: int) -> bytes:
    """The map with one field replaced (``tensormap.replace``).

    Args:
        raw: the map.
        name: as PTX names it; a ``rank`` is given less one, strides in bytes, others as they are.
        position: the dimension, for fields that have one; ``global_stride`` 0 is that of dimension 1.
        value: the new value.

    Raises:
        MemoryFaultError: a value or a dimension outside its range.
        UnsupportedError: an element stride other than 1.
    """
    if not 0 <= position < MAX_RANK - (name == "global_stride"):
        raise MemoryFaultError(f"tensormap.replace of {name} {position}")
    words, small = bytearray(raw), name in ("box_dim", "rank", "element_stride")
    if name == "global_address":
        words[0:8] = value.to_bytes(8, "little")
        return bytes(words)
    if name == "global_stride":
        if value % 16 or value >> 36:
            raise MemoryFaultError(f"tensormap.replace of stride {value}: expected a multiple of 16 below 2^36")
        start, stored = 12 + 4 * position, value // 16
    elif name == "global_dim":
        start, stored = 32 + 4 * position, (value - 1) & 0xFFFFFFFF
    elif name == "rank":
        if value >= MAX_RANK:
            raise MemoryFaultError(f"tensormap.replace of rank {value} + 1")
        start, stored = 8, int.from_bytes(raw[8:9], "little") & ~_RANK | value << 4
    elif name == "box_dim":
        if not 1 <= value <= MAX_BOX:
            raise MemoryFaultError(f"tensormap.replace of box {value}")
        start, stored = 55 + position, value - 1
    else:
        if value != 1:
            raise UnsupportedError(f"element stride {value}")
        return raw
    words[start : start + (1 if small else 4)] = stored.to_bytes(1 if small else 4, "little")
    return bytes(words)
