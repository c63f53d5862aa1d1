"""Swizzles against the documented pattern, and boxes of tensor maps against slices of a padded array."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator.errors import MemoryFaultError, UnsupportedError
from tests.sm100.emulator.swizzle import swizzle
from tests.sm100.emulator.tensor_map import TensorMap
from tests.sm100.support.raw_tensor_map import raw_map


@pytest.mark.parametrize("span", [128, 64, 32])
def test_swizzle_exchanges_16_byte_units_by_row(span: int) -> None:
    """In 8 rows of 128 B, row r's units within a span are numbered by an exclusive-or with r, modulo their count."""
    for row in range(8):
        for unit in range(8):
            units = span // 16
            expected = row * 128 + (unit // units * units + (unit % units ^ row % units)) * 16
            assert swizzle(np.array([row * 128 + unit * 16 + 5]), span)[0] == expected + 5


@pytest.mark.parametrize("corner", [(0, 0, 0), (16, 3, 1), (-16, -2, -1), (48, 4, 2), (-64, 0, 0), (0, 9, 0)])
def test_box_rows_are_the_part_inside_the_tensor(corner: tuple[int, int, int]) -> None:
    extents, box = (56, 5, 3), (32, 4, 2)
    strides = (64, 64 * 5 + 32)
    memory = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    tensor = np.lib.stride_tricks.as_strided(memory, extents[::-1], (strides[1], strides[0], 1))
    padded = np.pad(tensor, 100)[
        tuple(slice(100 + c, 100 + c + b) for c, b in zip(corner[::-1], box[::-1], strict=True))
    ]
    found = TensorMap.decode(raw_map(0, list(extents), list(strides), list(box)))
    data = np.zeros(found.box_bytes, np.uint8)
    for row in found.rows(corner):
        start = row.address - found.address
        data[row.box_offset : row.box_offset + row.size] = memory[start : start + row.size]
    np.testing.assert_array_equal(data.reshape(box[::-1]), padded)


def test_packed_fp4_counts_elements_and_moves_bytes() -> None:
    found = TensorMap.decode(raw_map(11, [100, 4], [64], [64, 2]))
    assert (found.row_bytes, found.box_bytes) == (32, 64)
    assert [(row.address - found.address, row.size) for row in found.rows((64, 3))] == [(3 * 64 + 32, 18)]


def test_stores_write_padding_up_to_16_bytes() -> None:
    found = TensorMap.decode(raw_map(1, [13, 4], [64], [32, 2]))
    assert [row.size for row in found.rows((8, 0))] == [10, 10]
    assert [row.size for row in found.rows((8, 0), store=True)] == [16, 16]
    assert not list(found.rows((16, 0), store=True))


def test_corners_that_hardware_refuses() -> None:
    found = TensorMap.decode(raw_map(0, [64, 4], [64], [32, 2]))
    assert list(found.rows((-16, -1)))
    for corner, store in (((8, 0), False), ((8, 0), True), ((-16, 0), True), ((0, -1), True)):
        with pytest.raises(MemoryFaultError, match="coordinate|negative"):
            list(found.rows(corner, store))


def test_fields_that_are_not_known_are_refused() -> None:
    good = raw_map(0, [64, 4], [64], [16, 2])
    TensorMap.decode(good)
    for byte in (12 + 4, 52, 53, 58, 60):
        bad = bytearray(good)
        bad[byte] = 1
        with pytest.raises(UnsupportedError):
            TensorMap.decode(bytes(bad))
    with pytest.raises(UnsupportedError, match="flags"):
        TensorMap.decode(raw_map(0, [64, 4], [64], [16, 2], flags=0x40003))
    for kind in (9, 12, 13, 14, 15):  # padded elements of 4 or 6 bits are among them
        with pytest.raises(UnsupportedError, match=f"type {kind},"):
            TensorMap.decode(raw_map(kind, [64, 4], [64], [16, 2]))
    with pytest.raises(MemoryFaultError, match="swizzle"):
        TensorMap.decode(raw_map(0, [64, 4], [64], [64, 2], flags=0x40002 | 1 << 13))
