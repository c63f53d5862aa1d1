"""The kernel of ``sparse_attention``: decode tiles of keys, and add them up under an online softmax.

A program takes one block of heads of one query and one split of its keys. For each tile of keys it computes the logits,
updates the running maximum and the denominator, and accumulates the weighted keys, which are the values, too. What is
supported, the precision and the floor stand in ``sparse_attention``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.overlap import after_previous
from ..common.rope import load_cos_sin, load_cos_sin_rows, mean_square_scale, rotate
from ..common.rounding import INTERPRETED, product, round_for, round_to_bf16
from .parts import LOG2_E, add_parts
from .quantized_output import store_whole

OPERAND_DTYPE = tl.constexpr(tl.float32 if INTERPRETED.value else tl.bfloat16)
"""Dtype of MMA operands. The interpreter multiplies fp32 matrices only; theirs hold values that bf16 holds exactly."""


@triton.constexpr_function
def piece_width(piece, pieces):
    """Columns of a piece: 256, 128, 64 and 64 of four pieces, 64 of eight."""
    return max(256 >> piece, 64) if pieces == 4 else 64


@triton.constexpr_function
def piece_begin(piece, pieces):
    """First column of a piece."""
    return sum(max(256 >> earlier, 64) if pieces == 4 else 64 for earlier in range(piece))


@triton.jit
def _times_power_of_two(values, exponent):
    """Compute values · 2^(exponent - 127), exactly, for values that bf16 holds; 0 for an exponent of 0.

    The caller converts E4M3 to bf16 by way of fp32, the only conversions that the compiler makes fast; the scaling
    multiplies pairs of bf16.
    """
    if INTERPRETED:
        return values * (exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale, values = tl.broadcast((exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True), values)
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [values, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def _load_decoded(entry, scales, visible, BEGIN: tl.constexpr, BLOCKS: tl.constexpr, KEYS: tl.constexpr):
    """Load and decode columns BEGIN .. BEGIN + 64·BLOCKS of packed entries, [KEYS, 64·BLOCKS]; 0 where not visible.

    entry: addresses of the entries' data, [KEYS]. scales: int64 [KEYS], the eight scale bytes of each entry.
    """
    # Block by block, so that a thread holds the same entries in all blocks and computes their addresses once.
    if BLOCKS == 1:
        exponent = (scales >> (BEGIN // 8)).to(tl.int32) & 0xFF
        address = entry[:, None] + (BEGIN + tl.arange(0, 64)[None, :])
        code = tl.load(address, mask=visible[:, None], other=0).to(tl.float8e4nv, bitcast=True)
        return _times_power_of_two(code.to(tl.float32).to(OPERAND_DTYPE), exponent[:, None])
    else:
        left = _load_decoded(entry, scales, visible, BEGIN, BLOCKS // 2, KEYS)
        right = _load_decoded(entry, scales, visible, BEGIN + BLOCKS * 32, BLOCKS // 2, KEYS)
        return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (KEYS, BLOCKS * 64))


@triton.jit
def _load_bf16(row, visible, BEGIN: tl.constexpr, WIDTH: tl.constexpr):
    """Load columns BEGIN .. BEGIN + WIDTH of bf16 rows at byte addresses ``row``: [KEYS, WIDTH], 0 if not visible."""
    address = row.to(tl.pointer_type(tl.bfloat16), bitcast=True)[:, None] + (BEGIN + tl.arange(0, WIDTH)[None, :])
    return tl.load(address, mask=visible[:, None], other=0.0).to(OPERAND_DTYPE)


@triton.jit
def _as_operand(keys):
    """Return ``keys``, unchanged, as if nothing were known of where they come from.

    For mma.sync the compiler lays out an operand by the narrowest load that it comes from. For bytes, a thread would
    hold eight keys of a column in a row, fetched from shared memory one by one, where ldmatrix fetches 32.
    """
    if INTERPRETED:
        return keys
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [keys], dtype=tl.bfloat16, is_pure=False, pack=2)


@triton.jit
def load_keys(pool, pitch, shift, slot, visible, PACKED: tl.constexpr, KEYS: tl.constexpr, PIECES: tl.constexpr):
    """Load and decode the entries at ``slot`` [KEYS] in pieces of columns, 0 where not visible.

    pitch: bytes from page to page, of 2^shift entries each; from row to row if not PACKED.
    """
    keys = ()  # type: tuple[tl.tensor, ...]
    if PACKED:
        page = pool + (slot >> shift).to(tl.int64) * pitch
        row = (slot & ((1 << shift) - 1)).to(tl.int32)
        entry = page + row * 576
        scales = page + ((576 << shift) + row * 8)
        scales = tl.load(scales.to(tl.pointer_type(tl.int64), bitcast=True), mask=visible, other=0)
        for piece in tl.static_range(PIECES - 1):
            decoded = _load_decoded(
                entry, scales, visible, piece_begin(piece, PIECES), piece_width(piece, PIECES) // 64, KEYS
            )
            keys += (decoded if PIECES == 4 else _as_operand(decoded),)
        keys += (_load_bf16(entry + 448, visible, 0, 64),)
    else:
        entry = pool + slot.to(tl.int64) * pitch
        for piece in tl.static_range(PIECES):
            keys += (_load_bf16(entry, visible, piece_begin(piece, PIECES), piece_width(piece, PIECES)),)
    return keys


@triton.jit
def load_length(lengths, token, columns, GIVEN: tl.constexpr):
    """Number of a query's columns that count: ``lengths[token]`` if GIVEN, else all."""
    if GIVEN:
        return tl.load(lengths + token).to(tl.int32)
    else:
        return columns


