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

from ..common.rounding import round_for
from .windows import ask_for_entry, load_rows, pool, span_of_request, store_entry, unit_of_number, unit_of_token

CHANNELS = tl.constexpr(32)
"""Of a program: 128 bytes a row in fp32, and few enough registers for several programs on a processor."""
BLOCKS = tl.constexpr(512 // 32)


@triton.jit
def _remember(token, kept, ring, column, call):
    """Put the tokens (int64 [R]) that are kept into rows ``ring`` of the state; the channels ``column`` of them."""
    kept = kept[:, None]
    to = call.state + ring[:, None] * call.state_row + column[None, :]
    values = tl.load(call.kv + token[:, None] * call.kv_row + column[None, :], mask=kept, other=0.0).to(tl.float32)
    tl.store(to, round_for(values, call.state), mask=kept)
    scores = tl.load(call.score + token[:, None] * call.score_row + column[None, :], mask=kept, other=0.0)
    tl.store(to + 512, round_for(scores.to(tl.float32), call.state), mask=kept)


@triton.jit
def _compress(unit, channels, owner, window, is_head, batch, call, workspace):
    """One unit's block of channels: first all that reads the state, then all that writes it."""
    first, start, end = span_of_request(owner, batch)
    request = tl.load(batch.requests + owner)
    row = tl.arange(0, 128)
    column = channels * CHANNELS + tl.arange(0, CHANNELS)
    if (window + 1) * 128 <= end:
        position = window * 128 + row
        token = (first + position - start).to(tl.int64)[:, None]
        ring = (request * 128 + row)[:, None]
        new, old = (position >= start)[:, None], (position < start)[:, None] & (ring < call.state_rows)
        history = call.state + ring * call.state_row
        values = load_rows(new, call.kv + token * call.kv_row, old, history, column[None, :], 0.0)
        new_scores = call.score + token * call.score_row
        scores = load_rows(new, new_scores, old, history + 512, column[None, :], float("-inf"))
        # Without it the compiler asks for the scores when the values have come.
        tl.debug_barrier()
        scores += tl.load(call.ape + row[:, None] * 512 + column[None, :])
        tl.store(workspace.pooled + unit * 512 + column, pool(values, scores))
        # All of the program's channels lie in memory before it is counted in.
        tl.debug_barrier()
        if tl.atomic_add(workspace.semaphores + unit, 1, sem="acq_rel", scope="gpu") == BLOCKS - 1:
            tl.store(workspace.semaphores + unit, 0)
            whole = tl.arange(0, 8)[:, None] * 64 + tl.arange(0, 64)[None, :]
            pooled = tl.load(workspace.pooled + unit * 512 + whole, cache_modifier=".cg")
            slot = tl.load(batch.slots + request * batch.slots_row + window * 128).to(tl.int64) // 128
            norm, frequencies = ask_for_entry(call, batch.frequencies)
            store_entry(pooled, norm, frequencies, window * 128, slot, call)

    if is_head:
        tl.debug_barrier()
        position = end - 128 + row
        ring = request * 128 + (position & 127)
        token = (first + position - start).to(tl.int64)
        kept = (position >= start) & (ring < call.state_rows)
        _remember(token, kept, ring, column, call)


@triton.jit
def compress_hca(number, channels, batch, call, workspace, TOKENS: tl.constexpr, PADDED: tl.constexpr):
    """A block of channels of some units.

    TOKENS: 0, and it is the unit of that number, if there are so many; else those of so many tokens, one after another,
    but first all at once goes into the state what is alone in its request and closes nothing: no unit then reads or
    writes that request's ring.
    """
    if TOKENS == 0:
        owner, window, is_head, exists = unit_of_number(number, batch, 128, PADDED)
        if exists:
            _compress(number, channels, owner, window, is_head, batch, call, workspace)
    else:
        token = number * TOKENS + tl.arange(0, TOKENS)
        inside = token < batch.tokens
        of = tl.load(batch.owners + token, mask=inside, other=0)
        position = tl.load(batch.starts + of)
        alone = tl.load(batch.bounds + of + 1) - tl.load(batch.bounds + of) == 1
        simple = inside & alone & (position % 128 != 127)
        ring = tl.load(batch.requests + of) * 128 + position % 128
        column = channels * CHANNELS + tl.arange(0, CHANNELS)
        _remember(token.to(tl.int64), simple & (ring < call.state_rows), ring, column, call)

        others = tl.where(inside & (simple == 0), token, batch.tokens)
        unit = tl.min(others, 0)
        while unit < batch.tokens:
            owner, window, is_head, exists = unit_of_token(unit, batch, 128)
            if exists:
                _compress(unit, channels, owner, window, is_head, batch, call, workspace)
            unit = tl.min(tl.where(others > unit, others, batch.tokens), 0)
