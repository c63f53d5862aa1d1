"""Sparse attention: one softmax with a sink over the window and the selected compressed entries (DEEPSEEK_V4.md §3.3).

Contract: ``nvfp4_sgl.ops.attention.sparse_attention``. A key is its own value, 512 wide, read in place from SGLang's
pages of 584-byte entries (``nvfp4_sgl.numerics.kv_entry``) or from rows of bf16::

    s_j = (q · k_j) · scale
    o   = Σ_j exp(s_j − m) k_j / (Σ_j exp(s_j − m) + exp(sink − m)),  m = max(s_j, sink)

A program serves up to 64 heads (:class:`Tiling`) of one query and one stretch of its keys: each entry is read once for
them and decoded to bf16 on the way to the tensor cores. Where the queries alone do not fill the chip, the keys are
split (:func:`choose_splits`); then the programs wait for one another and add the parts in a fixed order
(``attention_parts``). Nothing depends on the batch but the number of splits: with the same ``splits`` a query's result
has the same bits in a prompt, in a chunk of it, or alone, wherever its entries lie.

The last 64 columns of ``o`` are still rotated by the keys' positions. Given the *turns* of the queries' positions
(``rope.rope_turns``) they are turned back before ``o`` is rounded, as DEEPSEEK_V4.md §3.3 has it.

Precision:

* a decoded entry is exact in bf16: E4M3 has 4 significant bits of bf16's 8, and a power of two only moves the exponent
  (least result of ``kv_entry.pack``: 2^-9 · 2^-22; greatest: below 2^128);
* raw queries (``query_eps``) are not rounded but for their last 64 columns, which are turned in fp32 and rounded to
  bf16 once; the logits are multiplied by the inverse root mean square, fp32. Where the squares of a query overflow fp32
  it counts as 0, and keys whose product with it overflows, too, do not count for it;
* logits, maxima and sums are fp32; the weights exp(s − m) ≤ 1 are rounded to bf16 for the second product, the sum that
  divides takes them unrounded; the output is rounded once. So, with exact w_j (those that the sum divides),
  |error| ≤ (2^-8 + 2^-8 + small) · Σ_j w_j |k_j| per element, small being the fp32 error of the logits; turned back,
  an element of a pair has its own such bound times |cos| plus the other's times |sin|.

Floor: 584 bytes per entry and query (1024 for bf16 rows) plus q and o; 2·(512 + 512) operations per head and entry.
For 64 heads and 584 bytes that is 224 operations a byte, near the balance of an H200, so both floors count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import chip
from .attention_parts import LOG2_E, add_parts
from .checks import (
    OperandTypeError,
    require_aligned,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_pages,
    require_power_of_two,
    require_range,
    require_rows,
    require_same_device,
    require_shape,
)
from .kv_entry import DIM, ROPE_DIM, page_bytes
from .overlap import OVERLAPPED, after_previous
from .rope import load_turns, mean_square_scale, rotate
from .rounding import INTERPRETED, product, round_for, round_to_bf16

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
def _turned(q_tail, cos, sin, HEADS: tl.constexpr):
    """The last 64 columns of raw queries turned by cos and sin, fp32 [32], and rounded to bf16 once."""
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
def _scaled(total, factor, TRANSPOSED: tl.constexpr):
    """total · factor, [HEADS, WIDTH]."""
    if TRANSPOSED:
        return tl.trans(total * factor[None, :])
    else:
        return total * factor[:, None]


@triton.jit
def _store(row, values, known, BEGIN: tl.constexpr, WIDTH: tl.constexpr):
    """fp32 [HEADS, WIDTH] to columns BEGIN .. BEGIN + WIDTH of each head's row, bf16 or fp32."""
    address = row + (BEGIN + tl.arange(0, WIDTH)[None, :])
    tl.store(address, round_for(values, row), mask=known[:, None])


