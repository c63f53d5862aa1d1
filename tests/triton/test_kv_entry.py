"""Key-value entries: packed rows equal the reference's bytes; what is not named stays as it was."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import kv_entry as reference
from nvfp4_sgl.ops.rope import inverse_frequencies, rms_norm_rope
from nvfp4_sgl.triton_kernels.common.rope import rope_cos_sin
from nvfp4_sgl.triton_kernels.entries import kv_entry
from nvfp4_sgl.triton_kernels.entries.kv_entry import norm_rope_store_kv, page_bytes, store_kv_entries
from tests.triton.support.resources import resources

POISON = 0xA5
EPS = 1e-6


def pool(pages: int, page_size: int, extra: int = 0) -> torch.Tensor:
    return torch.full((pages, page_bytes(page_size) + extra), POISON, dtype=torch.uint8)


def adversarial_rows() -> torch.Tensor:
    """fp32 [20, 512]: wide ranges, block maxima at and next to scale boundaries, ties of E4M3, what is not finite."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 512, generator=generator)
    rows[1] *= torch.exp2(torch.randint(-40, 40, (512,), generator=generator).float())
    rows[2] = 0.0
    rows[3] = -0.0
    rows[4] *= 1e-6
    for row, maximum in enumerate((448.0, 448.0 * 2**-7, 3.5, 7.0), 5):
        rows[row] = rows[row].clamp(-0.1, 0.1) * maximum
        rows[row, 0::64] = maximum
        rows[row, 1::128] = torch.nextafter(torch.tensor(maximum), torch.tensor(torch.inf))
    rows[9] = torch.arange(512).float() / 16 + 1 / 32  # ties
    rows[10, ::7], rows[10, 1::7], rows[10, 2::7] = torch.nan, torch.inf, -torch.inf
    rows[11] = 3.4e38
    rows[12] = torch.randint(0, 2**31 - 1, (512,), generator=generator).to(torch.int32).view(torch.float32)
    rows[13] = 1.0 + torch.arange(512) * 2.0**-9  # ties of bf16 in the tail
    rows[14] = 1e-4
    rows[15] = torch.nextafter(torch.tensor(1e-4), torch.tensor(1.0))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [2, 64, 256])
def test_bytes_equal_the_reference(page_size: int, dtype: torch.dtype, device: str):
    rows = adversarial_rows().to(dtype)
    pages = max(2, 40 // page_size)
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(1))[: len(rows)]
    expected = pool(pages, page_size)
    reference.write_rows(expected, page_size, slots, rows)
    found = pool(pages, page_size).to(device)
    store_kv_entries(rows.to(device), slots.int().to(device), found, page_size)
    assert torch.equal(found.cpu(), expected)


def test_slots_outside_the_pool_are_left_out(device: str):
    rows = torch.randn(6, 512, generator=torch.Generator().manual_seed(3))
    slots = torch.tensor([-1, 5, 128, 2**40, -(2**40), 127])
    expected = pool(2, 64)
    reference.write_rows(expected, 64, slots[[1, 5]], rows[[1, 5]])
    found = pool(2, 64).to(device)
    store_kv_entries(rows.to(device), slots.to(device), found, 64)
    assert torch.equal(found.cpu(), expected)


