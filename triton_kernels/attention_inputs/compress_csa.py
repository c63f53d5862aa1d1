"""Compression at ratio 4: overlapping windows of four tokens, for the main compressor and the indexer's.

A window pools the first half of the channels of the four tokens before it and the second half of the channels of its
own four. The state's ring belongs to a page of the window pool: 8 or 16 rows for each 256 tokens (specification §4.1,
§4.3).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.rounding import round_for
from .windows import (
    ask_for_entry,
    entry_slot,
    load_rows,
    pool,
    span_of_request,
    store_entry,
    unit_of_number,
    unit_of_token,
)


@triton.jit
def _ring_rows(token, back, present, batch, RING: tl.constexpr):
    """Return the int64 state rows of the positions ``back`` before those of tokens, −1 where not present."""
    at = batch.window_slots + token.to(tl.int64) * batch.window + back
    swa = tl.load(at, mask=present, other=-1).to(tl.int64)
    return tl.where(swa >= 0, swa // 256 * RING + swa % RING, -1)


@triton.jit
def _close_window(window, start, first, request, batch, call):
    """Pool a complete window and store its entry.

    Rows before position ``start`` come from the state, others from the pass.
    """
    N: tl.constexpr = call.N
    row = tl.arange(0, 8)
    position = window * 4 - 4 + row
    ring = tl.full((8,), -1, tl.int64)
    if window * 4 - 4 < start:
        ring = _ring_rows(first, start - position, (position >= 0) & (position < start), batch, call.RING)
    new, old = (position >= start)[:, None], ((ring >= 0) & (ring <= call.last_state_row))[:, None]
    token = (first + position - start).to(tl.int64)[:, None]
    column = (row // 4 * N)[:, None] + tl.arange(0, N)[None, :]
    history = call.state + ring[:, None] * call.state_row
    values = load_rows(new, call.kv + token * call.kv_row, old, history, column, 0.0)
    scores = load_rows(new, call.score + token * call.score_row, old, history + 2 * N, column, float("-inf"))
    # Without the barrier the compiler loads some of the rows only when others have arrived.
    tl.debug_barrier()
    bias = tl.load(call.ape + (row % 4 * (2 * N))[:, None] + column)
    slot = entry_slot(request, window, batch, 4)
    norm, frequencies = ask_for_entry(call, batch.frequencies)
    pooled = tl.reshape(pool(values, scores + bias), (N // 64, 64))
    store_entry(pooled, norm, frequencies, window * 4, slot, call)


@triton.jit
def _update_state(position, kept, start, first, batch, call):
    """Store in the state the tokens of this pass at those of the 8 positions that are ``kept`` (bool [8])."""
    N: tl.constexpr = call.N
    ring = _ring_rows(first + position - start, 0, kept, batch, call.RING)
    kept = (kept & (ring >= 0) & (ring <= call.last_state_row))[:, None]
    token = (first + position - start).to(tl.int64)[:, None]
    for half in tl.static_range(2):
        column = half * N + tl.arange(0, N)[None, :]
        to = call.state + ring[:, None] * call.state_row + column
        values = tl.load(call.kv + token * call.kv_row + column, mask=kept, other=0.0).to(tl.float32)
        tl.store(to, round_for(values, call.state), mask=kept)
        scores = tl.load(call.score + token * call.score_row + column, mask=kept, other=0.0).to(tl.float32)
        tl.store(to + 2 * N, round_for(scores, call.state), mask=kept)


@triton.jit
def compress_csa(number, requests, batch, call, BY_TOKEN: tl.constexpr, PADDED: tl.constexpr):
    """Process one unit of one compressor: first everything that reads the state, then everything that writes it.

    Args:
        number: with BY_TOKEN a token, whose unit is processed if it has one; else the unit's number, which may be
            beyond the last unit.
        requests: of the pass; not read with BY_TOKEN.
        batch: ``windows.PassArguments``.
        call: ``windows.CompressionArguments``.
        PADDED: see :func:`.windows.unit_of_number`.
    """
    RING: tl.constexpr = call.RING
    if BY_TOKEN:
        request, window, is_head, exists = unit_of_token(number, batch, 4)
    else:
        request, window, is_head, exists = unit_of_number(number, requests, batch, 4, PADDED)
    if exists:
        first, start, end = span_of_request(request, batch)
        for closing in tl.range(window, tl.minimum(window + 2, end // 4)):
            _close_window(closing, start, first, request, batch, call)
        tl.debug_barrier()

        # A page's ring keeps the last RING tokens of the page, or the last RING of the pass within it. The head writes
        # the ring of the page in which the pass begins, because its history lies there. The rings of later pages hold
        # no history: each unit writes the tokens of its own windows. Pages that several requests share are full, and no
        # unit writes to them.
        row = tl.arange(0, 8)
        for part in tl.range(tl.where(is_head, 0, 1), 2):
            for eight in tl.static_range(RING // 8):
                in_head = tl.minimum((start // 256 + 1) * 256, end) - (RING - 8 * eight)
                position = tl.where(part == 0, in_head, window * 4) + row
                page = position // 256
                kept = (position >= start) & (position < end) & (position >= tl.minimum((page + 1) * 256, end) - RING)
                kept = kept & ((page > start // 256) == (part == 1))
                if eight > 0:  # a unit has eight tokens
                    kept = kept & (part == 0)
                if tl.max(kept.to(tl.int32), 0) > 0:
                    _update_state(position, kept, start, first, batch, call)
