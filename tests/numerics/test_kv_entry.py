"""The 584-byte key-value entry against a definition in ``struct`` and integers, byte by byte, page by page."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import kv_entry
from tests.numerics import oracles
from tests.numerics.oracles import ceil_log2, nearest_code


def entry_by_definition(row: list[float]) -> tuple[bytes, bytes]:
    """(576 data bytes, 8 scale bytes) of one row of fp32 values, in integers and fractions."""
    largest = float(oracles.BF16_MAX)
    row = [0.0 if math.isnan(v) else min(max(v, -largest), largest) for v in row]
    fp8_largest = float(oracles.FP8_VALUE_MAX)
    row[:448] = [min(max(v, -fp8_largest), fp8_largest) for v in row[:448]]
    data, scales = bytearray(), bytearray()
    for block in range(7):
        values = row[block * 64 : block * 64 + 64]
        amax = max(Fraction(abs(v)) for v in values)
        exponent = ceil_log2(max(amax, Fraction(float(np.float32(1e-4)))) / 448)
        scales.append(exponent + 127)
        for v in values:
            code = nearest_code(Fraction(abs(v)) / Fraction(2) ** exponent, oracles.E4M3_GRID)
            data.append(code | (0x80 if math.copysign(1, v) < 0 else 0))
    for v in row[448:]:
        data += struct.pack("<H", oracles.bf16_bits(v))
    return bytes(data), bytes(scales) + b"\0"


def awkward_kv(rows: int, seed: int = 0) -> torch.Tensor:
    """fp32 [rows, 512], not on the bf16 grid, with tiny and huge blocks."""
    x = oracles.awkward_rows(rows, 512, seed).float()
    x *= 1 + torch.rand(rows, 512, generator=torch.Generator().manual_seed(seed)) * 2**-9
    x[1::5, 64:128] *= 1e-6
    x[2::5, 128:192] = torch.sign(x[2::5, 128:192]) * 448 * 2.0**-3  # exactly on an exponent's step
    x[2::5, 130] *= 1 + 2.0**-23  # and one ulp above it
    return x


def test_every_byte_is_as_defined() -> None:
    x = awkward_kv(24)
    data, scales = kv_entry.pack(x)
    for i, row in enumerate(x.tolist()):
        expected_data, expected_scales = entry_by_definition(row)
        assert bytes(data[i].tolist()) == expected_data
        assert bytes(scales[i].tolist()) == expected_scales


def test_every_bf16_as_a_block_maximum() -> None:
    """65280 blocks, each with one bf16 value as its maximum: exponent, code and value exact."""
    values = oracles.all_bf16().float()
    rows = -(-len(values) // 7)
    nope = torch.zeros(rows * 7, 64)
    nope[: len(values), 17] = values
    x = torch.cat((nope.view(rows, 448), torch.zeros(rows, 64)), dim=1)
    data, scales = kv_entry.pack(x)
    assert scales[:, 7].eq(0).all()
    exponents = scales[:, :7].flatten()[: len(values)].tolist()
    values = values.clamp(-float(oracles.FP8_VALUE_MAX), float(oracles.FP8_VALUE_MAX))
    floor = Fraction(float(np.float32(1e-4)))
    expected = {v: ceil_log2(max(Fraction(v), floor) / 448) + 127 for v in values.abs().unique().tolist()}
    assert exponents == [expected[v] for v in values.abs().tolist()]
    scaled = np.ldexp(values.numpy().astype(np.float64), 127 - np.array(exponents)).astype(np.float32)
    codes = data[:, :448].reshape(-1, 64)[: len(values), 17]
    assert np.array_equal(codes.numpy(), oracles.e4m3_codes(scaled))
    back = kv_entry.unpack(data, scales)[:, :448].reshape(-1, 64)[: len(values), 17]
    large = values.abs() >= 1e-4
    assert ((back - values).abs()[large] <= values.abs()[large] / 16).all()


def test_every_bf16_survives_in_the_rope_tail() -> None:
    values = oracles.all_bf16().view(-1, 64)
    x = torch.zeros(len(values), 512, dtype=torch.bfloat16)
    x[:, 448:] = values
    back = kv_entry.unpack(*kv_entry.pack(x))[:, 448:].to(torch.bfloat16)
    assert torch.equal(back.view(torch.int16), values.view(torch.int16))


def test_every_code_under_every_scale_unpacks_exactly_and_fits_bf16() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].repeat(2)[:448]
    data = torch.cat((codes, torch.zeros(128, dtype=torch.uint8))).repeat(245, 1)
    scales = torch.arange(245, dtype=torch.uint8)[:, None].repeat(1, 8)  # 448·2^(244−127) is still finite
    scales[:, 7] = 0xA5  # ignored
    got = kv_entry.unpack(data, scales)
    expected = np.ldexp(oracles.e4m3_values(codes.numpy())[None], np.arange(245)[:, None] - 127)
    normal = slice(10, None)  # below, the products are fp32 subnormals at the edge of bf16
    assert np.array_equal(got[:, :448].double().numpy(), expected)
    assert torch.equal(got[normal].to(torch.bfloat16).float(), got[normal])


def test_packing_what_was_unpacked_gives_the_same_values() -> None:
    """A dequantised row re-enters the cache unchanged: its block maxima are on the E4M3 grid."""
    x = awkward_kv(36, seed=3)
    once = kv_entry.unpack(*kv_entry.pack(x))
    assert torch.isfinite(once).all()
    assert torch.equal(kv_entry.unpack(*kv_entry.pack(once)), once)
    assert torch.equal(kv_entry.unpack(*kv_entry.pack(once.to(torch.bfloat16))), once)


def test_bf16_and_fp32_sources_differ_only_by_what_the_caller_rounded() -> None:
    x = awkward_kv(12, seed=4)
    rounded = x.to(torch.bfloat16)
    for one, two in zip(kv_entry.pack(rounded), kv_entry.pack(rounded.float()), strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(kv_entry.pack(rounded)[0], kv_entry.pack(x)[0])


def test_zeros_and_nan_and_infinity() -> None:
    x = torch.zeros(3, 512)
    x[1] = float("nan")
    x[2] = -float("inf")
    data, scales = kv_entry.pack(x)
    assert data[:2].eq(0).all()
    assert scales[:2].tolist() == [[127 - 22] * 7 + [0]] * 2
    back = kv_entry.unpack(data, scales)
    assert back[:2].eq(0).all()
    assert torch.isfinite(back).all()
    assert back[2, 448:].eq(-float(oracles.BF16_MAX)).all()


@pytest.mark.parametrize(("page_size", "size"), [(256, 149760), (64, 37440), (2, 1728), (1, 1152)])
def test_page_bytes(page_size: int, size: int) -> None:
    assert kv_entry.page_bytes(page_size) == size == math.ceil(584 * page_size / 576) * 576


@pytest.mark.parametrize("page_size", [1, 2, 5, 64])
def test_pages_are_as_defined_and_nothing_else_is_touched(page_size: int) -> None:
    generator = torch.Generator().manual_seed(page_size)
    n_pages = -(-12 // page_size) + 2
    pages = torch.full((n_pages, kv_entry.page_bytes(page_size)), 0xA5, dtype=torch.uint8)
    slots = torch.randperm(n_pages * page_size, generator=generator)[:12]
    x = awkward_kv(12, seed=page_size)
    expected = [bytearray(b"\xa5" * kv_entry.page_bytes(page_size)) for _ in range(n_pages)]
    for slot, row in zip(slots.tolist(), x.tolist(), strict=True):
        page, offset = divmod(slot, page_size)
        data, scales = entry_by_definition(row)
        expected[page][offset * 576 : offset * 576 + 576] = data
        start = page_size * 576 + offset * 8
        expected[page][start : start + 8] = scales
    kv_entry.write_rows(pages, page_size, slots, x)
    assert [bytes(page.tolist()) for page in pages] == [bytes(page) for page in expected]

    again = slots[torch.randint(0, 12, (40,), generator=generator)]
    position = {slot: i for i, slot in enumerate(slots.tolist())}
    rows = kv_entry.unpack(*kv_entry.pack(x))[[position[slot] for slot in again.tolist()]]
    assert torch.equal(kv_entry.read_rows(pages, page_size, again), rows)
    assert torch.equal(kv_entry.read_rows(pages, page_size, again.int()), rows)


def test_pages_that_are_a_view_of_a_larger_buffer_are_written_in_place() -> None:
    buffer = torch.zeros(3, 4, kv_entry.page_bytes(2), dtype=torch.uint8)
    pages = buffer[:, 1]
    x = awkward_kv(2, seed=8)
    kv_entry.write_rows(pages, 2, torch.tensor([5, 0]), x)
    assert torch.equal(
        kv_entry.read_rows(buffer[:, 1].contiguous(), 2, torch.tensor([5, 0])), kv_entry.unpack(*kv_entry.pack(x))
    )
    assert buffer[:, [0, 2, 3]].eq(0).all()


def test_no_slots_are_no_error() -> None:
    pages = torch.zeros(1, kv_entry.page_bytes(2), dtype=torch.uint8)
    none = torch.empty(0, dtype=torch.int64)
    kv_entry.write_rows(pages, 2, none, torch.empty(0, 512))
    assert kv_entry.read_rows(pages, 2, none).shape == (0, 512)


def test_wrong_input_is_named() -> None:
    pages = torch.zeros(2, kv_entry.page_bytes(2), dtype=torch.uint8)
    one = torch.zeros(1, 512)
    for slot in (-1, 4):
        with pytest.raises(OperandError, match=rf"slots: expected values in \[0, 4\) \(2 pages of 2\), found {slot}"):
            kv_entry.write_rows(pages, 2, torch.tensor([slot]), one)
        with pytest.raises(OperandError, match="mask padding before the call"):
            kv_entry.read_rows(pages, 2, torch.tensor([0, slot]))
    with pytest.raises(
        OperandError, match=r"pages: expected shape \[n_pages, 37440\] for page_size 64, found \(2, 1728\)"
    ):
        kv_entry.read_rows(pages, 64, torch.tensor([0]))
    with pytest.raises(OperandError, match=r"slots: expected shape \(1,\), found \(2,\)"):
        kv_entry.write_rows(pages, 2, torch.tensor([0, 1]), one)
    with pytest.raises(OperandError, match=r"key-value rows: expected shape \[rows, 512\]"):
        kv_entry.pack(torch.zeros(1, 576))
    with pytest.raises(OperandError, match="key-value scales"):
        kv_entry.unpack(torch.zeros(1, 576, dtype=torch.uint8), torch.zeros(1, 7, dtype=torch.uint8))
    with pytest.raises(OperandError, match="slots: expected dtype"):
        kv_entry.read_rows(pages, 2, torch.tensor([0.0]))
    with pytest.raises(OperandError, match="page_size"):
        kv_entry.page_bytes(0)
