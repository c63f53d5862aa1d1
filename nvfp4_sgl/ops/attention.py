"""Sparse attention with a sink over the window and the selected compressed entries (specification §3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.cache.rows import RowStore

_QUERIES = 64
"""Queries that the reference attends for at once."""

_FEW_QUERIES = 16
"""So many queries or fewer read their keys apart, shared or not."""


def _block_keys(rows: RowStore, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of a block of queries, and which query sees which; some slot must be valid.

    Neighbouring queries of one prompt share most of their keys: those are read once, fp32 [n, D] with visibility
    [t, n]. A few queries, as in decoding, each get their own, fp32 [t, n, D]. Both broadcast alike.
    """
    visible = slots >= 0
    # Where there is no slot, read one that somebody else reads: it holds finite numbers, which a weight of 0 then
    # drops. Any other slot may hold anything, NaN included.
    slots = torch.where(visible, slots, slots.max())
    if slots.shape[0] <= _FEW_QUERIES:
        return rows.read(slots), visible
    distinct, column = slots.unique(return_inverse=True)
    seen = torch.zeros(slots.shape[0], distinct.numel(), dtype=torch.bool)
    seen[torch.arange(slots.shape[0])[:, None].expand_as(column)[visible], column[visible]] = True
    return rows.read(distinct), seen


def sparse_attention(
    q: Tensor,
    window: RowStore,
    window_slots: Tensor,
    sink: Tensor,
    scale: float,
    extra: RowStore | None = None,
    extra_slots: Tensor | None = None,
) -> Tensor:
    """One softmax over two sets of cached rows and a sink; keys are the values too.

    ::

        s_j = (q . k_j) * scale
        o   = sum_j exp(s_j - m) k_j / (sum_j exp(s_j - m) + exp(sink - m)),  m = max(s_j, sink)

    Args:
        q: [T, H, D] after RoPE.
        window, window_slots: the sliding window's rows and int64 [T, W], -1 where there is none.
        sink: fp32 [H], in logit units, not scaled; it has no value.
        scale: ``D**-0.5``.
        extra, extra_slots: compressed entries and int64 [T, K], -1 padded; ``None`` in window-only layers.

    Returns:
        [T, H, D] in ``q.dtype``, still rotated by the keys' positions; fp32 throughout, one rounding.
    """
    out = torch.empty_like(q)
    sink = sink.view(-1, 1)
    for begin in range(0, q.shape[0], _QUERIES):
        part = slice(begin, begin + _QUERIES)
        sets = [_block_keys(window, window_slots[part])]
        if extra is not None and extra_slots is not None and bool((extra_slots[part] >= 0).any()):
            sets.append(_block_keys(extra, extra_slots[part]))
        queries = q[part].float()
        logits = []
        for keys, visible in sets:
            scores = torch.matmul(queries, keys.transpose(-1, -2)) * scale
            logits.append(scores.masked_fill_(~visible.unsqueeze(1), float("-inf")))
        top = torch.stack([part_logits.amax(-1, keepdim=True) for part_logits in logits]).amax(0).maximum(sink)
        denominator = (sink - top).exp()
        total = torch.zeros_like(queries)
        for (keys, _), part_logits in zip(sets, logits, strict=True):
            weights = (part_logits - top).exp_()
            denominator = denominator + weights.sum(-1, keepdim=True)
            total += torch.matmul(weights, keys)
        out[part] = (total / denominator).to(q.dtype)
    return out