@triton.jit
def _attend(
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
    turns,
    out,
    partial_stats,
    heads,
    eps,
    arrivals,
    finished,
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
):
    """Program (query · HEAD_BLOCKS + head block, split).

    ``out`` is the output or, if SPLIT, :class:`Partials`' values; then ``finished`` is the output.
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
        cos, sin = load_turns(turns + token * 64, 32)
    sink_logit = tl.load(sink + head, mask=known, other=0.0)

    window_length = tl.minimum(window_length, window_columns)
    extra_length = tl.minimum(extra_length, extra_columns)
    window_tiles = tl.cdiv(window_length, KEYS)
    tiles = window_tiles + tl.cdiv(extra_length, KEYS)
    live = tl.maximum(tl.minimum(tiles, splits), 1)
    begin = split * tiles // live
    end = (split + 1) * tiles // live

    out_row = token * heads + head
    if SPLIT:
        if HEADS < 64:
            out_row = out_row * splits + split
        if split >= live:
            # Where a list is long and few of its columns count, most programs have no part.
            return

    query_scale = scale_log2
    if RAW:
        # Logits are scaled rather than queries: tensor cores read from shared memory only what was loaded. Queries that
        # were computed would be asked for as fragments with each tile: 43 ldmatrix on sm_90 rather than 15.
        query_scale = _inverse_rms(q_low, q_mid, q_high, q_tail, eps) * scale_log2
        q_tail = _turned(q_tail, cos, sin, HEADS)

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
                # comes through registers if it was turned, which are fewer before there is a sum.
                logits = tl.dot(q_tail, tl.trans(k_tail)) * logit_scale
                logits += tl.dot(q_low, tl.trans(k_low)) * logit_scale
                logits += tl.dot(q_mid, tl.trans(k_mid)) * logit_scale
                logits += tl.dot(q_high, tl.trans(k_high)) * logit_scale
                top, denominator, weights = _weigh(logits, visible, top, denominator)
        else:
            logits = tl.dot(q_low, tl.trans(k_low))
            logits += tl.dot(q_mid, tl.trans(k_mid))
            logits += tl.dot(q_high, tl.trans(k_high))
            logits += tl.dot(q_tail, tl.trans(k_tail))
            logits *= logit_scale
            top, denominator, weights = _weigh(logits, visible, top, denominator)
        decay = tl.exp2(previous - top)
        # All before the first product: the assembler runs products one by one when accumulators change among them.
        low, mid = _decayed(low, decay, TRANSPOSED), _decayed(mid, decay, TRANSPOSED)
        high, tail = _decayed(high, decay, TRANSPOSED), _decayed(tail, decay, TRANSPOSED)
        low = _accumulate(low, weights, k_low, TRANSPOSED)
        mid = _accumulate(mid, weights, k_mid, TRANSPOSED)
        high = _accumulate(high, weights, k_high, TRANSPOSED)
        tail = _accumulate(tail, weights, k_tail, TRANSPOSED)

    if SPLIT:
        if HEADS >= 64:
            # Where accumulators crowd the registers, not before the loop: the compiler would keep it through that.
            out_row = out_row * splits + split
        tl.store(partial_stats + out_row * 2, top, mask=known)
        tl.store(partial_stats + out_row * 2 + 1, denominator, mask=known)
        # Over its own sum, a part is no larger than a key.
        factor = 1.0 / tl.where(denominator > 0, denominator, 1.0)
    else:
        factor = 1.0 / (denominator + tl.exp2(sink_top - top))
    row = out + out_row[:, None] * 512
    _store(row, _scaled(low, factor, TRANSPOSED), known, 0, 256)
    _store(row, _scaled(mid, factor, TRANSPOSED), known, 256, 128)
    _store(row, _scaled(high, factor, TRANSPOSED), known, 384, 64)
    rotated = _scaled(tail, factor, TRANSPOSED)
    if HAS_TURNS and not SPLIT:
        cos, sin = load_turns(turns + token * 64, 32)
        even, odd = tl.split(tl.reshape(rotated, (HEADS, 32, 2)))
        even, odd = rotate(even, odd, cos[None, :], -sin[None, :])
        rotated = tl.reshape(tl.join(even, odd), (HEADS, 64))
    _store(row, rotated, known, 448, 64)

    if SPLIT:
        add_parts(
            *(out, partial_stats, sink, turns, finished, arrivals + block, token, first, heads, split, live, splits),
            *(HAS_TURNS, HEADS, WARPS),
        )


class Entries(NamedTuple):
    """A pool of keys, in place.

    pages: packed, uint8 [pages, >= ``page_bytes(P)``]; or plain, bf16 [pages, P·512]; the last dimension contiguous.
    page_size: P, entries of a page, a power of two; slot = page · P + row.
    """

    pages: Tensor
    page_size: int


class Partials(NamedTuple):
    """What the programs of one query leave for the sum of their parts; of programs without a part, nothing.

    values: fp32 [T, H, S, 512], each part over its own sum of weights, not turned back.
    stats: fp32 [T, H, S, 2]: the greatest logit times log2(e), not below the sink, and the sum of weights under it.
    """

    values: Tensor
    stats: Tensor


@dataclass(frozen=True)
class Tiling:
    """How the work is laid on a chip.

    Attributes:
        heads: heads of a program, fewer are padded; 64 is what one warp group multiplies.
        keys: entries at once.
        warps, stages: as Triton's.
        resident: programs that a multiprocessor holds at once, by their shared memory and registers. Never more than
            it does hold: programs of split keys wait for one another.
        transposed: accumulate [512, heads] rather than [heads, 512].
        apart: logits and weights are computed in a branch. The compiler gives a product that it sees feeding another to
            each warp group whole; what leaves a branch it does not follow, and shares the logits among the groups. The
            weights then pass through shared memory.
    """

    heads: int = 64
    keys: int = 64
    warps: int = 8
    stages: int = 3
    resident: int = 1
    transposed: bool = False
    apart: bool = False


HOPPER = Tiling(stages=5, apart=True)
"""Accumulators fill half of each thread's registers; 218 KiB of shared memory.

