"""Ratio 128: windows of 128 tokens, their channels dealt to several programs (DEEPSEEK_V4.md §4.1, §4.3).

A window's two tiles of 128 × 512 are half a megabyte in fp32: read by one processor they would take longer than all
else of a decode step's compression, and the 64 windows of a prefill of 8192 tokens would leave most processors idle.
Channels are independent until the norm, so each program pools 32 of them, leaves them in the workspace and counts
itself in; the last to come finishes the entry. Nobody waits, and the result does not depend on who is last. The state's
ring belongs to the request: 128 rows.

In decode most tokens close nothing and only go into the state. A program takes several of them at once, or the mere
number of programs would show.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import round_for
from .windows import pool, store_entry, unit_of_number, unit_of_token

CHANNELS = tl.constexpr(32)
"""Of a program: 128 bytes a row in fp32, and few enough registers for several programs on a processor."""
BLOCKS = tl.constexpr(512 // 32)


@triton.jit
def _remember(token, kept, ring, column, kv, score, state, kv_row, score_row, state_row):
    """Put the tokens (int64 [R]) that are kept into rows ``ring`` of the state; the channels ``column`` of them."""
    kept = kept[:, None]
    to = state + ring[:, None] * state_row + column[None, :]
    values = tl.load(kv + token[:, None] * kv_row + column[None, :], mask=kept, other=0.0).to(tl.float32)
    tl.store(to, round_for(values, state), mask=kept)
    scores = tl.load(score + token[:, None] * score_row + column[None, :], mask=kept, other=0.0).to(tl.float32)
    tl.store(to + 512, round_for(scores, state), mask=kept)


@triton.jit
def _compress(
    unit,
    channels,
    owner,
    window,
    is_head,
    starts,
    bounds,
    requests,
    slots,
    slots_row,
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
    first, start = tl.load(bounds + owner), tl.load(starts + owner)
    end = start + tl.load(bounds + owner + 1) - first
    request = tl.load(requests + owner)
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
            whole = tl.arange(0, 8)[:, None] * 64 + tl.arange(0, 64)[None, :]
            pooled = tl.load(pooled_rows + unit * 512 + whole, cache_modifier=".cg")
            slot = tl.load(slots + request * slots_row + window * 128).to(tl.int64) // 128
            store_entry(pooled, window * 128, slot, norm, eps, frequencies, pages, page_stride, capacity, PAGE_SIZE)

    if is_head:
        tl.debug_barrier()
        position = end - 128 + row
        ring = request * 128 + (position & 127)
        token = (first + position - start).to(tl.int64)
        kept = (position >= start) & (ring < state_rows)
        _remember(token, kept, ring, column, kv, score, state, kv_row, score_row, state_row)


@triton.jit
def compress_hca_kernel(
    owners,
    starts,
    bounds,
    requests,
    slots,
    frequencies,
    tokens,
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
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (units, blocks of channels).

    TOKENS: 0, and a program has the unit of its number; else it has those of so many tokens, one after another, but
    first it puts into the state, all at once, what is alone in its request and closes nothing: no unit then reads or
    writes that request's ring.
    """
    channels = tl.program_id(1)
    if TOKENS == 0:
        unit = tl.program_id(0)
        owner, window, is_head, exists = unit_of_number(unit, starts, bounds, request_count, 128, PADDED)
        if exists:
            _compress(
                *(unit, channels, owner, window, is_head, starts, bounds, requests, slots, slots_row, frequencies),
                *(kv, score, state, ape, norm, pages, pooled_rows, arrivals, eps),
                *(kv_row, score_row, state_row, state_rows, page_stride, capacity, PAGE_SIZE),
            )
    else:
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        inside = token < tokens
        of = tl.load(owners + token, mask=inside, other=0)
        position = tl.load(starts + of)
        alone = tl.load(bounds + of + 1) - tl.load(bounds + of) == 1
        simple = inside & alone & (position % 128 != 127)
        ring = tl.load(requests + of) * 128 + position % 128
        column = channels * CHANNELS + tl.arange(0, CHANNELS)
        kept = simple & (ring < state_rows)
        _remember(token.to(tl.int64), kept, ring, column, kv, score, state, kv_row, score_row, state_row)

        others = tl.where(inside & (simple == 0), token, tokens)
        unit = tl.min(others, 0)
        while unit < tokens:
            owner, window, is_head, exists = unit_of_token(unit, owners, starts, bounds, 128)
            if exists:
                _compress(
                    *(unit, channels, owner, window, is_head, starts, bounds, requests, slots, slots_row, frequencies),
                    *(kv, score, state, ape, norm, pages, pooled_rows, arrivals, eps),
                    *(kv_row, score_row, state_row, state_rows, page_stride, capacity, PAGE_SIZE),
                )
            unit = tl.min(tl.where(others > unit, others, tokens), 0)
