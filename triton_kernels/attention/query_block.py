"""Sparse attention of a rank's few heads where a request has several queries: a program takes neighbours.

Tensor cores multiply 64 rows at a time. Of a rank that has fewer heads, a program takes as many neighbouring queries as
fill them (``tiling.Tiling.queries``). If they belong to one request, each window is the previous one moved by one
entry, and each list of compressed entries begins like the next query's. Then each entry is read, decoded and multiplied
once for all of them; a query's own entries follow from their place in the union. Of several requests a program attends
for one query at a time, and what other rows hold is dropped: another request's entry never touches a result.

A prompt's blocks are cut every so many queries of the pass. Where each request has the same few queries, as in passes
that verify a draft, blocks are cut inside requests, so that none has queries of two: of 6 in blocks of 4, two of 3.

The union of windows is the last query's, newest first, followed by what the first query alone still sees; behind it
come the last query's compressed entries. Tiles of keys are cut from that. So unlike the kernel for one query
(``kernel``), this one adds up in an order that depends on a query's place among its neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.overlap import after_previous
from ..common.rope import load_cos_sin_rows
from ..common.rounding import product
from .kernel import (
    attend_to_tile,
    in_layout_of,
    inverse_rms,
    load_keys,
    load_length,
    load_query,
    no_sums,
    piece_begin,
    piece_width,
    store_output,
    with_rotated_tail,
)
from .parts import LOG2_E


@triton.jit
def _lengths(lengths, first, beyond, columns, QUERIES: tl.constexpr, GIVEN: tl.constexpr):
    """Lengths of the lists of QUERIES queries from ``first`` on, 0 from ``beyond`` on."""
    found = ()  # type: tuple[tl.tensor, ...]
    for query in tl.static_range(QUERIES):
        known = tl.minimum(first + query, beyond - 1)
        length = tl.minimum(load_length(lengths, known, columns, GIVEN), columns)
        found += (tl.where(first + query < beyond, length, 0),)
    return found


@triton.jit
def _of_row(values, row_query):
    """Spread one value for each query over the rows: each row gets its query's."""
    found = row_query * 0 + values[0]
    for query in tl.static_range(1, len(values)):
        found = tl.where(row_query == query, values[query], found)
    return found


