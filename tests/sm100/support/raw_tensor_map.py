"""Tensor maps written field by field, as CuTeDSL's host code writes them."""

from __future__ import annotations

import struct


def raw_map(
    kind: int, extents: list[int], strides: list[int], box: list[int], flags: int = 0x40002, address: int = 1 << 16
) -> bytes:
    """The 128 bytes of a map; ``kind`` is the element type's number, ``strides`` are those of dimensions 1 and up."""
    rank = len(extents)
    words = [0] * 16
    words[0:2] = address & 0xFFFFFFFF, address >> 32
    words[2] = flags | (rank - 1) << 4 | kind << 7
    words[3 : 3 + rank - 1] = [stride // 16 for stride in strides]
    words[8 : 8 + rank] = [extent - 1 for extent in extents]
    raw = bytearray(struct.pack("<16I", *words)) + bytearray(64)
    for axis, size in enumerate(box):
        raw[55 + axis] = size - 1
    return bytes(raw)
