"""Passes over sequences at any place: what the reference and the kernels are told of the same one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvfp4_sgl.cache import plan as reference
from nvfp4_sgl.triton_kernels.plan.batch import PAGE_TOKENS, Batch

UNALLOCATED = 2**30
"""Slot of a position that a sequence has not reached."""


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
        reference.Batch(starts, ends, requests, full, full_to_swa), window=128, ratios=frozenset({4})
    )
    table = torch.full((len(spans) + 3, columns), UNALLOCATED, dtype=torch.int32)
    table[requests] = full.int()
    batch = Batch(
        positions=plan.positions.to(device),
        owners=torch.repeat_interleave(torch.arange(len(spans)), ends - starts).int().to(device),
        starts=starts.int().to(device),
        bounds=torch.tensor(plan.bounds, dtype=torch.int32, device=device),
        requests=requests.to(device),
        slots=table.to(device),
        full_to_swa=full_to_swa.to(device),
    )
    return Pass(plan, batch, len(pages) + 1)
