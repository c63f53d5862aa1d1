"""Token compression: windows of 4 or 128 tokens pooled into one cache entry (specification §4)."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.cache.plan import CompressPlan
from nvfp4_sgl.ops.rope import rms_norm_rope


def compress_windows(
    kv: Tensor,
    score: Tensor,
    state: Tensor,
    plan: CompressPlan,
    *,
    ape: Tensor,
    norm: Tensor,
    norm_eps: float,
    frequencies: Tensor,
) -> Tensor:
    """Close the batch's windows and bring the state up to date.

    For every window that a token of this batch completes::

        a = softmax over the window's rows of (score + ape[position mod ratio]), per channel
        e = rope(rmsnorm(sum_rows a * kv), position of the window's first token)

    Ratio 128 pools the window's 128 tokens. Ratio 4 overlaps: the first half of the channels (Ca) of the
    previous window's four tokens, and the second half (Cb) of the current window's; the first window has no
    previous one.

    Args:
        kv, score: fp32 [T, w] of this batch, raw; w = n for ratio 128 and 2n for ratio 4, n = 512 or 128.
        state: [rows, 2w], raw ``kv | score`` of earlier tokens, fp32 or bf16; updated in place.
        plan: rows to read, pool and write; history is read before the state is written.
        ape: fp32 [ratio, w]. norm: [n].
        frequencies: the compressed layers' RoPE table.

    Returns:
        fp32 [W, n], the entries of ``plan.window_slots``; no rounding on the way.
    """
    width, size = kv.shape[1], norm.shape[0]
    if plan.window_rows.shape[0] == 0:
        _write_state(kv, score, state, plan)
        return kv.new_empty(0, size)
    history = state[plan.history_rows].float()
    _write_state(kv, score, state, plan)
    absent_kv, absent_score = kv.new_zeros(1, width), score.new_full((1, width), float("-inf"))
    all_kv = torch.cat((kv, history[:, :width], absent_kv))
    all_score = torch.cat((score, history[:, width:]))
    all_score += ape[torch.cat((plan.phase, plan.history_phase))]
    all_score = torch.cat((all_score, absent_score))

    rows = plan.window_rows
    if width == 2 * size:
        previous, current = rows[:, : plan.ratio], rows[:, plan.ratio :]
        pooled_kv = torch.cat((all_kv[previous, :size], all_kv[current, size:]), dim=1)
        pooled_score = torch.cat((all_score[previous, :size], all_score[current, size:]), dim=1)
    else:
        pooled_kv, pooled_score = all_kv[rows], all_score[rows]
    entry = (pooled_kv * pooled_score.softmax(dim=1)).sum(dim=1)
    return rms_norm_rope(entry, norm, norm_eps, plan.window_positions, frequencies)


def _write_state(kv: Tensor, score: Tensor, state: Tensor, plan: CompressPlan) -> None:
    state[plan.write_rows] = torch.cat((kv, score), dim=1)[plan.write_tokens].to(state.dtype)
