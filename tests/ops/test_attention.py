"""A key that is not finite reaches the queries that see it, and no other of their batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cache.rows import ExactRows
from nvfp4_sgl.ops.attention import sparse_attention

WINDOW, ENTRIES, DIM, HEADS = 8, 12, 16, 3


def lists(queries: int, width: int) -> Tensor:
    """Slots of two requests: the first half of the queries has slots below 100, the second from 100, and fewer."""
    generator = torch.Generator().manual_seed(queries + width)
    slots = torch.stack([torch.randperm(100, generator=generator)[:width] for _ in range(queries)])
    slots[queries // 2 :] += 100
    slots[: queries // 2, width // 2 :] = -1
    return slots


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["window", "entries"])
@pytest.mark.parametrize("queries", [2, 40], ids=["keys apart", "keys shared"])
def test_a_neighbour_does_not_see_nan(queries: int, where: str, value: float) -> None:
    """The second request's keys hold it, at the largest slot too: where the first has none, that one is read."""
    generator = torch.Generator().manual_seed(0)
    window, entries = (torch.randn(200, DIM, generator=generator) for _ in range(2))
    q, sink = torch.randn(queries, HEADS, DIM, generator=generator), torch.randn(HEADS, generator=generator)
    window_slots, entry_slots = lists(queries, WINDOW), lists(queries, ENTRIES)

    def attend() -> Tensor:
        stores = ExactRows(window, DIM), ExactRows(entries, DIM)
        return sparse_attention(q, stores[0], window_slots, sink, 0.25, stores[1], entry_slots)

    good = attend()
    rows, slots = (window, window_slots) if where == "window" else (entries, entry_slots)
    spoiled = slots[-1].max(), slots.max()
    rows[list(spoiled), 5] = value
    sees = torch.isin(slots, torch.stack(spoiled)).any(1)
    assert sees[queries // 2 :].any() and not sees[: queries // 2].any() and good.isfinite().all()
    answer = attend()
    assert answer[sees].isnan().all() and torch.equal(answer[~sees], good[~sees])
