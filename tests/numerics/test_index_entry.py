"""The 132-byte index key against its definition, and the Hadamard transform against matrices."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import index_entry
from tests.numerics import oracles
from tests.numerics.oracles import nearest_code, round_fp32


def entry_by_definition(row: list[float]) -> tuple[bytes, bytes]:
    """(128 data bytes, 4 scale bytes) of one row of fp32 values, in fractions."""
    largest = float(oracles.BF16_MAX)
    row = [0.0 if math.isnan(v) else min(max(v, -largest), largest) for v in row]
    amax = max(max(Fraction(abs(v)) for v in row), Fraction(float(np.float32(1e-4))))
    scale = round_fp32(amax / 448)
    inverse = round_fp32(1 / scale)
    data = bytearray()
    for v in row:
        code = nearest_code(round_fp32(Fraction(abs(v)) * inverse), oracles.E4M3_GRID)
        data.append(code | (0x80 if math.copysign(1, v) < 0 else 0))
    return bytes(data), struct.pack("<f", float(scale))


def test_every_byte_is_as_defined() -> None:
    x = oracles.awkward_rows(60, 128, seed=1).float() * 1.0001
    data, scale = index_entry.pack(x)
    assert scale.dtype == torch.float32
    for i, row in enumerate(x.tolist()):
        expected_data, expected_scale = entry_by_definition(row)
        assert bytes(data[i].tolist()) == expected_data
        assert struct.pack("<f", scale[i].item()) == expected_scale


def test_scale_of_every_bf16_maximum() -> None:
    values = oracles.all_bf16().float()
    x = torch.zeros(len(values), 128)
    x[:, 99] = values
    data, scale = index_entry.pack(x)
    expected = np.maximum(np.abs(values.numpy()), np.float32(1e-4)) / np.float32(448)
    assert np.array_equal(scale.numpy(), expected)
    back = index_entry.unpack(data, scale)
    assert torch.isfinite(back).all()
    kept = values.abs() >= 1e-4
    assert torch.allclose(back[kept, 99], values[kept], rtol=2**-22, atol=0)
    assert data[kept, 99].remainder(128).eq(126).all()  # the maximum is 448 in E4M3


def test_unpacking_rounds_once() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127][:128][None]
    scale = torch.tensor([0.0123456789])
    got = index_entry.unpack(codes, scale)[0].tolist()
    for value, code in zip(got, codes[0].tolist(), strict=True):
        magnitude = round_fp32(oracles.E4M3_GRID[code & 127] * Fraction(scale.item()))
        assert Fraction(value) == (-magnitude if code & 128 else magnitude)


def test_a_zero_key_has_the_floor_as_scale_and_no_nan() -> None:
    x = torch.zeros(2, 128)
    x[1] = float("nan")
    data, scale = index_entry.pack(x)
    assert data.eq(0).all()
    assert np.array_equal(scale.numpy(), np.full(2, np.float32(1e-4) / np.float32(448)))
    assert index_entry.unpack(data, scale).eq(0).all()


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_pages_are_as_defined_and_nothing_else_is_touched(page_size: int) -> None:
    assert index_entry.page_bytes(page_size) == page_size * 132
    generator = torch.Generator().manual_seed(page_size)
    n_pages = -(-20 // page_size) + 1
    pages = torch.full((n_pages, page_size * 132), 0xA5, dtype=torch.uint8)
    slots = torch.randperm(n_pages * page_size, generator=generator)[:20]
    x = oracles.awkward_rows(20, 128, seed=page_size)
    expected = [bytearray(b"\xa5" * page_size * 132) for _ in range(n_pages)]
    for slot, row in zip(slots.tolist(), x.float().tolist(), strict=True):
        page, offset = divmod(slot, page_size)
        data, scale = entry_by_definition(row)
        expected[page][offset * 128 : offset * 128 + 128] = data
        expected[page][page_size * 128 + offset * 4 : page_size * 128 + offset * 4 + 4] = scale
    index_entry.write_rows(pages, page_size, slots, x)
    assert [bytes(page.tolist()) for page in pages] == [bytes(page) for page in expected]
    again = torch.cat((slots.flip(0), slots[3:5]))
    values = index_entry.unpack(*index_entry.pack(x))
    assert torch.equal(index_entry.read_rows(pages, page_size, again), torch.cat((values.flip(0), values[3:5])))


def test_no_slots_are_no_error() -> None:
    pages = torch.zeros(1, index_entry.page_bytes(2), dtype=torch.uint8)
    none = torch.empty(0, dtype=torch.int64)
    index_entry.write_rows(pages, 2, none, torch.empty(0, 128))
    assert index_entry.read_rows(pages, 2, none).shape == (0, 128)


def test_wrong_input_is_named() -> None:
    pages = torch.zeros(2, index_entry.page_bytes(2), dtype=torch.uint8)
    with pytest.raises(OperandError, match=r"slots: expected values in \[0, 4\)"):
        index_entry.write_rows(pages, 2, torch.tensor([-1]), torch.zeros(1, 128))
    with pytest.raises(OperandError, match="index keys"):
        index_entry.pack(torch.zeros(1, 64))
    with pytest.raises(OperandError, match="hadamard: expected a last dimension of 128"):
        index_entry.hadamard(torch.zeros(3, 64))


def test_hadamard_is_the_sylvester_matrix() -> None:
    matrix = index_entry.hadamard(torch.eye(128))
    sign = [[-1 if (i & j).bit_count() % 2 else 1 for j in range(128)] for i in range(128)]
    expected = np.array(sign, dtype=np.float32) * np.float32(128**-0.5)  # every entry is ± one rounded constant
    assert np.array_equal(matrix.numpy(), expected)


def test_hadamard_adds_in_the_stated_order() -> None:
    """Bit for bit: butterflies at distances 1, 2, 4 … 64 in fp32, written with indices."""
    x = oracles.awkward_rows(24, 128, seed=2)
    x = x[torch.isfinite(x.float()).all(dim=1) & (x.float().abs().amax(dim=1) < 1e30)]
    y = x.float().numpy().copy()
    for stage in range(7):
        low = np.array([i for i in range(128) if not i >> stage & 1])
        high = low | 1 << stage
        y[:, low], y[:, high] = y[:, low] + y[:, high], y[:, low] - y[:, high]
    y *= np.float32(128**-0.5)
    assert np.array_equal(index_entry.hadamard(x).numpy(), y)


def test_hadamard_keeps_scores_and_spreads_an_outlier() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(5, 3, 128, generator=generator), torch.randn(7, 128, generator=generator)
    rotated_q, rotated_k = index_entry.hadamard(q), index_entry.hadamard(k)
    assert rotated_q.shape == q.shape
    assert torch.allclose(rotated_q @ rotated_k.T, q @ k.T, atol=2e-5)
    assert torch.allclose(index_entry.hadamard(rotated_q), q, atol=1e-6)
    k[:, 3] = 1000.0

    def error(x: torch.Tensor) -> float:
        return ((index_entry.unpack(*index_entry.pack(x)) - x).norm() / (x - x.mean()).norm()).item()

    assert error(index_entry.hadamard(k)) < 0.05