Five stages, since an entry follows its slot, are two tiles ahead. In three, which are one, entries are asked for after
the products of a tile and awaited at the beginning of the next: nothing hides their way. Measured on an H200,
2026-11-22, us for 64 heads and 640 keys of 2048 and 256 raw queries: 730 and 95 in five stages, 816 and 112 in three,
849 and 113 in two. For 64 queries or fewer only five stages were timed with keys decoded block by block."""

HOPPER_PLAIN = Tiling(apart=True)
"""bf16 rows: two tiles of them ahead do not fit into shared memory."""

BLACKWELL = Tiling(stages=2, transposed=True)
"""64 heads as rows would take all 512 columns of tensor memory and leave none for the logits; as columns, 256."""

BLACKWELL_PLAIN = Tiling(stages=1, transposed=True)
"""bf16 rows: two stages of them do not fit into shared memory beside the query."""


FEW_HEADS = Tiling(heads=16, keys=32, warps=4, resident=2)
"""Up to 16 heads, as a rank has them: instructions of 16 rows, 53 KiB of shared memory; padded to 64 rows, they
would cost the tensor cores as much as for 64 heads."""


def default_tiling(heads: int, *, packed: bool) -> Tiling:
    """The tiling for so many heads of packed entries or rows of bf16, on the architecture that Triton compiles for."""
    if heads <= FEW_HEADS.heads:
        return FEW_HEADS
    if INTERPRETED.value or triton.runtime.driver.active.get_current_target().arch < 100:
        return HOPPER if packed else HOPPER_PLAIN
    return BLACKWELL if packed else BLACKWELL_PLAIN


COUNTED_TILES = 40
"""Of ``FEW_HEADS``. The list of HCA is as wide as the longest context has entries, and mostly few of them count."""


def choose_tiling(queries: int, heads: int, columns: Sequence[int], processors: int, *, packed: bool) -> Tiling:
    """The tiling for so many queries, from sizes alone; arguments as of :func:`choose_splits`.

    Few queries of many heads are dealt to programs of few heads, as long as each can have a tile for itself and a
    quarter of the chip remains: more of the chip works on them. Measured on an H200 with parts added by a second
    launch, us for 1 query of 64 heads with 128, 640 and 1152 keys: 8.8, 10.5 and 13.6 against 14.6, 18.4 and 18.6;
    for 8 queries 10.7, 23.9 and 32.4 against 14.5, 22.3 and 27.0.
    """
    queries = triton.next_power_of_2(queries)
    tiles = min(sum(triton.cdiv(width, FEW_HEADS.keys) for width in columns), COUNTED_TILES)
    programs = queries * triton.cdiv(heads, FEW_HEADS.heads) * tiles
    if programs <= processors * FEW_HEADS.resident * 3 // 4:
        return FEW_HEADS
    return default_tiling(heads, packed=packed)


def most_splits(queries: int, heads: int, processors: int, tiling: Tiling) -> int:
    """How many splits the chip can place at once: they wait for one another."""
    return max(processors * tiling.resident // max(queries * triton.cdiv(heads, tiling.heads), 1), 1)


def choose_splits(queries: int, heads: int, columns: Sequence[int], processors: int, tiling: Tiling = HOPPER) -> int:
    """Into how many programs to split each query's keys, from sizes alone, so that a CUDA graph may hold the launch.

    Counts the tiles that a program walks, plus two tiles' time to store the part and add it later. The fewest splits
    among equals; never more than :func:`most_splits`.

    The queries are counted as the next power of two. The number of splits orders the sums, so it decides the last bits
    of a result; this way it is the same for 3 queries run as they are and in a graph captured for 4, as long as graphs
    are captured for the powers of two among their sizes. At worst, just above a power of two that fills the chip, a
    split is missed that would have paid.

    Args:
        columns: widths of the slot lists. They count as the queries do: give graph and eager step the same.
        processors: multiprocessors of the chip.
    """
    most = most_splits(triton.next_power_of_2(queries), heads, processors, tiling)
    tiles = sum(triton.cdiv(width, tiling.keys) for width in columns)
    return min(
        range(1, max(min(tiles, most), 1) + 1),
        key=lambda splits: (triton.cdiv(tiles, splits) + 2 * (splits > 1), splits),
    )


def new_partials(q: Tensor, splits: int) -> Partials | None:
    """Room for the parts of a launch, ``None`` where it needs none."""
    if splits == 1:
        return None
    rows = (*q.shape[:2], splits)
    return Partials(*(torch.empty(*rows, width, dtype=torch.float32, device=q.device) for width in (DIM, 2)))


def new_arrivals(tokens: int, heads: int, device: torch.device | str) -> Tensor:
    """Counters for launches of up to so many queries of so many heads, one launch at a time."""
    return torch.zeros(tokens * heads, dtype=torch.int32, device=device)


def sparse_attention(
    q: Tensor,
    window: Entries,
    window_slots: Tensor,
    sink: Tensor,
    scale: float,
    extra: Entries | None = None,
    extra_slots: Tensor | None = None,
    *,
    window_lengths: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    turns: Tensor | None = None,
    query_eps: float | None = None,
    splits: int | None = None,
    partials: Partials | None = None,
    arrivals: Tensor | None = None,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """One softmax over two sets of cached entries and a sink; keys are the values too. See the module's text.

    Args:
        q: bf16 [T, H, 512], the last dimension contiguous; any H. Normalised and rotated, or, with ``query_eps``, the
            projection.
        window, window_slots: the sliding window's pool and int32 or int64 [T, W]; a negative slot is none.
        sink: fp32 [H], finite, in logit units, not scaled; it has no value.
        scale: softmax scale, ``512**-0.5``.
        extra, extra_slots: compressed entries, packed or plain as the window, and [T, K] in the dtype of
            ``window_slots``; both ``None`` in window-only layers.
        window_lengths, extra_lengths: int32 or int64 [T], columns that count, whatever lies beyond; all by default.
        turns: fp32 [T, 64] from ``rope.rope_turns`` of the queries' positions: the last 64 columns are turned back by
            them, in fp32; not at all by default.
        query_eps: divide each row of ``q`` (its logits, rather) by its root mean square, with this added to the mean
            square, and turn its last 64 columns by ``turns``, which it needs. By default ``q`` is ready.
        splits: programs per query and block of heads, up to :func:`most_splits` of this device; by default what
            :func:`choose_splits` says of it.
        partials: from :func:`new_partials` for the same shape and splits; allocated unless given.
        arrivals: from :func:`new_arrivals`, zero before and after; where keys are split only. Allocated unless given,
            which is a launch.
        out: bf16 [T, H, 512], contiguous; allocated unless given. A query that sees nothing gives 0.
        tiling: by default what :func:`choose_tiling` says of this device.
    """
    require_dimensions("q", q, 3, "[T, H, 512]")
    tokens, heads = q.shape[:2]
    require_shape("q", q, (tokens, heads, DIM), "[T, H, 512]")
    require_dtype("q", q, torch.bfloat16)
    require_rows("q", q)
    require_aligned("q", q)
    require_shape("sink", sink, (heads,), "[H]")
    require_dtype("sink", sink, torch.float32)
    require_contiguous("sink", sink)
    packed = window.pages.dtype == torch.uint8
    _require_set("window", window, window_slots, window_lengths, tokens)
    has_extra = extra is not None and extra_slots is not None
    if extra is None or extra_slots is None:
        # Placeholders of the right types, which the kernel does not read.
        extra, extra_slots, extra_lengths = window, window_slots, None
    else:
        _require_set("extra", extra, extra_slots, extra_lengths, tokens)
        require_dtype("extra.pages", extra.pages, window.pages.dtype)
        require_dtype("extra_slots", extra_slots, window_slots.dtype)
    columns = [window_slots.shape[1], extra_slots.shape[1] if has_extra else 0]
    processors = chip.processors(q.device)
    tiling = tiling or choose_tiling(tokens, heads, columns, processors, packed=packed)
    if splits is None:
        splits = choose_splits(tokens, heads, columns, processors, tiling)
    most = most_splits(tokens, heads, processors, tiling) if q.is_cuda else math.inf
    require_range("splits", splits, 1, most)
    if turns is not None:
        require_shape("turns", turns, (tokens, ROPE_DIM), "[T, 64]")
        require_dtype("turns", turns, torch.float32)
        require_contiguous("turns", turns)
    if query_eps is not None:
        require_range("query_eps", query_eps, 0.0, 1.0)
        if turns is None:
            raise OperandTypeError("turns: expected them with query_eps, by which raw queries are rotated, found None")
    if out is None:
        out = torch.empty(tokens, heads, DIM, dtype=q.dtype, device=q.device)
    require_shape("out", out, q.shape, "[T, H, 512]")
    require_dtype("out", out, torch.bfloat16)
    require_contiguous("out", out)
    require_aligned("out", out)
    if partials is None:
        partials = new_partials(q, splits)
    if partials is not None:
        for name, part, width in (("values", partials.values, DIM), ("stats", partials.stats, 2)):
            require_shape(f"partials.{name}", part, (tokens, heads, splits, width), "[T, H, splits, 512 or 2]")
            require_dtype(f"partials.{name}", part, torch.float32)
            require_contiguous(f"partials.{name}", part)
    if partials is not None and arrivals is None:
        arrivals = new_arrivals(tokens, heads, q.device)
    if arrivals is not None:
        require_dtype("arrivals", arrivals, torch.int32)
        require_contiguous("arrivals", arrivals)
        require_range("counters of arrivals", arrivals.numel(), tokens * heads, math.inf)
    require_same_device(
        "q",
        q,
        window=window.pages,
        window_slots=window_slots,
        window_lengths=window_lengths,
        extra=extra.pages,
        extra_slots=extra_slots,
        extra_lengths=extra_lengths,
        sink=sink,
        turns=turns,
        arrivals=arrivals,
        out=out,
        **({} if partials is None else partials._asdict()),
    )
    if tokens == 0 or heads == 0:
        return out

    target, stats = (out, out) if partials is None else partials
    has_turns = turns is not None
    turns = sink if turns is None else turns
    head_blocks = triton.cdiv(heads, tiling.heads)
    _attend[(tokens * head_blocks, splits)](
        q,
        q.stride(0),
        q.stride(1),
        *_pool_arguments(window),
        window_slots,
        window_slots if window_lengths is None else window_lengths,
        columns[0],
        *_pool_arguments(extra),
        extra_slots,
        extra_slots if extra_lengths is None else extra_lengths,
        columns[1],
        sink,
        scale * LOG2_E.value,
        turns,
        target,
        stats,
        heads,
        0.0 if query_eps is None else query_eps,
        stats if arrivals is None else arrivals,
        out,
        RAW=query_eps is not None,
        PACKED=packed,
        WINDOW_SHIFT=window.page_size.bit_length() - 1,
        EXTRA_SHIFT=extra.page_size.bit_length() - 1,
        HAS_EXTRA=has_extra,
        HAS_WINDOW_LENGTHS=window_lengths is not None,
        HAS_EXTRA_LENGTHS=extra_lengths is not None,
        HAS_TURNS=has_turns,
        SPLIT=partials is not None,
        HEAD_BLOCKS=head_blocks,
        HEADS=tiling.heads,
        KEYS=tiling.keys,
        STAGES=tiling.stages,
        TRANSPOSED=tiling.transposed,
        APART=tiling.apart,
        WARPS=tiling.warps,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **OVERLAPPED,
    )
    return out


def _pool_arguments(entries: Entries) -> tuple[Tensor, int]:
    """The pool's bytes, and the distance of its pages (packed) or of its rows (plain) in bytes."""
    pages = entries.pages
    if pages.dtype == torch.uint8:
        return pages, pages.stride(0)
    return pages.view(torch.uint8), DIM * pages.element_size()


def _require_set(name: str, entries: Entries, slots: Tensor, lengths: Tensor | None, tokens: int) -> None:
    pages, page_size = entries
    require_power_of_two(f"{name}.page_size", "entries of a page", page_size)
    if pages.dtype == torch.uint8:
        require_pages(f"{name}.pages", pages, page_bytes(page_size), page_size)
    else:
        require_dtype(f"{name}.pages", pages, torch.bfloat16, torch.uint8)
        require_shape(f"{name}.pages", pages, (pages.shape[0], page_size * DIM), "[pages, page_size · 512]")
        require_contiguous(f"{name}.pages", pages)
        require_aligned(f"{name}.pages", pages)
    require_dimensions(f"{name}_slots", slots, 2, "[T, columns]")
    require_shape(f"{name}_slots", slots, (tokens, slots.shape[1]), "[T, columns]")
    require_dtype(f"{name}_slots", slots, torch.int32, torch.int64)
    require_contiguous(f"{name}_slots", slots)
    if lengths is not None:
        require_shape(f"{name}_lengths", lengths, (tokens,), "[T]")
        require_dtype(f"{name}_lengths", lengths, torch.int32, torch.int64)
        require_contiguous(f"{name}_lengths", lengths)
