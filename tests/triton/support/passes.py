"""Passes over sequences at any place: what the reference and the kernels are told of the same one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.cache import plan as reference
from nvfp4_sgl.triton_kernels.plan.batch import PAGE_TOKENS, Batch

WINDOW = 128
UNALLOCATED = 2**30
"""Slot of a position that a sequence has not reached."""


def resolved(
    positions: Tensor, owners: Tensor, starts: Tensor, bounds: Tensor, requests: Tensor, slots: Tensor, swa: Tensor
) -> Batch:
    """The kernels' batch from the scheduler's tables of slots, which ``swa`` maps to window slots; on the CPU."""
    back = positions[:, None] - torch.arange(WINDOW)
    full = slots[requests[owners.long(), None], back.clamp(min=0)].long()
    window_slots = torch.where(back >= 0, swa[full.clamp(max=len(swa) - 1)], -1)
    return Batch(
        positions=positions,
        owners=owners.int(),
        starts=starts.int(),
        bounds=bounds.int(),
        requests=requests,
        pages=slots[requests, ::PAGE_TOKENS].contiguous(),
        window_slots=window_slots.int(),
        tokens_each=1 if len(positions) == len(requests) else None,
    )


def moved(batch: Batch, device: str) -> Batch:
    tensors: dict[str, Any] = {
        name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    return replace(batch, **tensors)


@dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
        plan: the reference's.
        batch: the kernels'.
        pages: how many pages of PAGE_TOKENS a pool must have.
    """

    plan: reference.BatchPlan
    batch: Batch
    pages: int


def new_pass(spans: list[tuple[int, int]], device: str, *, seed: int = 0) -> Pass:
    """Sequences that grow from ``start`` to ``end`` tokens, their pages and request slots dealt at random."""
    generator = torch.Generator().manual_seed(seed)
    starts, ends = (torch.tensor(values) for values in zip(*spans, strict=True))
    held = -(-ends // PAGE_TOKENS)
    columns = (int(held.max()) + 1) * PAGE_TOKENS
    pages = torch.randperm(int(held.sum()), generator=generator) + 1
    full = torch.full((len(spans), columns), UNALLOCATED)
    for row, own, end in zip(full, pages.split(held.tolist()), ends.tolist(), strict=True):
        row[:end] = (own[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()[:end]
    requests = torch.randperm(len(spans) + 3, generator=generator)[: len(spans)]
    full_to_swa = torch.arange((len(pages) + 1) * PAGE_TOKENS)
    plan = reference.plan_batch(
        reference.Batch(starts, ends, requests, full, full_to_swa), window=WINDOW, ratios=frozenset({4})
    )
    table = torch.full((len(spans) + 3, columns), UNALLOCATED, dtype=torch.int32)
    table[requests] = full.int()
    owners = torch.repeat_interleave(torch.arange(len(spans)), ends - starts)
    batch = resolved(plan.positions, owners, starts, torch.tensor(plan.bounds), requests, table, full_to_swa)
    return Pass(plan, moved(batch, device), len(pages) + 1)