@triton.jit(do_not_specialize=["tokens"])
def attend_block(
    q, q_token, q_head, window, window_page, window_slots, window_lengths, window_columns, extra, extra_page,
    extra_slots, extra_lengths, extra_columns, sink, scale_log2, cos_sin, owners, out, tokens, heads, eps,
    RAW: tl.constexpr, PACKED: tl.constexpr, WINDOW_SHIFT: tl.constexpr, EXTRA_SHIFT: tl.constexpr,
    HAS_EXTRA: tl.constexpr, HAS_WINDOW_LENGTHS: tl.constexpr, HAS_EXTRA_LENGTHS: tl.constexpr,
    HAS_COS_SIN: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, LOGITS_IN_BRANCH: tl.constexpr, PIECES: tl.constexpr, EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend for up to QUERIES neighbouring queries, all heads of each.

    Grid: (blocks of QUERIES queries) or, where EACH is not 0, (blocks of a request, requests). Arguments are those of
    ``kernel.attend`` and, beyond the ``tiling.Tiling``:

        owners: int32 or int64 [T], the request of each query; ``sparse_attention`` says what that means for lists.
        HEADS: rows of the MMA, at least QUERIES times the heads of a query, for which each has HEADS / QUERIES.
        EACH: queries of each request, in blocks of BLOCK or, at its end, fewer; 0 if they have any number.
    """
    after_previous()
    if EACH:
        request = tl.program_id(1).to(tl.int64) * EACH
        first = request + tl.program_id(0) * BLOCK
        beyond = tl.minimum(first + BLOCK, request + EACH)
        last = beyond - 1
    else:
        first = tl.program_id(0).to(tl.int64) * QUERIES
        beyond = tokens
        last = first + QUERIES - 1
    ROWS: tl.constexpr = HEADS // QUERIES
    row = tl.arange(0, HEADS)
    row_query, head = row // ROWS, row % ROWS
    row_token = first + row_query
    row_mask = (head < heads) & (row_token < beyond)

    # All loads that wait for nothing, before the first that does.
    if EACH:
        last_end = load_length(window_lengths, last, window_columns, HAS_WINDOW_LENGTHS)
    else:
        owner = tl.load(owners + first)
        last_owner = tl.load(owners + last, mask=last < tokens, other=0)
    window_ends = _lengths(window_lengths, first, beyond, window_columns, QUERIES, HAS_WINDOW_LENGTHS)
    extra_ends = _lengths(extra_lengths, first, beyond, extra_columns, QUERIES, HAS_EXTRA_LENGTHS)
    q_row = q + row_token[:, None] * q_token + head.to(tl.int64)[:, None] * q_head
    q_pieces = ()  # type: tuple[tl.tensor, ...]
    for piece in tl.static_range(PIECES):
        q_pieces += (load_query(q_row, row_mask, piece_begin(piece, PIECES), piece_width(piece, PIECES)),)
    query_scale = tl.zeros((HEADS,), tl.float32) + scale_log2
    if RAW:
        cos, sin = load_cos_sin_rows(cos_sin + row_token * 64, row_mask, HEADS, 32)
        query_scale = inverse_rms(q_pieces, eps) * scale_log2
        q_pieces = with_rotated_tail(q_pieces, cos, sin, HEADS)
    sink_log2 = product(tl.load(sink + head, mask=head < heads, other=0.0), LOG2_E)
    if EACH:
        # Queries of padding may all be at position 0: then the lengths of their windows do not differ by one each.
        last_of_first = window_ends[0] + (last - first).to(tl.int32)
        agree = tl.minimum(last_end, window_columns) == tl.minimum(last_of_first, window_columns)
    else:
        agree = (last < tokens) & (owner == last_owner)
    passes = tl.where(agree, 1, tl.minimum(beyond - first, QUERIES)).to(tl.int32)

    for turn in range(passes):
        # What is seen in this iteration: by all queries together, or by one of them.
        begin = tl.where(agree, first, first + turn)
        end = tl.where(agree, last, first + turn)
        ahead = (end - begin).to(tl.int32)
        oldest = tl.minimum(load_length(window_lengths, begin, window_columns, HAS_WINDOW_LENGTHS), window_columns)
        newest = tl.minimum(load_length(window_lengths, end, window_columns, HAS_WINDOW_LENGTHS), window_columns)
        window_count = oldest + ahead
        extra_count = 0
        if HAS_EXTRA:
            extra_count = tl.minimum(load_length(extra_lengths, end, extra_columns, HAS_EXTRA_LENGTHS), extra_columns)

        # In the union a row sees the window at low .. high - 1 and the entries at window_count .. entries_end - 1.
        # In an iteration for one query all rows see all keys: rows of other queries are not stored.
        low = tl.where(agree, (last - first).to(tl.int32) - row_query, 0)
        high = low + tl.where(agree, _of_row(window_ends, row_query), window_count)
        entries_end = window_count + tl.where(agree, _of_row(extra_ends, row_query), extra_count)
        newest_slots = window_slots + end * window_columns
        oldest_slots = window_slots + begin * window_columns - ahead
        entry_slots = extra_slots + end * extra_columns - window_count

        running_max = sink_log2
        denominator = tl.zeros((HEADS,), tl.float32)
        total = no_sums(HEADS, PIECES, False)
        tiles = tl.cdiv(window_count + extra_count, KEYS)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            place = tile * KEYS + tl.arange(0, KEYS)
            in_window = place < window_count
            slots = tl.where(place < newest, newest_slots, tl.where(in_window, oldest_slots, entry_slots))
            slot = tl.load(slots + place, mask=place < window_count + extra_count, other=-1)
            present = slot >= 0
            slot = tl.where(present, slot, 0)
            # The compiler loses sight of the alignment, for lack of which it would fetch nothing ahead.
            pool = tl.multiple_of(tl.where(in_window, window, extra), 16)
            pitch = tl.multiple_of(tl.where(in_window, window_page, extra_page), 16)
            shift = tl.where(in_window, WINDOW_SHIFT, EXTRA_SHIFT)
            k = load_keys(pool, pitch, shift, slot, present, PACKED, KEYS, PIECES)

            at = place.to(tl.float32)[None, :]
            visible = (at >= in_layout_of(low.to(tl.float32), denominator)[:, None]) & (
                at < in_layout_of(high.to(tl.float32), denominator)[:, None]
            )
            visible |= (~in_window)[None, :] & (at < in_layout_of(entries_end.to(tl.float32), denominator)[:, None])
            visible &= present[None, :]

            logit_scale = in_layout_of(query_scale, denominator)[:, None]
            running_max, denominator, total = attend_to_tile(
                *(q_pieces, k, visible, logit_scale, running_max, denominator, total, tile < tiles),
                *(HEADS, KEYS, STAGES, False, LOGITS_IN_BRANCH),
            )

        factor = 1.0 / (denominator + tl.exp2(sink_log2 - running_max))
        store_output(
            *(out, row_token * heads + head, total, factor),
            *(cos_sin + row_token * 64, row_mask & (agree | (row_query == turn))),
            *(HAS_COS_SIN, HEADS, False),
        )
