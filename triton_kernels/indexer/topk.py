"""The best entries of each query, without sorting: a threshold and one pass of prefix sums (DEEPSEEK_V4.md §5).

A query at position p sees ratio-4 entries ``w < (p + 1) // 4``; of more than topk it attends to those of the largest
scores. A program holds up to :data:`CHUNK` scores of one query in registers as integers of the same order. Of more than
:data:`SMALL` it first finds a bound that topk to twice as many reach, and keeps those alone: their indices wait, in
order, where the slots will lie. Of what is left it finds the topk-th largest by counting those that reach a bound, and
stores what is chosen at the place that a prefix sum gives it, so in the order of the entries.

Of a longer row each chunk nominates its own best, which hold all of the row's best, and counts itself in; the program
that comes last makes the same choice among the nominated. Nobody waits. Equal scores go to the lower entry in either
case, and nothing else is left to chance: the result depends on the scores alone.

The order of scores is that of the numbers, −inf to +inf; −0 equals +0, and NaN is below all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandTypeError, OperandValueError
from nvfp4_sgl.formats import checks

from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import INTERPRETED
from ..plan.batch import Batch
from .scores import visible_entries

CHUNK = 16384
"""Scores that a program holds at most."""
MOST = 2048
"""Entries that a query may choose."""
SMALL = 4096
"""Scores among all of which the threshold is found, at most; half as many up to a topk of 512. Of more, some are kept.

Measured on an H200 (2026-11-22, when keys were made by a negation): choosing 512 of 4096 for 1, 8, 64 and 256 queries
takes 7.0, 7.2, 7.9 and 9.9 us if some are kept first, 5.6, 6.8, 7.3 and 13.0 if not.
"""
CANDIDATES = 16384
"""What the chunks of a row may yield together."""

WARPS = 8
"""Of a program, at most; 4 up to 2048 scores.

Measured on an H200 (2026-11-22; likewise): choosing 512 of 16384 for 1, 8, 64 and 256 queries takes 8.3, 8.8, 9.5 and
13.3 us, with 16 warps of 64 registers 8.5, 9.6, 10.6 and 15.8; of 2048 with 4 warps 4.7, 4.7, 5.5 and 6.3, with 8 5.1,
5.1, 6.1 and 7.0.
"""
REGISTERS = 128
"""Of a thread, so that a multiprocessor holds two programs: one loads while the other counts."""

ABSENT_KEY = tl.constexpr(-0x80000000)
UNIT = tl.constexpr(1 / 16)
"""Of the largest magnitude at an end: below it bounds are sought among scores, above among their logarithms."""
SPREAD = tl.constexpr(0.35)
"""Half the distance of a round's two bounds, over the root of how many keys lie between the ends."""


@triton.jit
def _ordered(scores):
    """int32 keys of the same order as the fp32 scores, all above ABSENT_KEY.

    Their order is rotated round by ~ and not by a negation: ptxas (12.9, 13.0, 13.3) loses one that a maximum of three
    keys takes in, triton-lang/triton PR 11032. With it rows of 4100 scores got no slots on an H200.
    """
    # The difference makes one zero of both, and of every NaN the same one: a GPU's has these bits.
    bits = (0.0 - scores).to(tl.int32, bitcast=True)
    if INTERPRETED:
        bits = tl.where(scores != scores, 0x7FFFFFFF, bits)
    return tl.maximum(~(bits ^ ((bits >> 31) & 0x7FFFFFFF)), ABSENT_KEY + 1)


@triton.jit
def _spaced(key, unit):
    """The key on a scale nearly linear up to the score ``unit`` (fp32) and nearly logarithmic above, int32."""
    distance = (tl.abs(key).to(tl.float32, bitcast=True) + unit).to(tl.int32, bitcast=True)
    distance -= unit.to(tl.int32, bitcast=True)
    return tl.where(key < 0, -distance, distance)


@triton.jit
def _key_at(place, unit):
    """The key that :func:`_spaced` puts there, but for rounding."""
    reach = tl.abs(place) + unit.to(tl.int32, bitcast=True)
    distance = (reach.to(tl.float32, bitcast=True) - unit).to(tl.int32, bitcast=True)
    return tl.where(place < 0, -distance, distance)


