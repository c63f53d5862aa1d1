"""Sparse attention with a sink over the window and the selected compressed entries (spec section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.cache.rows import RowStore

_GATHER_BYTES = 64 << 20
"""Keys that the reference holds at once, in bytes."""


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
    tokens, _, dim = q.shape
    slots = window_slots if extra_slots is None else torch.cat((window_slots, extra_slots), dim=1)
    width = window_slots.shape[1]
    out = torch.empty_like(q)
    step = max(1, _GATHER_BYTES // (max(slots.shape[1], 1) * dim * 4))
    for begin in range(0, tokens, step):
        part = slice(begin, begin + step)
        index = slots[part].clamp(min=0)
        keys = window.read(index[:, :width])
        if extra is not None and slots.shape[1] > width:
            keys = torch.cat((keys, extra.read(index[:, width:])), dim=1)
        absent = slots[part] < 0
        # A slot that is not attended may hold anything, NaN included; 0 * NaN would reach the sum.
        keys.masked_fill_(absent.unsqueeze(-1), 0.0)
        logits = torch.bmm(q[part].float(), keys.transpose(1, 2)) * scale
        logits.masked_fill_(absent.unsqueeze(1), float("-inf"))
        top = torch.maximum(logits.amax(-1, keepdim=True), sink.view(1, -1, 1))
        weights = (logits - top).exp_()
        denominator = weights.sum(-1, keepdim=True) + (sink.view(1, -1, 1) - top).exp()
        out[part] = (torch.bmm(weights, keys) / denominator).to(q.dtype)
    return out