@triton.jit
def load_query(row, head_mask, BEGIN: tl.constexpr, WIDTH: tl.constexpr):
    return tl.load(row + (BEGIN + tl.arange(0, WIDTH)[None, :]), mask=head_mask[:, None], other=0.0).to(OPERAND_DTYPE)


@triton.jit
def _round_to_operand(values):
    """Round fp32 to bf16, as an MMA operand."""
    if INTERPRETED:
        return round_to_bf16(values)
    else:
        return values.to(tl.bfloat16)


@triton.jit
def _square_sum(values):
    values = values.to(tl.float32)
    return tl.sum(values * values, axis=1)


@triton.jit
def inverse_rms(q, eps):
    """Compute 1 / rms of raw queries, given in pieces: fp32 [HEADS], 0 where squares overflow.

    Squares of bf16 are exact in fp32, so a sum of squares has the same bits whether or not the compiler fuses it.
    """
    PIECES: tl.constexpr = len(q)
    square_sum = _square_sum(q[0])
    for piece in tl.static_range(1, PIECES - 2):
        square_sum += _square_sum(q[piece])
    square_sum += _square_sum(q[PIECES - 2]) + _square_sum(q[PIECES - 1])
    return mean_square_scale(square_sum, 512.0, eps)


@triton.jit
def _rotate_tail(q_tail, cos, sin, HEADS: tl.constexpr):
    """Rotate the last 64 columns of raw queries by cos and sin, fp32 [1 or HEADS, 32], and round once to bf16."""
    even, odd = tl.split(tl.reshape(q_tail.to(tl.float32), (HEADS, 32, 2)))
    even, odd = rotate(even, odd, cos, sin)
    return _round_to_operand(tl.reshape(tl.join(even, odd), (HEADS, 64)))


@triton.jit
def with_rotated_tail(q, cos, sin, HEADS: tl.constexpr):
    """Return the pieces of raw queries with the last, their tail, rotated."""
    rotated = ()  # type: tuple[tl.tensor, ...]
    for piece in tl.static_range(len(q) - 1):
        rotated += (q[piece],)
    tail = _rotate_tail(q[len(q) - 1], cos, sin, HEADS)
    rotated += (tail if len(q) == 4 else _as_operand(tail),)
    return rotated


