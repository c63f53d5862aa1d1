"""Indexer keys: rotated and packed they equal the reference's bytes; what is not named stays as it was."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import index_entry as reference
from nvfp4_sgl.triton_kernels.entries import index_entry
from nvfp4_sgl.triton_kernels.entries.index_entry import page_bytes, store_index_keys
from tests.triton.support.resources import resources

POISON = 0xA5


def pool(pages: int, page_size: int, extra: int = 0) -> torch.Tensor:
    return torch.full((pages, page_bytes(page_size) + extra), POISON, dtype=torch.uint8)


def expected_pool(pages: int, page_size: int, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    expected = pool(pages, page_size)
    reference.write_rows(expected, page_size, slots, reference.hadamard(rows))
    return expected


def adversarial_keys() -> torch.Tensor:
    """fp32 [17, 128]: wide ranges, zeros of both signs, rows that rotate into ties of E4M3, what is not finite."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(17, 128, generator=generator)
    rows[1] *= torch.exp2(torch.randint(-30, 30, (128,), generator=generator).float())
    rows[2], rows[3] = 0.0, -0.0
    rows[4] *= 1e-7
    rows[5] = 0.0
    rows[5, 77] = -3.0  # one element: every rotated value has the same magnitude
    rows[6] = reference.hadamard(torch.arange(128).float() * 2 + 1)  # rotates into odd integers, ties at 448 / 255
    rows[7, ::7], rows[7, 1::7], rows[7, 2::7] = torch.nan, torch.inf, -torch.inf
    rows[8] = 3.4e38
    rows[9, 5] = torch.nan
    rows[10] = torch.where(torch.arange(128) % 2 == 0, 0.0, -0.0)
    rows[11] = 1e-4
    rows[12] = torch.randint(-4, 5, (128,), generator=generator).float()  # many sums that cancel
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 64])
def test_bytes_equal_the_reference(page_size: int, dtype: torch.dtype, device: str):
    rows = adversarial_keys().to(dtype)
    pages = max(2, 64 // page_size)
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(1))[: len(rows)]
    if page_size == 1:  # 132 bytes apart are not a multiple of 16
        wide = torch.full((pages, 144), POISON, dtype=torch.uint8).to(device)
        store_index_keys(rows.to(device), slots.int().to(device), wide, 1)
        found = wide[:, :132].cpu()
    else:
        found = pool(pages, page_size).to(device)
        store_index_keys(rows.to(device), slots.to(device), found, page_size)
    assert torch.equal(found.cpu(), expected_pool(pages, page_size, slots, rows))


def test_slots_outside_the_pool_are_left_out(device: str):
    rows = torch.randn(6, 128, generator=torch.Generator().manual_seed(3))
    slots = torch.tensor([-1, 5, 128, 2**40, -(2**40), 127])
    found = pool(2, 64).to(device)
    store_index_keys(rows.to(device), slots.to(device), found, 64)
    assert torch.equal(found.cpu(), expected_pool(2, 64, slots[[1, 5]], rows[[1, 5]]))


def test_rows_and_pages_may_lie_in_wider_buffers(device: str):
    wide_rows = torch.randn(5, 512, generator=torch.Generator().manual_seed(4))
    slots = torch.tensor([64, 0, 63, 65, 127])
    found = pool(2, 64, extra=64).to(device)
    store_index_keys(wide_rows.to(device)[:, 256:384], slots.to(device), found, 64)
    assert torch.equal(found[:, : page_bytes(64)].cpu(), expected_pool(2, 64, slots, wide_rows[:, 256:384]))
    assert bool((found[:, page_bytes(64) :] == POISON).all())


def test_page_bytes_are_the_layouts():
    assert all(page_bytes(size) == reference.page_bytes(size) for size in (1, 2, 64))
    assert index_entry.ENTRY_BYTES == 132


def test_no_rows(device: str):
    found = pool(1, 64).to(device)
    store_index_keys(torch.empty(0, 128, device=device), torch.empty(0, dtype=torch.int64, device=device), found, 64)
    assert bool((found == POISON).all())


def test_refusals():
    rows, slots, pages = torch.zeros(2, 128), torch.zeros(2, dtype=torch.int64), pool(1, 64)
    for arguments, message in [
        ((rows[:, :64], slots, pages, 64), "rows: expected shape"),
        ((rows.half(), slots, pages, 64), "rows: expected dtype"),
        ((torch.zeros(128, 2).T, slots, pages, 64), "rows: expected the last dimension"),
        ((rows, slots[:1], pages, 64), "slots: expected shape"),
        ((rows, slots.float(), pages, 64), "slots: expected dtype"),
        ((rows, slots, pages, 256), "pages of 256 entries"),
        ((rows, slots, pages.int(), 64), "pages: expected dtype"),
    ]:
        with pytest.raises(OperandError, match=message):
            store_index_keys(*arguments)


@pytest.mark.gpu
def test_a_pool_beyond_2_gib(device: str):
    pages = torch.full((262144, page_bytes(64)), POISON, dtype=torch.uint8, device=device)
    rows = torch.randn(8192, 128, generator=torch.Generator().manual_seed(6))
    slots = torch.randperm(262144 * 64, generator=torch.Generator().manual_seed(7))[:8192]
    store_index_keys(rows.to(device), slots.to(device), pages, 64)
    touched, index = (slots // 64).unique(return_inverse=True)
    assert int(touched.max()) * page_bytes(64) > 2**31
    assert torch.equal(pages[touched.to(device)].cpu(), expected_pool(len(touched), 64, index * 64 + slots % 64, rows))


def launches() -> None:
    slots = torch.zeros(16, dtype=torch.int64)
    store_index_keys(torch.zeros(16, 128, dtype=torch.bfloat16), slots, pool(8, 64), 64)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert len(found) == 1
    for usage in found:
        usage.require_no_spills()
        usage.require_exact_arithmetic()
        assert usage.count("fma") == 0
