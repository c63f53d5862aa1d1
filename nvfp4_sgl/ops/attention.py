"""Sparse attention with a sink over the window and the selected compressed entries (spec section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.cache.rows import RowStore

_QUERIES = 64
"""Queries that the reference attends for at once."""


def _block_keys(rows: RowStore, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of a block of queries, and which query sees which.

    Neighbouring queries of one prompt share most of their keys: those are read once, fp32 [n, D] with visibility
    [t, n]. Queries of different prompts share none: each gets its own, fp32 [t, n, D]. Both broadcast alike.
    """
    distinct, column = slots.unique(return_inverse=True)
    if distinct.numel() * 4 <= slots.numel():
        visible = torch.zeros(slots.shape[0], distinct.numel(), dtype=torch.bool)
        visible.scatter_(1, column, slots >= 0)
        wanted = distinct
    else:
        visible, wanted = slots >= 0, slots
    keys = rows.read(wanted.clamp(min=0))
    # A slot that is not attended may hold anything, NaN included; 0 * NaN would reach the sum.
    keys[wanted < 0] = 0.0
    return keys, visible


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
        if extra is not None and extra_slots is not None and extra_slots.shape[1]:
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