def test_norm_rotation_and_store(device: str):
    generator = torch.Generator().manual_seed(4)
    wide = (torch.randn(9, 1536, generator=generator) * 3).to(torch.bfloat16)
    x, weight = wide[:, 1024:], (torch.rand(512, generator=generator) + 0.5).to(torch.bfloat16)
    positions = torch.tensor([0, 1, 127, 128, 65535, 300001, 1048574, 1048575, 77])
    frequencies = inverse_frequencies(64, 10000.0)
    slots = torch.tensor([3, 0, 511, 256, 255, 257, 100, 400, 7])
    expected = pool(2, 256)
    rows = rms_norm_rope(x, weight, EPS, positions, frequencies, out_dtype=torch.float32)
    reference.write_rows(expected, 256, slots, rows)

    cos_sin = rope_cos_sin(positions.to(device), frequencies.to(device), torch.full((9, 64), torch.nan, device=device))
    found = pool(2, 256).to(device)
    norm_rope_store_kv(wide.to(device)[:, 1024:], weight.to(device), EPS, cos_sin, slots.to(device), found, 256)
    found = found.cpu()

    data, scales = reference.FORMAT.read(found, 256, slots)
    expected_data, expected_scales = reference.FORMAT.read(expected, 256, slots)
    assert torch.equal(scales, expected_scales)
    codes, expected_codes = data[:, :448].int(), expected_data[:, :448].int()
    assert int((codes - expected_codes).abs().max()) <= 1
    assert float((codes != expected_codes).float().mean()) < 1e-3
    tail, expected_tail = (d[:, 448:].contiguous().view(torch.int16).int() for d in (data, expected_data))
    assert int((tail - expected_tail).abs().max()) <= 1
    # Nothing else was touched.
    for into, values in zip(reference.FORMAT.regions(found, 256), (expected_data, expected_scales), strict=True):
        into[slots // 256, slots % 256] = values
    assert torch.equal(found, expected)


def test_pages_may_lie_in_a_wider_buffer(device: str):
    rows = torch.randn(2, 512, generator=torch.Generator().manual_seed(5))
    wide = pool(3, 64, extra=64).to(device)
    store_kv_entries(rows.to(device), torch.tensor([1, 130], device=device), wide, 64)
    assert torch.equal(
        reference.unpack(*reference.pack(rows)),
        reference.read_rows(wide[:, : page_bytes(64)].cpu().contiguous(), 64, torch.tensor([1, 130])),
    )
    assert bool((wide[:, page_bytes(64) :] == POISON).all())


def test_page_bytes_are_the_layouts():
    assert all(page_bytes(size) == reference.page_bytes(size) for size in (1, 2, 63, 64, 128, 256))
    assert kv_entry.ENTRY_BYTES == 584


def test_refusals():
    rows, slots, pages = torch.zeros(2, 512), torch.zeros(2, dtype=torch.int64), pool(1, 64)
    cos_sin, weight = torch.zeros(2, 64), torch.ones(512)
    for arguments, message in [
        ((rows[:, :256], slots, pages, 64), "rows: expected shape"),
        ((rows.half(), slots, pages, 64), "rows: expected dtype"),
        ((rows, slots[:1], pages, 64), "slots: expected shape"),
        ((rows, slots.float(), pages, 64), "slots: expected dtype"),
        ((rows, slots, pages, 256), "pages of 256 entries"),
        ((rows, slots, pages.int(), 64), "pages: expected dtype"),
    ]:
        with pytest.raises(OperandError, match=message):
            store_kv_entries(*arguments)
    with pytest.raises(OperandError, match="rope_dim of cos_sin"):
        norm_rope_store_kv(rows, weight, EPS, cos_sin[:, :32].contiguous(), slots, pages, 64)
    with pytest.raises(OperandError, match="weight: expected shape"):
        norm_rope_store_kv(rows, weight[:64], EPS, cos_sin, slots, pages, 64)


@pytest.mark.gpu
def test_a_pool_beyond_2_gib(device: str):
    pages = torch.full((16000, page_bytes(256)), POISON, dtype=torch.uint8, device=device)
    rows = torch.randn(8192, 512, generator=torch.Generator().manual_seed(6))
    slots = torch.randperm(16000 * 256, generator=torch.Generator().manual_seed(7))[:8192]
    store_kv_entries(rows.to(device), slots.to(device), pages, 256)
    touched, index = (slots // 256).unique(return_inverse=True)
    assert int(touched.max()) * page_bytes(256) > 2**31
    expected = pool(len(touched), 256)
    reference.write_rows(expected, 256, index * 256 + slots % 256, rows)
    assert torch.equal(pages[touched.to(device)].cpu(), expected)


def launches() -> None:
    rows = torch.zeros(16, 512, dtype=torch.bfloat16)
    slots, cos_sin = torch.zeros(16, dtype=torch.int64), torch.zeros(16, 64)
    norm_rope_store_kv(rows, rows[0], EPS, cos_sin, slots, pool(8, 256), 256)
    store_kv_entries(rows.float(), slots.int(), pool(8, 2), 2)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert len(found) == 2
    for usage in found:
        usage.require_no_spills()
        usage.require_exact_arithmetic()
        assert usage.count("fma") == 0
