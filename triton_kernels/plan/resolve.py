"""The plan of a pass, built on the device: the slots that its tokens write and see (specification §3.3, §4.3).

Two launches before the first layer, whose results all layers share. They can be part of a captured decode graph,
because sizes come from shapes alone. Nothing else reads the scheduler's tables of slots: while the layers run, the
scheduler may already change them for the next pass.

Resolves window slots and ratio-128 entries, which follow from positions, and copies the requests' pages. It does not
resolve ratio-4 entries: each layer selects its own (``indexer.topk``). Supports up to :data:`MAX_REQUESTS` requests and
windows of a power of two.

Floor: the slots that are written, 4 bytes each, and as many read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats.checks import (
    once,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_one_of,
    require_power_of_two,
    require_range,
    require_rows,
    require_same_device,
    require_shape,
)

from ..common.integers import cdiv
from ..common.overlap import OVERLAPPED, after_previous
from .batch import PAGE_TOKENS, Batch, padded_requests

BLOCK_COLUMNS = 16
"""Columns of ``window_slots`` for the tokens of a draft's block, beside those of the window in front of it: the most
that a block may have, and a multiple of 16, as strides are (:meth:`Plan.allocate`)."""
MAX_REQUESTS = 4096
"""Most requests of a pass: one program computes the prefix sum over all."""
BLOCK = 1024
"""Entries that a program resolves at once. With 128, the 8192 entries of a million tokens took an H200 17 us."""


@triton.jit(do_not_specialize_on_alignment=["requests"])
def _split(seq_lens, new_tokens, starts, bounds, requests, NEW: tl.constexpr, BLOCK: tl.constexpr):
    """Compute ``starts`` and ``bounds`` from lengths, in one program; without NEW every request adds one token."""
    after_previous()
    request = tl.arange(0, BLOCK)
    inside = request < requests
    added = inside.to(tl.int32)
    if NEW:
        added = tl.load(new_tokens + request, mask=inside, other=0).to(tl.int32)
    length = tl.load(seq_lens + request, mask=inside, other=0).to(tl.int32)
    tl.store(starts + request, length - added, mask=inside)
    tl.store(bounds + 1 + request, tl.cumsum(added, axis=0), mask=inside)
    tl.store(bounds + request, tl.zeros_like(added), mask=request == 0)


@triton.jit(do_not_specialize_on_alignment=["count"])
def _resolve(
    positions,
    starts,
    bounds,
    requests,
    slots,
    slots_row,
    full_to_swa,
    owners,
    pages,
    pages_row,
    page_columns,
    window_write,
    window_slots,
    window_lengths,
    entry_slots,
    entry_lengths,
    count,
    entry_columns,
    WINDOW: tl.constexpr,
    AHEAD: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Resolve the window slots and ratio-RATIO entry slots of one token, and find the request that owns it.

    With AHEAD more columns each token sees all new tokens of its request, the last first, then the window before them.
    The program of a request's first token copies the request's pages.
    """
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    request = tl.arange(0, BLOCK_B)
    ends = tl.load(bounds + 1 + request, mask=request < count, other=2147483647)
    owner = tl.sum((ends <= token).to(tl.int32), axis=0)
    position = tl.load(positions + token)
    row = slots + tl.load(requests + owner) * slots_row
    if AHEAD == 0:
        back = tl.arange(0, WINDOW)
        seen = position - back >= 0
        full = tl.load(row + position - back, mask=seen, other=0)
        swa = tl.load(full_to_swa + full, mask=seen, other=-1).to(tl.int32)
        tl.store(owners + token, owner)
        tl.store(window_slots + token * WINDOW + back, swa)
        tl.store(window_write + token, tl.sum(tl.where(back == 0, swa, 0), axis=0))
        tl.store(window_lengths + token, tl.minimum(position + 1, WINDOW).to(tl.int32))
    else:
        front = tl.load(starts + owner)
        added = tl.load(bounds + owner + 1) - tl.load(bounds + owner)
        back = tl.arange(0, 2 * WINDOW)
        place_back = front + added - 1 - back
        seen = (place_back >= 0) & (place_back >= front - WINDOW)
        full = tl.load(row + place_back, mask=seen, other=0)
        swa = tl.load(full_to_swa + full, mask=seen, other=-1).to(tl.int32)
        tl.store(owners + token, owner)
        tl.store(window_slots + token * (WINDOW + AHEAD) + back, swa, mask=back < WINDOW + AHEAD)
        tl.store(window_write + token, tl.load(full_to_swa + tl.load(row + position)).to(tl.int32))
        tl.store(window_lengths + token, tl.minimum(tl.minimum(front, WINDOW) + added, WINDOW + AHEAD))
    entries = tl.minimum((position + 1) // RATIO, entry_columns).to(tl.int32)
    tl.store(entry_lengths + token, entries)
    for begin in range(0, entries, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        inside = entry < entries
        # The entries of a page are contiguous, so the page's first slot determines them all; neighbouring lanes read
        # the same one.
        place = entry % (PAGE // RATIO)
        page = tl.load(row + (entry - place).to(tl.int64) * RATIO, mask=inside, other=0)
        tl.store(entry_slots + token * entry_columns + entry, page // RATIO + place, mask=inside)
    first = tl.load(bounds + owner)
    if token == first:
        end = tl.load(starts + owner) + tl.load(bounds + owner + 1) - first
        held = tl.minimum(tl.cdiv(end, PAGE), page_columns)
        for begin in range(0, held, BLOCK):
            number = begin + tl.arange(0, BLOCK)
            slot = tl.load(row + number.to(tl.int64) * PAGE, mask=number < held, other=0)
            tl.store(pages + owner.to(tl.int64) * pages_row + number, slot, mask=number < held)


@dataclass(frozen=True)
class Plan:
    """A batch and its slots. A captured graph keeps one for each of its sizes.

    Attributes:
        batch: what the cache kernels read; :func:`resolve` writes all of it but ``positions`` and ``requests``.
        slots: int32 [request slots, columns], rows contiguous: the full slot of each position of a request, those of
            this pass included; the scheduler changes it.
        full_to_swa: int64 [full slots], the window slot of each full slot; the scheduler changes it.
        window_write: int32 [T], the window slot of each token.
        window_lengths: int32 [T], ``min(position + 1, window)``; in a block ``min(starts, window)`` and its tokens.
        entry_slots: int32 [T, columns], the slots of the ratio-128 entries that each query sees, in order; those beyond
            ``entry_lengths`` are not written.
        entry_lengths: int32 [T], ``(position + 1) // 128``, at most the columns.
        window: tokens of a window.
    """

    batch: Batch
    slots: Tensor
    full_to_swa: Tensor
    window_write: Tensor
    window_lengths: Tensor
    entry_slots: Tensor
    entry_lengths: Tensor
    window: int

    @property
    def window_slots(self) -> Tensor:
        """Int32 [T, window], the slots of each query's window, newest first, −1 before the first position.

        In a block [T, window + BLOCK_COLUMNS]: the slots of its tokens and of the window in front of them.
        """
        return self.batch.window_slots

    @property
    def is_block(self) -> bool:
        """Whether the pass is a draft's block."""
        return self.window_slots.shape[1] > self.window

    @classmethod
    def allocate(
        cls,
        positions: Tensor,
        requests: Tensor,
        slots: Tensor,
        full_to_swa: Tensor,
        *,
        window: int,
        longest: int,
        tokens_each: int | None,
        is_block: bool = False,
    ) -> Plan:
        """Room for the plan of a pass, which refers to the given tensors; contents undefined.

        Args:
            positions: int64 [T].
            requests: int64 [B].
            slots, full_to_swa: the scheduler's tables, as the attributes of :class:`Plan`.
            window: tokens of a window, a power of two.
            longest: tokens of the longest sequence that may come.
            tokens_each: as the attribute of :class:`Batch`.
            is_block: whether each token sees all that its request adds, up to :data:`BLOCK_COLUMNS`, and the window in
                front of them. The pass compresses nothing.
        """
        tokens, count = positions.shape[0], requests.shape[0]

        def new(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=positions.device)

        # Multiples of 16, because Triton compiles another variant for other strides.
        pages, entries = cdiv(cdiv(longest, PAGE_TOKENS), 16) * 16, cdiv(max(longest // 128, 1), 16) * 16
        batch = Batch(
            positions,
            new(tokens),
            new(count),
            new(count + 1),
            requests,
            new(count, pages),
            new(tokens, window + BLOCK_COLUMNS if is_block else window),
            tokens_each,
        )
        return cls(batch, slots, full_to_swa, new(tokens), new(tokens), new(tokens, entries), new(tokens), window)


def resolve(plan: Plan, seq_lens: Tensor, new_tokens: Tensor | None = None) -> None:
    """Fill ``plan`` for its positions and requests.

    Args:
        plan: from :meth:`Plan.allocate`; everything but positions, requests and the tables of slots is written.
        seq_lens: int32 or int64 [B], contiguous, the lengths of sequences after this pass.
        new_tokens: int32 or int64 [B], contiguous, the tokens that each request adds, T in all; one each (decode)
            unless given.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit, there are more than 4096 requests, or the window is
            not a power of two.

    Source: specification §3.3, §4.3.
    """
    _check(plan, seq_lens, new_tokens)
    batch = plan.batch
    tokens, count = batch.tokens, batch.requests.shape[0]
    window, columns = plan.window, plan.entry_slots.shape[1]
    if not tokens:
        return
    block = padded_requests(count)
    _split[(1,)](
        seq_lens, seq_lens if new_tokens is None else new_tokens, batch.starts, batch.bounds, count,
        NEW=new_tokens is not None, BLOCK=block,
        **OVERLAPPED,
    )  # fmt: skip
    _resolve[(tokens,)](
        batch.positions, batch.starts, batch.bounds, batch.requests, plan.slots, plan.slots.stride(0), plan.full_to_swa,
        batch.owners, batch.pages, batch.pages.stride(0), batch.pages.shape[1],
        plan.window_write, plan.window_slots, plan.window_lengths, plan.entry_slots, plan.entry_lengths,
        count, columns, WINDOW=window, AHEAD=plan.window_slots.shape[1] - window, RATIO=128, PAGE=PAGE_TOKENS,
        BLOCK_B=block, BLOCK=BLOCK,
        num_warps=4,
        **OVERLAPPED,
    )  # fmt: skip


@once
def _check(plan: Plan, seq_lens: Tensor, new_tokens: Tensor | None) -> None:
    """Refuse what :func:`resolve` cannot read or write; metadata only."""
    op, batch = "resolve", plan.batch
    batch.check(op)
    require_dimensions(f"{op}: slots", plan.slots, 2, "[request slots, columns]")
    require_dtype(f"{op}: slots", plan.slots, torch.int32)
    require_rows(f"{op}: slots", plan.slots)
    require_dtype(f"{op}: full_to_swa", plan.full_to_swa, torch.int64)
    require_contiguous(f"{op}: full_to_swa", plan.full_to_swa)
    tokens, count = batch.tokens, batch.requests.shape[0]
    require_range(f"{op}: requests", count, 0, MAX_REQUESTS)
    require_power_of_two(f"{op}: window", "window", plan.window)
    widths = plan.window, plan.window + BLOCK_COLUMNS
    require_one_of(f"{op}: window_slots' columns", plan.window_slots.shape[1], widths)
    if plan.is_block:  # a program's columns are twice the window
        require_range(f"{op}: window of a block", plan.window, BLOCK_COLUMNS, 2**31 - 1)
    for name, tensor in {"seq_lens": seq_lens, "new_tokens": new_tokens}.items():
        if tensor is not None:
            require_shape(f"{op}: {name}", tensor, (count,), "[requests]")
            require_dtype(f"{op}: {name}", tensor, torch.int32, torch.int64)
            require_contiguous(f"{op}: {name}", tensor)
    if new_tokens is None:
        require_shape(f"{op}: positions", batch.positions, (count,), "[requests], as new_tokens are not given")
    for name in ("window_write", "window_lengths", "entry_slots", "entry_lengths"):
        tensor = getattr(plan, name)
        require_dtype(f"{op}: {name}", tensor, torch.int32)
        require_rows(f"{op}: {name}", tensor)
        require_contiguous(f"{op}: {name}", tensor)
        require_shape(f"{op}: {name}", tensor, (tokens, *tensor.shape[1:]), "[tokens, ...]")
        require_same_device("positions", batch.positions, **{f"{op}: {name}": tensor})
    require_dimensions(f"{op}: entry_slots", plan.entry_slots, 2, "[tokens, columns]")
    require_same_device("positions", batch.positions, seq_lens=seq_lens, new_tokens=new_tokens)
    require_same_device("positions", batch.positions, slots=plan.slots, full_to_swa=plan.full_to_swa)
