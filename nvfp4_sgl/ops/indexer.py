"""Lightning indexer: which ratio-4 entries a query attends to (specification §5)."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.cache.plan import BatchPlan
from nvfp4_sgl.cache.rows import RowStore
from nvfp4_sgl.formats import index_entry
from nvfp4_sgl.formats.index_entry import hadamard


def indexer_query(q: Tensor, keys: RowStore) -> Tensor:
    """The query as it meets the cached keys.

    Keys in the 8-bit format were rotated by the orthonormal Hadamard matrix and rounded to e4m3 with one fp32
    scale; the query gets the same treatment per (token, head). Exact keys meet the query as it is: the
    rotation alone would change nothing.

    Args:
        q: [T, H, 128] after RoPE.

    Returns:
        fp32 [T, H, 128].
    """
    if not keys.is_quantized:
        return q.float()
    rotated = hadamard(q.float())
    return index_entry.unpack(*index_entry.pack(rotated.view(-1, q.shape[-1]))).view(q.shape)


def write_index_keys(keys: RowStore, slots: Tensor, entries: Tensor) -> None:
    """Store indexer keys; a store of 8-bit rows gets them after the Hadamard rotation.

    Args:
        slots: int64 [W], distinct. entries: fp32 [W, 128], after RoPE.
    """
    keys.write(slots, hadamard(entries) if keys.is_quantized else entries)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """``I[t, w] = sum_h weights[t, h] * relu(q[t, h] . k[w])``.

    Args:
        q: fp32 [B, t, H, 128]. weights: fp32 [B, t, H], may be negative. keys: fp32 [B, n, 128].

    Returns:
        fp32 [B, t, n]. The ReLU comes before the weight.
    """
    batch, tokens, heads, dim = q.shape
    dots = torch.bmm(q.reshape(batch, tokens * heads, dim), keys.transpose(1, 2)).view(batch * tokens, heads, -1)
    return torch.bmm(weights.reshape(-1, 1, heads), dots.relu_()).view(batch, tokens, -1)


def select_entries(q: Tensor, weights: Tensor, keys: RowStore, plan: BatchPlan, topk: int) -> Tensor:
    """Slots of the ``topk`` best visible ratio-4 entries of each query.

    A query at position p sees entries ``w < (p + 1) // 4``: the query that completes a window already sees it.
    Where no query of the batch sees more than ``topk``, all are taken and nothing is scored. Equal scores are
    in no particular order.

    Args:
        q: fp32 [T, H, 128] from :func:`indexer_query`.
        weights: fp32 [T, H], already scaled by ``128**-0.5 * H**-0.5``.
        keys: the layer's indexer keys, this batch's entries included.

    Returns:
        int64 [T, min(topk, N4)], -1 padded, order unspecified.
    """
    entries = plan.csa_entry_slots.shape[1]
    owner = torch.repeat_interleave(torch.tensor([b - a for a, b in zip(plan.bounds, plan.bounds[1:], strict=False)]))
    if entries <= topk:
        slots = plan.csa_entry_slots[owner]
        return torch.where(torch.arange(entries) < plan.csa_visible[:, None], slots, -1)
    result = torch.full((q.shape[0], topk), -1, dtype=torch.int64)
    requests = len(plan.bounds) - 1
    # One GEMM for all requests where each has one query (decode), else one a request.
    groups = [(0, requests)] if q.shape[0] == requests else [(b, b + 1) for b in range(requests)]
    for first, last in groups:
        rows = slice(plan.bounds[first], plan.bounds[last])
        count = int(plan.csa_visible[rows].max())
        if count == 0:
            continue
        slots = plan.csa_entry_slots[first:last, :count]
        scores = index_scores(
            q[rows].unflatten(0, (last - first, -1)),
            weights[rows].unflatten(0, (last - first, -1)),
            keys.read(slots.clamp(min=0)),
        ).flatten(0, 1)
        hidden = torch.arange(count) >= plan.csa_visible[rows, None]
        best = scores.masked_fill_(hidden, float("-inf")).topk(min(topk, count), dim=-1, sorted=False)
        chosen = slots[owner[rows] - first].gather(1, best.indices)
        result[rows, : chosen.shape[1]] = torch.where(best.values == float("-inf"), -1, chosen)
    return result