@triton.jit
def _bound(keys, k, slack, low, high, count):
    """(bound, how many reach it): a bound that ``k`` to ``k + slack`` keys reach, or else the k-th largest key.

    low: a bound that ``count`` keys reach, at least k; high: one that none does. int32.
    """
    none, slow = 0, low > high
    unit = tl.maximum(-low, high).to(tl.float32, bitcast=True) * UNIT
    unit = tl.where(unit < float("inf"), unit, 0.0)
    while (count > k + slack) & (low + 1 < high):
        # Two bounds a round, on both sides of where the aim would be if scores lay evenly between the ends on a scale
        # that suits normal ones, and those of one sign and many sizes; as far apart as chance makes it. After a round
        # that was no better than halving the quarters, of keys: so it ends whatever the scores.
        before = count - none
        root = tl.rsqrt(before * 1.0)
        aim = (count - k - slack * 0.5) * root * root
        spread = tl.maximum(root * SPREAD, root * root * 0.5)
        bottom, top = tl.where(slow, low, _spaced(low, unit)), tl.where(slow, high, _spaced(high, unit))
        half = top * 0.5 - bottom * 0.5
        below = bottom + 2 * (tl.where(slow, 0.25, tl.maximum(aim - spread, 0.03)) * half).to(tl.int32)
        above = bottom + 2 * (tl.where(slow, 0.75, tl.minimum(aim + spread, 0.97)) * half).to(tl.int32)
        below, above = tl.where(slow, below, _key_at(below, unit)), tl.where(slow, above, _key_at(above, unit))
        below = tl.minimum(tl.maximum(below, low + 1), high - 1)
        above = tl.minimum(tl.maximum(above, below), high - 1)
        # Both counts in one sum.
        reached = tl.sum(tl.where(keys >= above, 0x10001, tl.where(keys >= below, 1, 0)))
        reach_below, reach_above = reached & 0xFFFF, reached >> 16
        low = tl.where(reach_above >= k, above, tl.where(reach_below >= k, below, low))
        count = tl.where(reach_above >= k, reach_above, tl.where(reach_below >= k, reach_below, count))
        none = tl.where(reach_below < k, reach_below, tl.where(reach_above < k, reach_above, none))
        high = tl.where(reach_below < k, below, tl.where(reach_above < k, above, high))
        slow = ((count - none) * 2 > before) & ~slow
    return low, count


