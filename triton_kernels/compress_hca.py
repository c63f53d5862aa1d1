"""Ratio 128: windows of 128 tokens, their channels dealt to several programs (DEEPSEEK_V4.md §4.1, §4.3).

A window's two tiles of 128 × 512 are too much for one processor: it would take them in at a tenth of the speed that a
decode step of one closing window, or a prefill of 64, needs. Channels are independent until the norm, so each program
pools 64 of them, leaves them in the workspace and counts itself in; the last to come finishes the entry. Nobody waits,
and the result does not depend on who is last. The state's ring belongs to the request: 128 rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import round_for
from .windows import pool, store_entry, unit_of_number, unit_of_token

CHANNELS = tl.constexpr(64)
BLOCKS = tl.constexpr(512 // 64)


@triton.jit
def _compress(
    unit,
    channels,
    window,
    is_head,
    start,
    end,
    first,
    request,
    slots,
    frequencies,
    kv,
    score,
    state,
    ape,
    norm,
    pages,
    pooled_rows,
    arrivals,
    eps,
    kv_row,
    score_row,
    state_row,
    state_rows,
    page_stride,
    capacity,
    PAGE_SIZE: tl.constexpr,
):
    """One unit's block of channels: first all that reads the state, then all that writes it."""
    row = tl.arange(0, 128)
    column = channels * CHANNELS + tl.arange(0, CHANNELS)
    if (window + 1) * 128 <= end:
        position = window * 128 + row
        new = (position >= start)[:, None]
        token = (first + position - start).to(tl.int64)[:, None]
        values = tl.load(kv + token * kv_row + column[None, :], mask=new, other=0.0).to(tl.float32)
        scores = tl.load(score + token * score_row + column[None, :], mask=new, other=0.0).to(tl.float32)
        if window * 128 < start:
            ring = request * 128 + row
            old = ((position < start) & (ring < state_rows))[:, None]
            history = state + ring[:, None] * state_row + column[None, :]
            values = tl.where(new, values, tl.load(history, mask=old, other=0.0).to(tl.float32))
            scores = tl.where(new, scores, tl.load(history + 512, mask=old, other=float("-inf")).to(tl.float32))
        scores += tl.load(ape + row[:, None] * 512 + column[None, :])
        tl.store(pooled_rows + unit * 512 + column, pool(values, scores))
        # All of the program's channels lie in memory before it is counted in.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + unit, 1, sem="acq_rel", scope="gpu") == BLOCKS - 1:
            tl.store(arrivals + unit, 0)
            whole = tl.arange(0, BLOCKS)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
            pooled = tl.load(pooled_rows + unit * 512 + whole, cache_modifier=".cg")
            slot = tl.load(slots + window * 128).to(tl.int64) // 128
            store_entry(pooled, window * 128, slot, norm, eps, frequencies, pages, page_stride, capacity, PAGE_SIZE)

    if is_head:
        tl.debug_barrier()
        position = end - 128 + row
        ring = request * 128 + (position & 127)
        kept = ((position >= start) & (ring < state_rows))[:, None]
        token = (first + position - start).to(tl.int64)[:, None]
        to = state + ring[:, None] * state_row + column[None, :]
        values = tl.load(kv + token * kv_row + column[None, :], mask=kept, other=0.0).to(tl.float32)
        tl.store(to, round_for(values, state), mask=kept)
        scores = tl.load(score + token * score_row + column[None, :], mask=kept, other=0.0).to(tl.float32)
        tl.store(to + 512, round_for(scores, state), mask=kept)


@triton.jit
def compress_hca_kernel(
    owners,
    starts,
    bounds,
    requests,
    slots,
    frequencies,
    request_count,
    slots_row,
    kv,
    score,
    state,
    ape,
    norm,
    pages,
    pooled_rows,
    arrivals,
    eps,
    kv_row,
    score_row,
    state_row,
    state_rows,
    page_stride,
    capacity,
    PAGE_SIZE: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (units, blocks of channels). BY_TOKEN: a unit for each token, else for each number up to the limit."""
    unit = tl.program_id(0)
    if BY_TOKEN:
        owner, window, is_head, exists = unit_of_token(unit, owners, starts, bounds, 128)
    else:
        owner, window, is_head, exists = unit_of_number(unit, starts, bounds, request_count, 128, PADDED)
    if exists:
        first, start = tl.load(bounds + owner), tl.load(starts + owner)
        end = start + tl.load(bounds + owner + 1) - first
        request = tl.load(requests + owner)
        _compress(
            *(unit, tl.program_id(1), window, is_head, start, end, first, request, slots + request * slots_row),
            *(frequencies, kv, score, state, ape, norm, pages, pooled_rows, arrivals, eps),
            *(kv_row, score_row, state_row, state_rows, page_stride, capacity, PAGE_SIZE),
        )