@triton.jit
def in_layout_of(values, others):
    """Return ``values``, unchanged, in the thread layout of ``others``, which has the same shape.

    Used inside a loop, it makes the compiler convert values from before the loop to that layout before the loop, too.
    """
    if INTERPRETED:
        return values
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f,f", [values, others], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _exp2_or_zero(logits):
    """Compute 2^logits of fp32 logits that are at most 0; NaN gives 0."""
    if INTERPRETED:
        return tl.where(logits == logits, tl.exp2(logits), 0.0)
    else:
        return tl.inline_asm_elementwise(
            "{ ex2.approx.ftz.f32 $0, $1; mul.sat.ftz.f32 $0, $0, 0f3F800000; }",
            "=f,f",
            [logits],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _update_softmax(logits, visible, running_max, denominator):
    """Update the online softmax by the logits of a tile, fp32 [HEADS, KEYS], where ``visible`` [1 or HEADS, KEYS].

    Returns the new running maximum, the denominator relative to it, and the tile's weights rounded to bf16,
    [HEADS, KEYS].
    """
    logits = tl.where(visible, logits, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(logits, axis=1))
    weights = _exp2_or_zero(logits - new_max[:, None])
    denominator = denominator * tl.exp2(running_max - new_max) + tl.sum(weights, axis=1)
    return new_max, denominator, _round_to_operand(weights)


@triton.jit
def no_sums(HEADS: tl.constexpr, PIECES: tl.constexpr, TRANSPOSED: tl.constexpr):
    total = ()  # type: tuple[tl.tensor, ...]
    for piece in tl.static_range(PIECES):
        if TRANSPOSED:
            total += (tl.zeros((piece_width(piece, PIECES), HEADS), tl.float32),)
        else:
            total += (tl.zeros((HEADS, piece_width(piece, PIECES)), tl.float32),)
    return total


@triton.jit
def _rescale(total, decay, TRANSPOSED: tl.constexpr):
    return total * (decay[None, :] if TRANSPOSED else decay[:, None])


@triton.jit
def _accumulate(total, weights, keys, TRANSPOSED: tl.constexpr):
    """Compute total + weights × keys, for a total of [HEADS, WIDTH] or its transpose."""
    if TRANSPOSED:
        return tl.dot(tl.trans(keys), tl.trans(weights), total)
    else:
        return tl.dot(weights, keys, total)


@triton.jit
def _logits(q, k):
    """Multiply queries and keys, both in pieces: fp32 logits [HEADS, KEYS], not yet scaled."""
    logits = tl.dot(q[0], tl.trans(k[0]))
    for piece in tl.static_range(1, len(q)):
        logits += tl.dot(q[piece], tl.trans(k[piece]))
    return logits


@triton.jit
def _logits_apart(q, k, scale):
    """Compute ``_logits`` times ``scale``, scaling each MMA's result on its own.

    Of a bare sum the compiler would make one chain of MMAs. The tail goes first: rotated, it is an operand in
    registers, and fewer are taken before there is a sum.
    """
    LAST: tl.constexpr = len(q) - 1
    logits = tl.dot(q[LAST], tl.trans(k[LAST])) * scale
    for piece in tl.static_range(LAST):
        logits += tl.dot(q[piece], tl.trans(k[piece])) * scale
    return logits


@triton.jit
def _add_tile(total, decay, weights, k, TRANSPOSED: tl.constexpr):
    """Add a tile's weighted keys to the accumulator, which has pieces of columns."""
    # Rescale all pieces before the first MMA: the assembler serialises MMAs if accumulators change between them.
    total = [_rescale(piece, decay, TRANSPOSED) for piece in total]
    added = ()  # type: tuple[tl.tensor, ...]
    for piece in tl.static_range(len(k)):
        added += (_accumulate(total[piece], weights, k[piece], TRANSPOSED),)
    return added


@triton.jit
def attend_to_tile(
    q,
    k,
    visible,
    scale,
    running_max,
    denominator,
    total,
    always,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    LOGITS_IN_BRANCH: tl.constexpr,
):
    """Add a tile of keys to the online softmax and the accumulator.

    visible: [1 or HEADS, KEYS]. scale: of the logits. always: true, but the compiler does not know.

    Returns the running maximum, the denominator and the pieces of the accumulator.
    """
    previous_max = running_max
    if LOGITS_IN_BRANCH:
        weights = tl.zeros((HEADS, KEYS), OPERAND_DTYPE)
        if always:
            logits = _logits_apart(q, k, scale)
            running_max, denominator, weights = _update_softmax(logits, visible, running_max, denominator)
    elif TRANSPOSED and STAGES > 1:
        # In a branch the compiler waits for each MMA. Outside it would pipeline the MMAs beside the loop's loads,
        # and then (Triton 3.8) let warps store a tile's keys while tcgen05 may still read the previous tile's
        # from the same place: found in the emulator, which checks the order of accesses whatever their timing.
        if always:
            logits = _logits(q, k) * scale
            running_max, denominator, weights = _update_softmax(logits, visible, running_max, denominator)
            total = _add_tile(total, tl.exp2(previous_max - running_max), weights, k, TRANSPOSED)
    else:
        logits = _logits(q, k) * scale
        running_max, denominator, weights = _update_softmax(logits, visible, running_max, denominator)
    if LOGITS_IN_BRANCH or not TRANSPOSED or STAGES == 1:
        total = _add_tile(total, tl.exp2(previous_max - running_max), weights, k, TRANSPOSED)
    return running_max, denominator, total


@triton.jit
def _scale_heads(total, factor, TRANSPOSED: tl.constexpr):
    """Compute total · factor by head: [HEADS, WIDTH], whichever way the total is stored."""
    if TRANSPOSED:
        return tl.trans(total * factor[None, :])
    else:
        return total * factor[:, None]


@triton.jit
def _store_columns(row, values, head_mask, BEGIN: tl.constexpr, WIDTH: tl.constexpr):
    """Store fp32 [HEADS, WIDTH] to columns BEGIN .. BEGIN + WIDTH of each head's row, bf16 or fp32.

    row: addresses [HEADS, 1]; ``None`` where no rows are wanted.
    """
    if row is not None:
        address = row + (BEGIN + tl.arange(0, WIDTH)[None, :])
        tl.store(address, round_for(values, row), mask=head_mask[:, None])


@triton.jit
def store_output(
    out,
    out_row,
    total,
    factor,
    cos_sin,
    head_mask,
    ROTATE: tl.constexpr,
    HEADS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Multiply the accumulator by ``factor``, rotate its last columns back if ROTATE, and store and return all of it.

    out_row: index of each head's row [HEADS]; nothing is stored if ``out`` is ``None``. cos_sin: the address of the
    query's row of the table, or of each row's query's, [HEADS].
    """
    PIECES: tl.constexpr = len(total)
    row = None
    if out is not None:
        row = out + out_row[:, None] * 512
    stored = ()  # type: tuple[tl.tensor, ...]
    for piece in tl.static_range(PIECES):
        values = _scale_heads(total[piece], factor, TRANSPOSED)
        if ROTATE and piece == PIECES - 1:
            if len(cos_sin.shape) == 0:
                cos, sin = load_cos_sin(cos_sin, 32)
                cos, sin = cos[None, :], sin[None, :]
            else:
                cos, sin = load_cos_sin_rows(cos_sin, head_mask, HEADS, 32)
            even, odd = tl.split(tl.reshape(values, (HEADS, 32, 2)))
            even, odd = rotate(even, odd, cos, -sin)
            values = tl.reshape(tl.join(even, odd), (HEADS, 64))
        _store_columns(row, values, head_mask, piece_begin(piece, PIECES), piece_width(piece, PIECES))
        stored += (values,)
    return stored


@triton.jit
def attend(
    q,
    q_token,
    q_head,
    window,
    window_page,
    window_slots,
    window_lengths,
    window_columns,
    extra,
    extra_page,
    extra_slots,
    extra_lengths,
    extra_columns,
    sink,
    scale_log2,
    cos_sin,
    out,
    partial_stats,
    heads,
    eps,
    semaphores,
    finished,
    rows,
    RAW: tl.constexpr,
    PACKED: tl.constexpr,
    WINDOW_SHIFT: tl.constexpr,
    EXTRA_SHIFT: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_WINDOW_LENGTHS: tl.constexpr,
    HAS_EXTRA_LENGTHS: tl.constexpr,
    HAS_COS_SIN: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    LOGITS_IN_BRANCH: tl.constexpr,
    PIECES: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Attend to one split of a query's keys for one block of its heads.

    Grid: (query · HEAD_BLOCKS + head block, split). Arguments and constants that are not those of
    ``sparse_attention.sparse_attention`` by another name:

        out: the output or, if SPLIT, the values of ``sparse_attention.Partials``.
        finished: the output if SPLIT; may be ``None``.
        partial_stats: the stats of ``sparse_attention.Partials``; read and written if SPLIT.
        rows: ``quantize.rows.RowsArguments`` of groups of GROUP heads; empty where the output is not quantised.
        RAW: queries are raw projections, to be normalised and rotated.
        PACKED: entries of 584 bytes; else bf16 rows.
        WINDOW_SHIFT, EXTRA_SHIFT: log2 of the entries of a page.
        HEADS, KEYS, STAGES, TRANSPOSED, LOGITS_IN_BRANCH, PIECES, WARPS: the ``tiling.Tiling``.
    """
    after_previous()
    block, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = (block // HEAD_BLOCKS).to(tl.int64)
    first_head = block % HEAD_BLOCKS * HEADS
    head = first_head + tl.arange(0, HEADS)
    head_mask = head < heads

    window_length = load_length(window_lengths, token, window_columns, HAS_WINDOW_LENGTHS)
    extra_length = 0
    if HAS_EXTRA:
        extra_length = load_length(extra_lengths, token, extra_columns, HAS_EXTRA_LENGTHS)
    # Load the queries together with the lengths, which may say that this program has no part: mostly it has one.
    q_row = q + token * q_token + head.to(tl.int64)[:, None] * q_head
    q_pieces = ()  # type: tuple[tl.tensor, ...]
    for piece in tl.static_range(PIECES):
        q_pieces += (load_query(q_row, head_mask, piece_begin(piece, PIECES), piece_width(piece, PIECES)),)
    if RAW:
        cos, sin = load_cos_sin(cos_sin + token * 64, 32)
    sink_logit = tl.load(sink + head, mask=head_mask, other=0.0)

    window_length = tl.minimum(window_length, window_columns)
    extra_length = tl.minimum(extra_length, extra_columns)
    window_tiles = tl.cdiv(window_length, KEYS)
    tiles = window_tiles + tl.cdiv(extra_length, KEYS)
    # With a quantised output a program holds one share of columns, and there are at least two shares; so there are
    # at least two parts, of which one may be empty.
    part_count = tl.maximum(tl.minimum(tiles, splits), 2 if SPLIT and len(rows) > 0 else 1)
    begin = split * tiles // part_count
    end = (split + 1) * tiles // part_count

    out_row = token * heads + head
    if SPLIT:
        if HEADS < 64 and len(rows) == 0:
            out_row = out_row * splits + split
        if split >= part_count:
            # Where the slot list is wide and few of its columns count, most programs have no part.
            return

    query_scale = scale_log2
    if RAW:
        # Scale the logits rather than the queries: tensor cores read an operand from shared memory only if it was
        # loaded there. Computed queries would be fetched as fragments with each tile: 43 ldmatrix on sm_90, not 15.
        query_scale = inverse_rms(q_pieces, eps) * scale_log2
        q_pieces = with_rotated_tail(q_pieces, cos[None, :], sin[None, :], HEADS)

    # Logits and running maximum are kept multiplied by log2(e). The maximum begins at the sink, so it is finite even if
    # no key is visible.
    sink_log2 = product(sink_logit, LOG2_E)
    running_max = sink_log2
    denominator = tl.zeros((HEADS,), tl.float32)
    total = no_sums(HEADS, PIECES, TRANSPOSED)

    for tile in tl.range(begin, end, num_stages=STAGES):
        # One loop over both sets of entries, so that loads of the next tile run ahead across the border between them.
        in_window = tile < window_tiles
        column = tl.where(in_window, tile, tile - window_tiles) * KEYS + tl.arange(0, KEYS)
        slots = tl.where(in_window, window_slots + token * window_columns, extra_slots + token * extra_columns)
        length = tl.where(in_window, window_length, extra_length)
        slot = tl.load(slots + column, mask=column < length, other=-1)
        visible = slot >= 0
        slot = tl.where(visible, slot, 0)
        pool = tl.where(in_window, window, extra)
        pitch = tl.where(in_window, window_page, extra_page)
        shift = tl.where(in_window, WINDOW_SHIFT, EXTRA_SHIFT)
        k = load_keys(pool, pitch, shift, slot, visible, PACKED, KEYS, PIECES)

        logit_scale = query_scale
        if RAW:
            # Without this, with LOGITS_IN_BRANCH, each tile would pass the scale through shared memory to the logits.
            logit_scale = in_layout_of(query_scale, denominator)[:, None]
        running_max, denominator, total = attend_to_tile(
            *(q_pieces, k, visible[None, :], logit_scale, running_max, denominator, total, tile < end),
            *(HEADS, KEYS, STAGES, TRANSPOSED, LOGITS_IN_BRANCH),
        )

    if SPLIT:
        STATS: tl.constexpr = 3 if len(rows) > 0 else 2
        if HEADS >= 64 or len(rows) > 0:
            # Where accumulators crowd the registers, not before the loop: the value would hold a register throughout.
            out_row = out_row * splits + split
        tl.store(partial_stats + out_row * STATS, running_max, mask=head_mask)
        tl.store(partial_stats + out_row * STATS + 1, denominator, mask=head_mask)
        # A part is divided by its own sum, so it is no larger than a key.
        factor = 1.0 / tl.where(denominator > 0, denominator, 1.0)
    else:
        factor = 1.0 / (denominator + tl.exp2(sink_log2 - running_max))
    stored = store_output(
        *(out, out_row, total, factor, cos_sin + token * 64, head_mask),
        *(HAS_COS_SIN and not SPLIT, HEADS, TRANSPOSED),
    )

    if SPLIT:
        add_parts(
            *(
                out,
                partial_stats,
                sink,
                cos_sin,
                finished,
                rows,
                semaphores + block,
                token,
                first_head,
                heads,
                split,
                part_count,
            ),
            *(splits, HAS_COS_SIN, HEADS, WARPS, GROUP),
        )
    elif len(rows) > 0:
        store_whole(stored, rows, token, first_head, heads, GROUP)
