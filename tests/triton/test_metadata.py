"""The plan that the device builds equals the reference's, wherever a pass stands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cache.plan import Batch, plan_batch
from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.triton_kernels.plan.batch import padded_requests
from nvfp4_sgl.triton_kernels.plan.resolve import BLOCK_COLUMNS, Plan, resolve
from tests.triton.support.resources import resources

WINDOW = 128
WRITTEN_OF_BATCH = ("owners", "starts", "bounds", "pages", "window_slots")
WRITTEN = ("window_write", "window_lengths", "entry_slots", "entry_lengths")
"""What ``resolve`` writes, of a plan's batch and of the plan."""
GUARD_ROWS = 64
"""More than the requests that a kernel pads a few to."""


def sequences(starts: list[int], ends: list[int], *, seed: int = 0) -> Batch:
    """Sequences whose pages are dealt at random, request slots too; columns past the ends are poisoned."""
    generator = torch.Generator().manual_seed(seed)
    capacity = -(-max(ends) // 256) * 256 + 256
    pages = len(ends) * capacity // 256
    order = torch.randperm(pages, generator=generator) + 1
    full = (order[:, None] * 256 + torch.arange(256)).flatten().view(len(ends), capacity)
    for row, end in zip(full, ends, strict=True):
        row[end:] = 2**30
    swa_pages = torch.randperm(pages + 1, generator=generator)
    full_to_swa = (swa_pages[:, None] * 256 + torch.arange(256)).flatten()
    requests = torch.randperm(len(ends) + 3, generator=generator)[: len(ends)]
    return Batch(torch.tensor(starts), torch.tensor(ends), requests, full, full_to_swa)


def device_plan(batch: Batch, device: str, *, longest: int, decode: bool, is_block: bool = False) -> Plan:
    """``resolve`` on poisoned outputs, behind whose rows nothing may be stored."""
    counts = batch.ends - batch.starts
    positions = torch.cat([torch.arange(a, b) for a, b in zip(batch.starts, batch.ends, strict=True)])
    slots = torch.full((int(batch.requests.max()) + 1, batch.full_slots.shape[1] + 5), 2**30, dtype=torch.int32)
    slots[batch.requests, : batch.full_slots.shape[1]] = batch.full_slots.int()
    plan = Plan.allocate(
        positions.to(device), batch.requests.to(device), slots.to(device), batch.full_to_swa.to(device),
        window=WINDOW, longest=longest, tokens_each=1 if decode else None, is_block=is_block,
    )  # fmt: skip
    behind = []

    def guarded(tensor: Tensor) -> Tensor:
        rows = tensor.new_full((len(tensor) + GUARD_ROWS, *tensor.shape[1:]), -77)
        behind.append(rows[len(tensor) :])
        return rows[: len(tensor)]

    of_batch: dict[str, Any] = {name: guarded(getattr(plan.batch, name)) for name in WRITTEN_OF_BATCH}
    written: dict[str, Any] = {name: guarded(getattr(plan, name)) for name in WRITTEN}
    plan = replace(plan, batch=replace(plan.batch, **of_batch), **written)
    resolve(plan, batch.ends.to(device), None if decode else counts.int().to(device))
    assert all(bool((rows == -77).all()) for rows in behind), "stored behind the last row"
    return plan


CASES = {
    "one token": ([0], [1]),
    "decode": ([0, 126, 127, 128, 255, 256, 700], [1, 127, 128, 129, 256, 257, 701]),
    "prefill": ([0, 0, 0], [1, 300, 127]),
    "chunks": ([256, 131, 0, 511], [290, 132, 5, 513]),
    "a request that adds nothing": ([64, 10, 3], [65, 10, 5]),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, device: str):
    starts, ends = CASES[name]
    batch = sequences(starts, ends)
    decode = name in ("one token", "decode")
    found = device_plan(batch, device, longest=1024, decode=decode)
    expected = plan_batch(batch, window=WINDOW, ratios=frozenset({4, 128}))
    owners = torch.repeat_interleave(torch.arange(len(ends)), batch.ends - batch.starts)
    assert torch.equal(found.batch.owners.cpu().long(), owners)
    assert found.batch.starts.tolist() == starts
    assert found.batch.bounds.tolist() == expected.bounds
    assert torch.equal(found.window_write.cpu().long(), expected.swa_write_slots)
    assert torch.equal(found.window_slots.cpu().long(), expected.swa_slots)
    assert torch.equal(found.window_lengths.cpu().long(), (expected.swa_slots >= 0).sum(1))
    lengths = (expected.positions + 1) // 128
    assert torch.equal(found.entry_lengths.cpu().long(), lengths)
    for row, length, wanted in zip(found.entry_slots.cpu(), lengths.tolist(), expected.hca_slots, strict=True):
        assert torch.equal(row[:length].long(), wanted[:length])
        assert bool((row[length:] == -77).all()), "written beyond what a query sees"
    for row, start, end, full in zip(found.batch.pages.cpu(), starts, ends, batch.full_slots, strict=True):
        held = -(-end // 256) if end > start else 0
        assert torch.equal(row[:held].long(), full[::256][:held])
        assert bool((row[held:] == -77).all()), "written beyond a request's pages, or of one that adds nothing"


BLOCKS = {
    "equal": ([0, 3, 124, 125, 128, 253, 300], [5, 8, 129, 130, 133, 258, 305]),
    "of one token": ([0, 127, 500], [1, 128, 501]),
    "as many as there may be": ([40, 250], [40 + BLOCK_COLUMNS, 250 + BLOCK_COLUMNS]),
    "ragged": ([7, 256, 0], [16, 258, 1]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_equal_the_reference(name: str, device: str):
    """Every token of a block sees the window in front of it and all of the block."""
    starts, ends = BLOCKS[name]
    batch = sequences(starts, ends)
    found = device_plan(batch, device, longest=1024, decode=False, is_block=True)
    expected = plan_batch(batch, window=WINDOW, ratios=frozenset(), is_block=True)
    seen = expected.swa_slots.shape[1]
    assert found.is_block and found.batch.bounds.tolist() == expected.bounds
    assert torch.equal(found.window_write.cpu().long(), expected.swa_write_slots)
    assert torch.equal(found.window_slots[:, :seen].cpu().long(), expected.swa_slots)
    assert bool((found.window_slots[:, seen:] == -1).all())
    assert torch.equal(found.window_lengths.cpu().long(), (expected.swa_slots >= 0).sum(1))


def test_every_page_and_entry_of_a_long_request(device: str):
    """More pages, and more ratio-128 entries, than a program resolves at once: the first entries are kept."""
    end = 256 * 1030 + 1
    batch = sequences([end - 1, 10], [end, 11])
    found = device_plan(batch, device, longest=end, decode=True)
    assert torch.equal(found.batch.pages[0, :1031].cpu().long(), batch.full_slots[0, :end:256])
    assert bool((found.batch.pages[0, 1031:] == -77).all())
    entries = batch.full_slots[0, 127 : end - 1 : 128] // 128  # an entry has the slot of its last token
    assert len(entries) == 2060 and found.entry_lengths.tolist() == [2060, 0]
    assert torch.equal(found.entry_slots[0, :2060].cpu().long(), entries)
    assert bool((found.entry_slots[0, 2060:] == -77).all()) and bool((found.entry_slots[1] == -77).all())


def test_no_page_beyond_the_plan_is_written(device: str):
    """A request that is longer than the plan was laid out for: the next request's pages stay its own."""
    batch = sequences([256 * 20, 10], [256 * 20 + 1, 11])
    found = device_plan(batch, device, longest=256 * 16, decode=True)
    assert found.batch.pages.shape[1] == 16
    assert torch.equal(found.batch.pages[0].cpu().long(), batch.full_slots[0, : 256 * 16 : 256])
    assert int(found.batch.pages[1, 0]) == int(batch.full_slots[1, 0]) and bool((found.batch.pages[1, 1:] == -77).all())
    assert found.entry_lengths.tolist() == [found.entry_slots.shape[1], 0] == [32, 0]
    assert bool((found.entry_slots[1] == -77).all())


def test_nothing_else_depends_on_the_tables(device: str):
    """What the scheduler changes afterwards changes nothing: a batch refers to neither table."""
    plan = device_plan(sequences([0, 700], [1, 701]), device, longest=1024, decode=True)
    tables = {plan.slots.untyped_storage().data_ptr(), plan.full_to_swa.untyped_storage().data_ptr()}
    tensors = (value for value in vars(plan.batch).values() if isinstance(value, torch.Tensor))
    held = (*tensors, plan.entry_slots, plan.window_write)
    assert not tables & {tensor.untyped_storage().data_ptr() for tensor in held}


def test_padding_of_a_captured_graph_stays_in_the_dummy_page(device: str):
    """Request slot 0, length 1: everything points into page 0."""
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    slots = torch.zeros(2, 256, dtype=torch.int32, device=device)
    plan = Plan.allocate(
        zeros, zeros, slots, torch.arange(512, device=device), window=WINDOW, longest=512, tokens_each=1
    )
    resolve(plan, zeros + 1)
    assert plan.window_write.tolist() == [0, 0, 0] and plan.entry_lengths.tolist() == [0, 0, 0]
    assert plan.window_slots[:, 0].tolist() == [0, 0, 0] and bool((plan.window_slots[:, 1:] == -1).all())


def test_refusals(device: str):
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    slots = torch.zeros(2, 256, dtype=torch.int32, device=device)
    plan = Plan.allocate(zeros, zeros[:2], slots, zeros, window=WINDOW, longest=512, tokens_each=None)
    with pytest.raises(OperandError, match="positions: expected shape"):
        resolve(plan, zeros[:2])
    with pytest.raises(OperandError, match="seq_lens: expected shape"):
        resolve(plan, zeros, zeros[:2])
    with pytest.raises(OperandError, match="slots: expected dtype"):
        wrong = Plan.allocate(zeros, zeros[:2], slots.long(), zeros, window=WINDOW, longest=512, tokens_each=None)
        resolve(wrong, zeros[:2], zeros[:2])
    with pytest.raises(OperandError, match="window_slots' columns: expected one of .128, 144., found 64"):
        narrow = replace(plan.batch, window_slots=plan.window_slots[:, :64].contiguous())
        resolve(replace(plan, batch=narrow), zeros[:2], zeros[:2])
    with pytest.raises(OperandError, match="window of a block: expected a value in .16, .* found 8"):
        short = Plan.allocate(zeros, zeros[:2], slots, zeros, window=8, longest=512, tokens_each=None, is_block=True)
        resolve(short, zeros[:2], zeros[:2])


def launches() -> None:
    zeros = torch.zeros(16, dtype=torch.int64)
    plan = Plan.allocate(
        zeros, zeros, torch.zeros(16, 1024, dtype=torch.int32), zeros, window=WINDOW, longest=1024, tokens_each=1
    )
    resolve(plan, zeros)
    resolve(plan, zeros, zeros)
    tables = torch.zeros(16, 1024, dtype=torch.int32), zeros
    block = Plan.allocate(zeros, zeros, *tables, window=WINDOW, longest=1024, tokens_each=None, is_block=True)
    resolve(block, zeros, zeros)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    for usage in resources(__name__):
        if usage.architecture == architecture:
            usage.require_no_spills()


def test_a_program_holds_one_request_or_warps_of_them() -> None:
    assert [padded_requests(count) for count in (1, 2, 31, 32, 33, 64, 65)] == [1, 32, 32, 32, 64, 64, 128]
