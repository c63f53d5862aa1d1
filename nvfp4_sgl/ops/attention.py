"""Sparse attention with a sink over the window and the selected compressed entries (specification §3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.cache.rows import RowStore

_QUERIES = 64
"""Queries that the reference attends for at once."""

_FEW_QUERIES = 16
"""So many queries or fewer read their keys apart, shared or not."""


@dataclass(frozen=True)
class _Keys:
    """Keys of a block of queries.

    Attributes:
        rows: fp32 [n, D] where the queries share them, [t, n, D] where each has its own; finite.
        visible: bool [t, n], which query sees which key.
        spoiled: bool [n] or [t, n], keys that hold NaN or infinities, and zeros in ``rows``.
    """

    rows: Tensor
    visible: Tensor
    spoiled: Tensor

    def logits(self, queries: Tensor, scale: float) -> Tensor:
        """fp32 [t, H, n] of ``queries`` [t, H, D]: -inf where a key is not visible, NaN where it is and is spoiled.

        A weight of 0 would not drop NaN: the key of one request would end every other of its batch.
        """
        scores = torch.matmul(queries, self.rows.transpose(-1, -2)) * scale
        if self.spoiled.any():
            scores.masked_fill_((self.spoiled & self.visible).unsqueeze(1), float("nan"))
        return scores.masked_fill_(~self.visible.unsqueeze(1), float("-inf"))


def _block_keys(rows: RowStore, slots: Tensor) -> _Keys:
    """Keys at ``slots``, int64 [t, n], -1 where there is none; some slot must be valid.

    Neighbouring queries of one prompt share most of their keys: those are read once. A few queries, as in decoding,
    each get their own.
    """
    visible = slots >= 0
    slots = torch.where(visible, slots, slots.max())  # where there is none, one that is read anyway
    if slots.shape[0] > _FEW_QUERIES:
        distinct, column = slots.unique(return_inverse=True)
        seen = torch.zeros(slots.shape[0], distinct.numel(), dtype=torch.bool)
        seen[torch.arange(slots.shape[0])[:, None].expand_as(column)[visible], column[visible]] = True
        slots, visible = distinct, seen
    keys = rows.read(slots)
    spoiled = ~keys.sum(-1).isfinite()
    if spoiled.any():
        spoiled = ~keys.isfinite().all(-1)
        keys[spoiled] = 0
    return _Keys(keys, visible, spoiled)


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
        [T, H, D] in ``q.dtype``, still rotated by the keys' positions; fp32 throughout, one rounding. A query that
        sees a row with NaN or infinities is NaN; no other is.
    """
    out = torch.empty_like(q)
    sink = sink.view(-1, 1)
    for begin in range(0, q.shape[0], _QUERIES):
        part = slice(begin, begin + _QUERIES)
        sets = [_block_keys(window, window_slots[part])]
        if extra is not None and extra_slots is not None and bool((extra_slots[part] >= 0).any()):
            sets.append(_block_keys(extra, extra_slots[part]))
        queries = q[part].float()
        logits = [keys.logits(queries, scale) for keys in sets]
        top = torch.stack([part_logits.amax(-1, keepdim=True) for part_logits in logits]).amax(0).maximum(sink)
        denominator = (sink - top).exp()
        total = torch.zeros_like(queries)
        for keys, part_logits in zip(sets, logits, strict=True):
            weights = (part_logits - top).exp_()
            denominator = denominator + weights.sum(-1, keepdim=True)
            total += torch.matmul(weights, keys.rows)
        out[part] = (total / denominator).to(q.dtype)
    return out
