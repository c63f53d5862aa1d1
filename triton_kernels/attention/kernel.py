"""The kernel of ``attention``: a program's tiles of keys, decoded, multiplied twice and weighed on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.overlap import after_previous
from ..common.rope import load_cos_sin, mean_square_scale, rotate
from ..common.rounding import INTERPRETED, product, round_for, round_to_bf16
from .parts import LOG2_E, add_parts
from .quantized_output import store_whole

OPERAND = tl.constexpr(tl.float32 if INTERPRETED.value else tl.bfloat16)
"""Of the products. The interpreter multiplies fp32 matrices only; they then hold values that bf16 holds exactly."""


@triton.jit
def _times_power(values, exponent):
    """values · 2^(exponent - 127), exact, for values that bf16 holds; 0 for an exponent of 0.

    By way of fp32, from which alone the compiler converts fast, but scaled in pairs of bf16.
    """
    if INTERPRETED:
        return values * (exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale, values = tl.broadcast((exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True), values)
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [values, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def _decoded(entry, scales, visible, BEGIN: tl.constexpr, BLOCKS: tl.constexpr, KEYS: tl.constexpr):
    """Columns BEGIN .. BEGIN + 64·BLOCKS of packed entries, [KEYS, 64·BLOCKS]; 0 where not visible.

    entry: address of the data, [KEYS]. scales: int64 [KEYS], the eight scale bytes.
    """
    # Block by block, so that a thread has the same entries in all of them: their addresses are computed once.
    if BLOCKS == 1:
        exponent = (scales >> (BEGIN // 8)).to(tl.int32) & 0xFF
        address = entry[:, None] + (BEGIN + tl.arange(0, 64)[None, :])
        code = tl.load(address, mask=visible[:, None], other=0).to(tl.float8e4nv, bitcast=True)
        return _times_power(code.to(tl.float32).to(OPERAND), exponent[:, None])
    else:
        left = _decoded(entry, scales, visible, BEGIN, BLOCKS // 2, KEYS)
        right = _decoded(entry, scales, visible, BEGIN + BLOCKS * 32, BLOCKS // 2, KEYS)
        return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (KEYS, BLOCKS * 64))


@triton.jit
def _plain(row, visible, BEGIN: tl.constexpr, WIDTH: tl.constexpr):
    """Columns BEGIN .. BEGIN + WIDTH of bf16 rows, [KEYS, WIDTH]; 0 where not visible. row: byte address, [KEYS]."""
    address = row.to(tl.pointer_type(tl.bfloat16), bitcast=True)[:, None] + (BEGIN + tl.arange(0, WIDTH)[None, :])
    return tl.load(address, mask=visible[:, None], other=0.0).to(OPERAND)


@triton.jit
def _query(row, known, BEGIN: tl.constexpr, WIDTH: tl.constexpr):
    return tl.load(row + (BEGIN + tl.arange(0, WIDTH)[None, :]), mask=known[:, None], other=0.0).to(OPERAND)


@triton.jit
def _rounded(values):
    """fp32 to what a product takes."""
    if INTERPRETED:
        return round_to_bf16(values)
    else:
        return values.to(tl.bfloat16)


@triton.jit
def _square_sum(values):
    values = values.to(tl.float32)
    return tl.sum(values * values, axis=1)


@triton.jit
def _inverse_rms(q_low, q_mid, q_high, q_tail, eps):
    """Over the root mean square of raw queries in their four pieces, fp32 [HEADS]: 0 where squares overflow.

    Squares of bf16 are exact in fp32, so fused or not, a sum of squares has the same bits.
    """
    square_sum = _square_sum(q_low) + _square_sum(q_mid) + (_square_sum(q_high) + _square_sum(q_tail))
    return mean_square_scale(square_sum, 512.0, eps)


@triton.jit
def _rotated(q_tail, cos, sin, HEADS: tl.constexpr):
    """The last 64 columns of raw queries rotated by cos and sin, fp32 [32], and rounded to bf16 once."""
    even, odd = tl.split(tl.reshape(q_tail.to(tl.float32), (HEADS, 32, 2)))
    even, odd = rotate(even, odd, cos[None, :], sin[None, :])
    return _rounded(tl.reshape(tl.join(even, odd), (HEADS, 64)))


@triton.jit
def _beside(values, others):
    """``values`` as they are, laid out over the threads as ``others``, which have their shape.

    In a loop, ``values`` from before it come into that layout before it, too.
    """
    if INTERPRETED:
        return values
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f,f", [values, others], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _weight(logits):
    """2^logits of fp32 that is not above 0, and 0 of what is not a number."""
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
def _weigh(logits, visible, top, denominator):
    """The greater maximum, the sum relative to it, and the rounded weights of a tile, [HEADS, KEYS]."""
    logits = tl.where(visible[None, :], logits, float("-inf"))
    greater = tl.maximum(top, tl.max(logits, axis=1))
    weights = _weight(logits - greater[:, None])
    denominator = denominator * tl.exp2(top - greater) + tl.sum(weights, axis=1)
    return greater, denominator, _rounded(weights)


@triton.jit
def _zeros(HEADS: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr):
    if TRANSPOSED:
        return tl.zeros((WIDTH, HEADS), tl.float32)
    else:
        return tl.zeros((HEADS, WIDTH), tl.float32)


@triton.jit
def _decayed(total, decay, TRANSPOSED: tl.constexpr):
    return total * (decay[None, :] if TRANSPOSED else decay[:, None])


@triton.jit
def _accumulate(total, weights, keys, TRANSPOSED: tl.constexpr):
    """total + weights × keys, for a total of [HEADS, WIDTH] or its transpose."""
    if TRANSPOSED:
        return tl.dot(tl.trans(keys), tl.trans(weights), total)
    else:
        return tl.dot(weights, keys, total)


@triton.jit
def _logits(q_low, q_mid, q_high, q_tail, k_low, k_mid, k_high, k_tail):
    """fp32 [HEADS, KEYS], not yet scaled."""
    logits = tl.dot(q_low, tl.trans(k_low))
    logits += tl.dot(q_mid, tl.trans(k_mid))
    logits += tl.dot(q_high, tl.trans(k_high))
    logits += tl.dot(q_tail, tl.trans(k_tail))
    return logits


@triton.jit
def _add_tile(low, mid, high, tail, decay, weights, k_low, k_mid, k_high, k_tail, TRANSPOSED: tl.constexpr):
    """The four parts of the accumulator after a tile."""
    # All before the first product: the assembler runs products one by one when accumulators change among them.
    low, mid = _decayed(low, decay, TRANSPOSED), _decayed(mid, decay, TRANSPOSED)
    high, tail = _decayed(high, decay, TRANSPOSED), _decayed(tail, decay, TRANSPOSED)
    low = _accumulate(low, weights, k_low, TRANSPOSED)
    mid = _accumulate(mid, weights, k_mid, TRANSPOSED)
    high = _accumulate(high, weights, k_high, TRANSPOSED)
    tail = _accumulate(tail, weights, k_tail, TRANSPOSED)
    return low, mid, high, tail


@triton.jit
def _scaled(total, factor, TRANSPOSED: tl.constexpr):
    """total · factor, [HEADS, WIDTH]."""
    if TRANSPOSED:
        return tl.trans(total * factor[None, :])
    else:
        return total * factor[:, None]


@triton.jit
def _store(row, values, known, BEGIN: tl.constexpr, WIDTH: tl.constexpr):
    """fp32 [HEADS, WIDTH] to columns BEGIN .. BEGIN + WIDTH of each head's row, bf16 or fp32, if there are rows."""
    if row is not None:
        address = row + (BEGIN + tl.arange(0, WIDTH)[None, :])
        tl.store(address, round_for(values, row), mask=known[:, None])


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
    HAS_TURNS: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    APART: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Program (query · HEAD_BLOCKS + head block, split).

    ``out`` is the output or, if SPLIT, ``attention.Partials``' values; then ``finished`` is the output, which may be
    ``None``. rows: ``quantize.rows.RowsArguments`` of groups of GROUP heads, or nothing.
    """
    after_previous()
    block, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = (block // HEAD_BLOCKS).to(tl.int64)
    first = block % HEAD_BLOCKS * HEADS
    head = first + tl.arange(0, HEADS)
    known = head < heads

    window_length = window_columns
    if HAS_WINDOW_LENGTHS:
        window_length = tl.load(window_lengths + token).to(tl.int32)
    extra_length = 0
    if HAS_EXTRA:
        extra_length = extra_columns
        if HAS_EXTRA_LENGTHS:
            extra_length = tl.load(extra_lengths + token).to(tl.int32)
    # On their way with the lengths, even if these then say that there is no part: mostly there is.
    q_row = q + token * q_token + head.to(tl.int64)[:, None] * q_head
    q_low = _query(q_row, known, 0, 256)
    q_mid = _query(q_row, known, 256, 128)
    q_high = _query(q_row, known, 384, 64)
    q_tail = _query(q_row, known, 448, 64)
    if RAW:
        cos, sin = load_cos_sin(cos_sin + token * 64, 32)
    sink_logit = tl.load(sink + head, mask=known, other=0.0)

    window_length = tl.minimum(window_length, window_columns)
    extra_length = tl.minimum(extra_length, extra_columns)
    window_tiles = tl.cdiv(window_length, KEYS)
    tiles = window_tiles + tl.cdiv(extra_length, KEYS)
    # Quantised, a share is one program's, and there are two shares at least: one of two parts may be empty.
    live = tl.maximum(tl.minimum(tiles, splits), 2 if SPLIT and len(rows) > 0 else 1)
    begin = split * tiles // live
    end = (split + 1) * tiles // live

    out_row = token * heads + head
    if SPLIT:
        if HEADS < 64 and len(rows) == 0:
            out_row = out_row * splits + split
        if split >= live:
            # Where a list is long and few of its columns count, most programs have no part.
            return

    query_scale = scale_log2
    if RAW:
        # Logits are scaled rather than queries: tensor cores read from shared memory only what was loaded. Queries that
        # were computed would be asked for as fragments with each tile: 43 ldmatrix on sm_90 rather than 15.
        query_scale = _inverse_rms(q_low, q_mid, q_high, q_tail, eps) * scale_log2
        q_tail = _rotated(q_tail, cos, sin, HEADS)

    # Logits and maximum are kept times log2(e). A maximum that begins at the sink is finite whatever is visible.
    sink_top = product(sink_logit, LOG2_E)
    top = sink_top
    denominator = tl.zeros((HEADS,), tl.float32)
    low = _zeros(HEADS, 256, TRANSPOSED)
    mid = _zeros(HEADS, 128, TRANSPOSED)
    high = _zeros(HEADS, 64, TRANSPOSED)
    tail = _zeros(HEADS, 64, TRANSPOSED)

    for tile in tl.range(begin, end, num_stages=STAGES):
        # One loop over both sets, so that the loads of the next tile run ahead across their border.
        in_window = tile < window_tiles
        column = tl.where(in_window, tile, tile - window_tiles) * KEYS + tl.arange(0, KEYS)
        slots = tl.where(in_window, window_slots + token * window_columns, extra_slots + token * extra_columns)
        length = tl.where(in_window, window_length, extra_length)
        slot = tl.load(slots + column, mask=column < length, other=-1)
        visible = slot >= 0
        slot = tl.where(visible, slot, 0)
        pool = tl.where(in_window, window, extra)
        pitch = tl.where(in_window, window_page, extra_page)
        if PACKED:
            shift = tl.where(in_window, WINDOW_SHIFT, EXTRA_SHIFT)
            page = pool + (slot >> shift).to(tl.int64) * pitch
            row = (slot & ((1 << shift) - 1)).to(tl.int32)
            entry = page + row * 576
            scales = page + ((576 << shift) + row * 8)
            scales = tl.load(scales.to(tl.pointer_type(tl.int64), bitcast=True), mask=visible, other=0)
            k_low = _decoded(entry, scales, visible, 0, 4, KEYS)
            k_mid = _decoded(entry, scales, visible, 256, 2, KEYS)
            k_high = _decoded(entry, scales, visible, 384, 1, KEYS)
            k_tail = _plain(entry + 448, visible, 0, 64)
        else:
            entry = pool + slot.to(tl.int64) * pitch
            k_low = _plain(entry, visible, 0, 256)
            k_mid = _plain(entry, visible, 256, 128)
            k_high = _plain(entry, visible, 384, 64)
            k_tail = _plain(entry, visible, 448, 64)

        logit_scale = query_scale
        if RAW:
            # Else, where logits are APART, it would pass through shared memory to them with each tile.
            logit_scale = _beside(query_scale, denominator)[:, None]
        previous = top
        if APART:
            weights = tl.zeros((HEADS, KEYS), OPERAND)
            if tile < end:  # always
                # Scaled one by one: the compiler would make one chain of products of a bare sum. The tail first: it
                # comes through registers if it was rotated, which are fewer before there is a sum.
                logits = tl.dot(q_tail, tl.trans(k_tail)) * logit_scale
                logits += tl.dot(q_low, tl.trans(k_low)) * logit_scale
                logits += tl.dot(q_mid, tl.trans(k_mid)) * logit_scale
                logits += tl.dot(q_high, tl.trans(k_high)) * logit_scale
                top, denominator, weights = _weigh(logits, visible, top, denominator)
        elif TRANSPOSED and STAGES > 1:
            # In a branch, where the compiler waits for each product. Beside the loop's loads it would pipeline the
            # products, too, and then (3.8) lets warps store a tile's keys while tcgen05 may still read those of the
            # tile before from the same place: found in the emulator, which orders accesses whatever their timing.
            if tile < end:  # always
                logits = _logits(q_low, q_mid, q_high, q_tail, k_low, k_mid, k_high, k_tail) * logit_scale
                top, denominator, weights = _weigh(logits, visible, top, denominator)
                low, mid, high, tail = _add_tile(
                    *(low, mid, high, tail, tl.exp2(previous - top), weights, k_low, k_mid, k_high, k_tail),
                    TRANSPOSED,
                )
        else:
            logits = _logits(q_low, q_mid, q_high, q_tail, k_low, k_mid, k_high, k_tail) * logit_scale
            top, denominator, weights = _weigh(logits, visible, top, denominator)
        if APART or not TRANSPOSED or STAGES == 1:
            low, mid, high, tail = _add_tile(
                *(low, mid, high, tail, tl.exp2(previous - top), weights, k_low, k_mid, k_high, k_tail), TRANSPOSED
            )

    if SPLIT:
        STATS: tl.constexpr = 3 if len(rows) > 0 else 2
        if HEADS >= 64 or len(rows) > 0:
            # Where accumulators crowd the registers, not before the loop: the compiler would keep it through that.
            out_row = out_row * splits + split
        tl.store(partial_stats + out_row * STATS, top, mask=known)
        tl.store(partial_stats + out_row * STATS + 1, denominator, mask=known)
        # Over its own sum, a part is no larger than a key.
        factor = 1.0 / tl.where(denominator > 0, denominator, 1.0)
    else:
        factor = 1.0 / (denominator + tl.exp2(sink_top - top))
    row = None
    if out is not None:
        row = out + out_row[:, None] * 512
    low = _scaled(low, factor, TRANSPOSED)
    _store(row, low, known, 0, 256)
    mid = _scaled(mid, factor, TRANSPOSED)
    _store(row, mid, known, 256, 128)
    high = _scaled(high, factor, TRANSPOSED)
    _store(row, high, known, 384, 64)
    rotated = _scaled(tail, factor, TRANSPOSED)
    if HAS_TURNS and not SPLIT:
        cos, sin = load_cos_sin(cos_sin + token * 64, 32)
        even, odd = tl.split(tl.reshape(rotated, (HEADS, 32, 2)))
        even, odd = rotate(even, odd, cos[None, :], -sin[None, :])
        rotated = tl.reshape(tl.join(even, odd), (HEADS, 64))
    _store(row, rotated, known, 448, 64)

    if SPLIT:
        add_parts(
            *(out, partial_stats, sink, cos_sin, finished, rows, semaphores + block, token, first, heads, split, live),
            *(splits, HAS_TURNS, HEADS, WARPS, GROUP),
        )
    elif len(rows) > 0:
        store_whole(low, mid, high, rotated, rows, token, first, heads, GROUP)
