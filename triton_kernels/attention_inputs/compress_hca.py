"""Compression at ratio 128: windows of 128 tokens, whose channels several programs share (specification §4.1, §4.3).

A window's two tiles of 128 × 512 are half a megabyte in fp32. If one multiprocessor read them, that would take longer
than the rest of a decode step's compression, and the 64 windows of a prefill of 8192 tokens would leave most
multiprocessors idle. Channels are independent until the norm, so each program pools 32 of them, stores them in the
workspace and increments a semaphore; the last program to finish makes the entry. No program waits, and the result does
not depend on which is last. The state's ring belongs to the request: 128 or 256 rows.

In decode most tokens close no window and are only stored in the state. A program takes several such tokens at once,
because otherwise the mere number of programs would cost time.
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

CHANNELS_PER_PROGRAM = tl.constexpr(32)
"""Channels that a program pools: 128 bytes of a row in fp32, and few enough registers for several programs on a
multiprocessor."""
CHANNEL_BLOCKS = tl.constexpr(512 // 32)
"""Programs that share one window."""


@triton.jit
def _update_state(token, kept, ring, column, call):
    """Store the channels ``column`` of the tokens (int64 [R]) that are ``kept`` in rows ``ring`` of the state."""
    kept = kept[:, None]
    to = call.state + ring[:, None] * call.state_row + column[None, :]
    values = tl.load(call.kv + token[:, None] * call.kv_row + column[None, :], mask=kept, other=0.0).to(tl.float32)
    tl.store(to, round_for(values, call.state), mask=kept)
    scores = tl.load(call.score + token[:, None] * call.score_row + column[None, :], mask=kept, other=0.0)
    tl.store(to + 512, round_for(scores.to(tl.float32), call.state), mask=kept)


@triton.jit
def _compress_unit(unit, channels, owner, window, is_head, batch, call, workspace):
    """Process one unit's block of channels: first everything that reads the state, then everything that writes it."""
    RING: tl.constexpr = call.RING
    first, start, end = span_of_request(owner, batch)
    request = tl.load(batch.requests + owner)
    row = tl.arange(0, 128)
    column = channels * CHANNELS_PER_PROGRAM + tl.arange(0, CHANNELS_PER_PROGRAM)
    if (window + 1) * 128 <= end:
        position = window * 128 + row
        token = (first + position - start).to(tl.int64)[:, None]
        ring = (request * RING + window % (RING // 128) * 128 + row)[:, None]
        new, old = (position >= start)[:, None], (position < start)[:, None] & (ring <= call.last_state_row)
        history = call.state + ring * call.state_row
        values = load_rows(new, call.kv + token * call.kv_row, old, history, column[None, :], 0.0)
        new_scores = call.score + token * call.score_row
        scores = load_rows(new, new_scores, old, history + 512, column[None, :], float("-inf"))
        # Without the barrier the compiler loads the scores only when the values have arrived.
        tl.debug_barrier()
        scores += tl.load(call.ape + row[:, None] * 512 + column[None, :])
        tl.store(workspace.pooled + unit * 512 + column, pool(values, scores))
        # Every thread has stored its channels before the semaphore is incremented.
        tl.debug_barrier()
        if tl.atomic_add(workspace.semaphores + unit, 1, sem="acq_rel", scope="gpu") == CHANNEL_BLOCKS - 1:
            tl.store(workspace.semaphores + unit, 0)
            whole = tl.arange(0, 8)[:, None] * 64 + tl.arange(0, 64)[None, :]
            pooled = tl.load(workspace.pooled + unit * 512 + whole, cache_modifier=".cg")
            slot = entry_slot(owner, window, batch, 128)
            norm, frequencies = ask_for_entry(call, batch.frequencies)
            store_entry(pooled, norm, frequencies, window * 128, slot, call)

    if is_head:
        tl.debug_barrier()
        for part in tl.static_range(RING // 128):
            position = end - (RING - 128 * part) + row
            ring = request * RING + (position & (RING - 1))
            token = (first + position - start).to(tl.int64)
            kept = (position >= start) & (ring <= call.last_state_row)
            _update_state(token, kept, ring, column, call)


@triton.jit
def compress_hca(
    number, channels, tokens, requests, batch, call, workspace, TOKENS: tl.constexpr, PADDED: tl.constexpr
):
    """Process one block of channels of one unit or, in decode, of the units of several tokens.

    With several tokens, those that are their request's only token in the pass and close no window are first stored in
    the state, all at once: no unit reads or writes the rings of their requests. Then the units of the other tokens
    follow, one after another.

    Args:
        number: TOKENS = 0: the unit's number, which may be beyond the last unit; else the number of a group of TOKENS
            tokens.
        channels: the number of the block of channels.
        tokens, requests: of the pass; of these, ``tokens`` is read if TOKENS is not 0, else ``requests``.
        batch: ``windows.PassArguments``.
        call: ``windows.CompressionArguments``.
        workspace: ``compressor.Workspace``.
        PADDED: see :func:`.windows.unit_of_number`.
    """
    if TOKENS == 0:
        owner, window, is_head, exists = unit_of_number(number, requests, batch, 128, PADDED)
        if exists:
            _compress_unit(number, channels, owner, window, is_head, batch, call, workspace)
    else:
        token = number * TOKENS + tl.arange(0, TOKENS)
        inside = token < tokens
        token_owner = tl.load(batch.owners + token, mask=inside, other=0)
        position = tl.load(batch.starts + token_owner)
        alone = tl.load(batch.bounds + token_owner + 1) - tl.load(batch.bounds + token_owner) == 1
        simple = inside & alone & (position % 128 != 127)
        ring = tl.load(batch.requests + token_owner) * call.RING + position % call.RING
        column = channels * CHANNELS_PER_PROGRAM + tl.arange(0, CHANNELS_PER_PROGRAM)
        _update_state(token.to(tl.int64), simple & (ring <= call.last_state_row), ring, column, call)

        remaining = tl.where(inside & (simple == 0), token, tokens)
        unit = tl.min(remaining, 0)
        while unit < tokens:
            owner, window, is_head, exists = unit_of_token(unit, batch, 128)
            if exists:
                _compress_unit(unit, channels, owner, window, is_head, batch, call, workspace)
            unit = tl.min(tl.where(remaining > unit, remaining, tokens), 0)