@triton.jit
def _stretch(SIZE: tl.constexpr, LANES: tl.constexpr):
    """Of which a warp holds all, if there are SIZE."""
    return max(SIZE * 32 // LANES, min(32, SIZE))


@triton.jit
def _lane(stretch, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Of :func:`_index`: (where each lane begins in a stretch, where each warp's stretch begins), four-dimensional."""
    EACH: tl.constexpr = max(1, min(4, SIZE // LANES))
    WIDE: tl.constexpr = min(32, SIZE // EACH)
    WARPS: tl.constexpr = min(LANES, SIZE // EACH) // WIDE
    lane = tl.arange(0, WIDE) * EACH
    return lane[None, None, :, None], (tl.arange(0, WARPS) * stretch)[None, :, None, None]


@triton.jit
def _offset(SIZE: tl.constexpr, LANES: tl.constexpr):
    """Of :func:`_index`: what is the same for all threads, [parts, 1, 1, each]."""
    EACH: tl.constexpr = max(1, min(4, SIZE // LANES))
    PARTS: tl.constexpr = max(1, SIZE // (LANES * EACH))
    part = tl.arange(0, PARTS) * min(32 * EACH, SIZE)
    return part[:, None, None, None] + tl.arange(0, EACH)[None, None, None, :]


@triton.jit
def _index(stretch, SIZE: tl.constexpr, LANES: tl.constexpr):
    """What a program of LANES threads holds at once, SIZE at most: indices [parts, warps, lanes, up to 4].

    Each warp has a stretch of its own, whole parts of it; what lies beyond it is the next warp's.
    """
    lane, begin = _lane(stretch, SIZE, LANES)
    return begin + lane + _offset(SIZE, LANES)


@triton.jit
def _below(limit, stretch, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Which of :func:`_index` are in their warp's stretch and below the limit. This needs no index of each."""
    lane, begin = _lane(stretch, SIZE, LANES)
    return _offset(SIZE, LANES) < tl.minimum(limit - begin, stretch) - lane


@triton.jit
def _without_ties(keys, stretch, threshold, count, k, most, LANES: tl.constexpr):
    """The keys, of which ``count`` reach the threshold, the k-th largest: of those equal to it the first alone, so that
    ``k`` to ``most`` do; the others absent."""
    begin, end = 0, keys.numel
    while count > most:
        middle = (begin + end) // 2
        taken = (keys > threshold) | ((keys == threshold) & _below(middle, stretch, keys.numel, LANES))
        reached = tl.sum(tl.where(taken, 1, 0))
        begin, end = tl.where(reached >= k, begin, middle), tl.where(reached >= k, middle, end)
        count = tl.where(reached >= k, reached, count)
    return tl.where((keys > threshold) | _below(end, stretch, keys.numel, LANES), keys, ABSENT_KEY)


@triton.jit
def _counts_before(chosen):
    """How many are chosen before each lane's of each part, and in all, less than 65536: (int32 [words, warps, lanes],
    int32). chosen: bool [parts, warps, lanes, n] as :func:`_index` orders them, up to 8 parts.

    A part's counts have 16 bits of a word: the upper ones in the second half of the parts.
    """
    counts = tl.sum(tl.where(chosen, 1, 0), axis=3)
    if chosen.shape[0] == 1:
        words = counts
    else:
        halves = tl.reshape(counts, (2, chosen.shape[0] // 2, chosen.shape[1], chosen.shape[2]))
        words = tl.sum(halves << (tl.arange(0, 2) * 16)[:, None, None, None], axis=0)
    # Within a warp by shuffles; between warps one count of each.
    of_parts = tl.sum(words, axis=2)
    of_half = tl.sum(of_parts, axis=0)
    of_warp = (of_half & 0xFFFF) + (of_half >> 16)
    earlier = tl.cumsum(of_warp, axis=0) - of_warp
    earlier = earlier | ((earlier + (of_half & 0xFFFF)) << 16)
    word = tl.arange(0, words.shape[0])[:, None]
    begin = tl.where(word >= 0, earlier[None, :], 0)
    for row in tl.static_range(words.shape[0] - 1):
        of_part = tl.sum(tl.where(word == row, of_parts, 0), axis=0)
        begin += tl.where(word > row, of_part[None, :], 0)
    return tl.cumsum(words, axis=2) - words + begin[:, :, None], tl.sum(of_warp)


@triton.jit
def _begin(before, PART: tl.constexpr):
    """Of :func:`_counts_before`: int32 [warps, lanes] of one part."""
    words = tl.arange(0, before.shape[0])[:, None, None]
    word = tl.sum(tl.where((words == PART) | (words + before.shape[0] == PART), before, 0), axis=0)
    return word & 0xFFFF if before.shape[0] > PART else word >> 16


@triton.jit
def _one(x, PART: tl.constexpr, PLACE: tl.constexpr):
    """x[PART, :, :, PLACE]: what costs nothing where a thread holds all parts and places."""
    part, place = tl.arange(0, x.shape[0])[:, None, None, None], tl.arange(0, x.shape[3])[None, None, :]
    of_part = tl.sum(tl.where(part == PART, x, 0), axis=0)
    return tl.sum(tl.where(place == PLACE, of_part, 0), axis=2)


@triton.jit
def _narrow(keys, stretch, to, TOPK: tl.constexpr, NARROWED: tl.constexpr):
    """Store indices of TOPK to 2 * TOPK of the largest of keys [parts, warps, 32, 4], int16, in order: (the least of
    their keys, a bound above all, how many). All threads see them then."""
    LANES: tl.constexpr = keys.shape[1] * 32
    # Of k groups whose maximum reaches a bound, k keys do. A group's keys lie apart: neighbours often score alike.
    GROUPS: tl.constexpr = max(NARROWED, 4 * LANES)
    SLACK: tl.constexpr = min(TOPK // 2, (GROUPS - TOPK) // 6)
    OF_LANE: tl.constexpr = GROUPS // (4 * LANES)
    grouped = tl.reshape(keys, (keys.shape[0] // OF_LANE, OF_LANE, keys.shape[1], keys.shape[2], keys.shape[3]))
    maxima = tl.max(grouped, axis=0)
    high = tl.max(maxima) + 1
    low, _ = _bound(maxima, TOPK, SLACK, tl.min(maxima), high, tl.full((), GROUPS, tl.int32))
    # Fewer groups than TOPK may hold any.
    low = tl.maximum(low, ABSENT_KEY + 1)
    before, count = _counts_before(keys >= low)
    if count > 2 * TOPK:
        low, count = _bound(keys, TOPK, TOPK, low, high, count)
        if count > 2 * TOPK:
            keys = _without_ties(keys, stretch, low, count, TOPK, 2 * TOPK, LANES)
        before, count = _counts_before(keys >= low)
    # A thread stores one of each of its fours at a time, in the layout that it counts in: nothing moves between threads
    # but the counts.
    index = tl.arange(0, keys.shape[1])[:, None] * stretch + tl.arange(0, 32)[None, :] * 4
    for part in tl.static_range(keys.shape[0]):
        place = _begin(before, part)
        for of_four in tl.static_range(4):
            chosen = _one(keys, part, of_four) >= low
            tl.store(to + place, (index + (128 * part + of_four)).to(tl.int16), mask=chosen)
            place += chosen.to(tl.int32)
    tl.debug_barrier()
    return low, high, count


@triton.jit
def _take_all(table, visible, slots, TOPK: tl.constexpr, PADDED: tl.constexpr):
    """Slots of all of at most TOPK visible entries, then −1."""
    entry = tl.arange(0, PADDED)
    known = entry < visible
    tl.store(slots + entry, tl.where(known, _entry_slot(table, entry, known), -1), mask=entry < TOPK)


@triton.jit
def _entry_slot(table, entry, known):
    """Slot of a request's ratio-4 entry, int32; ``table``: the request's row of full slots."""
    return tl.load(table + entry * 4, mask=known, other=0) // 4


@triton.jit
def _store(
    keys, entry, present, k, low, high, count, table, slots, candidates, whole, TOPK: tl.constexpr, LANES: tl.constexpr
):
    """Slots of the k best of these entries, of all of a row (``whole``); else their keys and entries are candidates.

    keys as :func:`_index` orders them; low, high, count: as :func:`_bound` takes them.
    """
    slot = _entry_slot(table, entry, present & whole)
    low, count = _bound(keys, k, 0, low, high, count)
    if count > k:
        keys = _without_ties(keys, _stretch(keys.numel, LANES), low, count, k, k, LANES)
    before, _ = _counts_before(keys >= low)
    for part in tl.static_range(keys.shape[0]):
        place = _begin(before, part)
        for of_lane in tl.static_range(keys.shape[3]):
            key = _one(keys, part, of_lane)
            chosen = key >= low
            tl.store(slots + place, _one(slot, part, of_lane), mask=chosen & whole)
            tl.store(candidates + place, key, mask=chosen & ~whole)
            tl.store(candidates + TOPK + place, _one(entry, part, of_lane), mask=chosen & ~whole)
            place += chosen.to(tl.int32)


@triton.jit
def _load(scores, count, limit, stretch, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Keys of ``count`` scores, at most SIZE; ABSENT_KEY elsewhere. ``limit``: how many may be read."""
    # Of the last four that hold any all are read, if there are four: so they come together.
    readable = _below(tl.minimum((count + 3) // 4 * 4, limit), stretch, SIZE, LANES)
    keys = _ordered(tl.load(scores + _index(stretch, SIZE, LANES), mask=readable, other=0.0))
    return tl.where(_below(count, stretch, SIZE, LANES), keys, ABSENT_KEY)


@triton.jit
def _select_few(scores, limit, begin, count, of_row, TOPK: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """:func:`_select` of at most BLOCK scores."""
    stretch = _stretch(BLOCK, LANES)
    keys, present = _load(scores, count, limit, stretch, BLOCK, LANES), _below(count, stretch, BLOCK, LANES)
    low, high = tl.min(tl.where(present, keys, 0x7FFFFFFF)), tl.max(keys) + 1
    entry = begin + _index(stretch, BLOCK, LANES)
    _store(keys, entry, present, tl.minimum(count, TOPK), low, high, count, *of_row, TOPK, LANES)


@triton.jit
def _narrowed(narrowed, count, NARROWED: tl.constexpr, LANES: tl.constexpr):
    """What :func:`_narrow` stored: (indices, which there are); it may be overwritten then."""
    stretch = _stretch(NARROWED, LANES)
    present = _below(count, stretch, NARROWED, LANES)
    index = tl.load(narrowed + _index(stretch, NARROWED, LANES), mask=present, other=0, cache_modifier=".cg")
    tl.debug_barrier()
    return index.to(tl.int32), present


@triton.jit
def _select_many(
    scores,
    limit,
    begin,
    count,
    of_row,
    narrowed,
    TOPK: tl.constexpr,
    NARROWED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """:func:`_select` of more than TOPK, at most BLOCK scores. narrowed: int16 [2 * TOPK], overwritten."""
    stretch = tl.cdiv(count, 4 * LANES) * 128
    keys = _load(scores, count, limit, stretch, BLOCK, LANES)
    low, high, count = _narrow(keys, stretch, narrowed, TOPK, NARROWED)
    index, present = _narrowed(narrowed, count, NARROWED, LANES)
    keys = tl.where(present, _ordered(tl.load(scores + index, mask=present, other=0.0)), ABSENT_KEY)
    _store(keys, begin + index, present, TOPK, low, high, count, *of_row, TOPK, LANES)


@triton.jit
def _select(
    scores,
    columns,
    begin,
    count,
    whole,
    table,
    slots,
    candidates,
    TOPK: tl.constexpr,
    NARROWED: tl.constexpr,
    SMALL: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """The best TOPK of ``count`` scores at ``begin``: slots if they are the whole row, else candidates, all of them if
    there are no more than TOPK. ``columns``: how many scores may be read."""
    of_row = (table, slots, candidates, whole)
    scores += begin
    if count <= SMALL:
        _select_few(scores, columns - begin, begin, count, of_row, TOPK, SMALL, LANES)
    elif BLOCK > SMALL:
        narrowed = tl.where(whole, slots, candidates).to(tl.pointer_type(tl.int16))
        _select_many(scores, columns - begin, begin, count, of_row, narrowed, TOPK, NARROWED, BLOCK, LANES)


@triton.jit
def _elect_few(candidates, count, of_row, TOPK: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """:func:`_elect` from at most BLOCK candidates."""
    stretch = _stretch(BLOCK, LANES)
    index, present = _index(stretch, BLOCK, LANES), _below(count, stretch, BLOCK, LANES)
    at = candidates + index + index // TOPK * TOPK
    keys = tl.load(at, mask=present, other=ABSENT_KEY, cache_modifier=".cg")
    entry = tl.load(at + TOPK, mask=present, other=0, cache_modifier=".cg")
    low, high = tl.min(tl.where(present, keys, 0x7FFFFFFF)), tl.max(keys) + 1
    _store(keys, entry, present, TOPK, low, high, count, *of_row, TOPK, LANES)


@triton.jit
def _elect_many(
    candidates,
    count,
    of_row,
    narrowed,
    TOPK: tl.constexpr,
    NARROWED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """:func:`_elect` from more than TOPK, at most BLOCK candidates. narrowed: int16 [2 * TOPK], overwritten."""
    stretch = tl.cdiv(count, 4 * LANES) * 128
    index, present = _index(stretch, BLOCK, LANES), _below(count, stretch, BLOCK, LANES)
    at = candidates + index + index // TOPK * TOPK
    keys = tl.load(at, mask=present, other=ABSENT_KEY, cache_modifier=".cg")
    low, high, narrow = _narrow(keys, stretch, narrowed, TOPK, NARROWED)
    left, known = _narrowed(narrowed, narrow, NARROWED, LANES)
    of_left = candidates + left + left // TOPK * TOPK
    keys = tl.load(of_left, mask=known, other=ABSENT_KEY, cache_modifier=".cg")
    entry = tl.load(of_left + TOPK, mask=known, other=0, cache_modifier=".cg")
    _store(keys, entry, known, TOPK, low, high, narrow, *of_row, TOPK, LANES)


@triton.jit
def _elect(
    candidates,
    visible,
    table,
    slots,
    TOPK: tl.constexpr,
    NARROWED: tl.constexpr,
    SMALL: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Slots of the best of at most BLOCK candidates, which other programs have stored."""
    before = (visible - 1) // CHUNK
    count = before * TOPK + tl.minimum(visible - before * CHUNK, TOPK)
    of_row = (table, slots, candidates, tl.full((), True, tl.int1))
    if count <= SMALL:
        _elect_few(candidates, count, of_row, TOPK, SMALL, LANES)
    elif BLOCK > SMALL:
        narrowed = slots.to(tl.pointer_type(tl.int16))
        _elect_many(candidates, count, of_row, narrowed, TOPK, NARROWED, BLOCK, LANES)


@triton.jit(do_not_specialize=["first"])
def _select_kernel(
    scores,
    row_stride,
    columns,
    positions,
    owners,
    requests,
    table,
    table_stride,
    slots,
    lengths,
    first,
    candidates,
    candidates_row,
    semaphores,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    SMALL: tl.constexpr,
    BLOCK: tl.constexpr,
    ELECTORS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Grid: (rows, chunks). ELECTORS: for so many candidates; 0 where a chunk is all there is."""
    after_previous()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = first + row
    visible = visible_entries(tl.load(positions + token), columns)
    begin = chunk * BLOCK
    if (chunk == 0) | (visible > begin):
        scores += row * row_stride
        slots += row * TOPK
        table += tl.load(requests + tl.load(owners + token)) * table_stride
        if chunk == 0:
            tl.store(lengths + row, tl.minimum(visible, TOPK))
        if visible <= TOPK:
            _take_all(table, visible, slots, TOPK, PADDED)
        else:
            candidates += row * candidates_row
            of_row = (table, slots, candidates + chunk * (2 * TOPK))
            sizes: tl.constexpr = (TOPK, 2 * PADDED, SMALL, BLOCK, LANES)
            count = tl.minimum(visible - begin, BLOCK)
            whole = visible <= BLOCK if ELECTORS else tl.full((), True, tl.int1)
            _select(scores, columns, begin, count, whole, *of_row, *sizes)
            if (ELECTORS > 0) & (visible > BLOCK):
                chunks = tl.cdiv(visible, BLOCK)
                # All that the program nominates lies in memory before it is counted in.
                tl.debug_barrier()
                if tl.atomic_add(semaphores + row, 1, sem="acq_rel", scope="gpu") == chunks - 1:
                    tl.store(semaphores + row, 0)
                    _elect(candidates, visible, table, slots, TOPK, 2 * PADDED, SMALL, BLOCK, ELECTORS, LANES)


@dataclass(frozen=True)
class Candidates:
    """Where the chunks of rows meet; one serves all layers of a stream, one after another.

    Attributes:
        nominated: int32 [rows, chunks, 2, topk]: keys and entries. semaphores: int32 [rows], zero between launches.
    """

    nominated: Tensor
    semaphores: Tensor


def new_candidates(rows: int, columns: int, topk: int, device: torch.device | str) -> Candidates:
    """Enough for up to so many rows and columns; empty where a chunk is a row."""
    chunks = triton.cdiv(columns, CHUNK) if columns > CHUNK else 0
    nominated = torch.empty(rows, chunks, 2, topk, dtype=torch.int32, device=device)
    return Candidates(nominated, torch.zeros(rows, dtype=torch.int32, device=device))


def select_entries(
    scores: Tensor,
    batch: Batch,
    topk: int,
    slots: Tensor,
    lengths: Tensor,
    *,
    first: int = 0,
    candidates: Candidates | None = None,
) -> None:
    """Slots of the ``topk`` best visible ratio-4 entries of the queries whose scores are given.

    Args:
        scores: fp32 [rows, columns] from ``indexer.index_scores``, the last dimension contiguous; row i belongs to
            token ``first + i``. Of columns that the token does not see three at most are read, to no effect, and of the
            row of one that sees no more than ``topk`` none. A query sees at most ``columns`` entries; further ones are
            left out.
        batch: where all tokens of the pass stand.
        topk: at most 2048, and ``topk`` times the chunks of a row (``columns`` / 16384, rounded up) at most 16384.
        slots: int32 [rows, topk], contiguous: slots of entries in the order of the entries, then -1.
        lengths: int32 [rows]: how many slots there are, ``min(visible, topk)``.
        first: the token of the first row.
        candidates: from :func:`new_candidates`, for as many rows and columns or more; used beyond 16384 columns only.

    One launch, its grid from shapes alone. Floor: 4 bytes per visible entry.
    """
    batch.check("select_entries")
    checks.require_dimensions("scores", scores, 2, "[rows, columns]")
    checks.require_dtype("scores", scores, torch.float32)
    checks.require_rows("scores", scores)
    rows, columns = scores.shape
    checks.require_range("topk", topk, 1, MOST)
    checks.require_range("first", first, 0, batch.tokens - rows)
    checks.require_dtype("slots", slots, torch.int32)
    checks.require_shape("slots", slots, (rows, topk), "[rows, topk]")
    checks.require_contiguous("slots", slots)
    checks.require_dtype("lengths", lengths, torch.int32)
    checks.require_shape("lengths", lengths, (rows,), "[rows]")
    checks.require_contiguous("lengths", lengths)
    chunks = max(1, triton.cdiv(columns, CHUNK))
    nominated, semaphores = lengths, lengths  # unused
    if chunks > 1:
        checks.require_range("topk times chunks of scores", topk * chunks, 1, CANDIDATES)
        nominated, semaphores = _checked(candidates, rows, chunks, topk)
    checks.require_same_device(
        "scores",
        scores,
        slots=slots,
        lengths=lengths,
        candidates=nominated,
        semaphores=semaphores,
        positions=batch.positions,
    )
    if not rows:
        return
    block = min(max(128, triton.next_power_of_2(columns)), CHUNK)
    padded = triton.next_power_of_2(topk)
    lanes = min(32 * WARPS, max(block // 16, min(128, block // 4)))
    _select_kernel[(rows, chunks)](
        scores,
        scores.stride(0),
        columns,
        batch.positions,
        batch.owners,
        batch.requests,
        batch.slots,
        batch.slots.stride(0),
        slots,
        lengths,
        first,
        nominated,
        nominated.stride(0),
        semaphores,
        topk,
        padded,
        min(max(4 * padded, SMALL // 2), SMALL, block),
        block,
        max(128, triton.next_power_of_2(topk * chunks)) if chunks > 1 else 0,
        lanes,
        num_warps=lanes // 32,
        maxnreg=REGISTERS,
        **OVERLAPPED,
    )


def _checked(candidates: Candidates | None, rows: int, chunks: int, topk: int) -> tuple[Tensor, Tensor]:
    """Both tensors of ``candidates``, which are enough."""
    if candidates is None:
        raise OperandTypeError(f"candidates: expected those of {chunks} chunks, found None")
    nominated, semaphores = candidates.nominated, candidates.semaphores
    for name, tensor in (("nominated", nominated), ("semaphores", semaphores)):
        checks.require_dtype(f"candidates.{name}", tensor, torch.int32)
        checks.require_contiguous(f"candidates.{name}", tensor)
    held = (*nominated.shape[:2], 2, topk)
    checks.require_shape("candidates.nominated", nominated, held, "[rows, chunks, 2, topk]")
    checks.require_shape("candidates.semaphores", semaphores, held[:1], "[rows]")
    if held[0] < rows or held[1] < chunks:
        raise OperandValueError(
            f"candidates: expected at least {rows} rows of {chunks} chunks, found {held[0]} of {held[1]}"
        )
    return nominated, semaphores
