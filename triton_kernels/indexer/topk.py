"""Select the topk best entries of each query without sorting, by a threshold and prefix sums (specification §5).

A query at position p sees ratio-4 entries ``w < (p + 1) // 4``; if they are more than topk, it attends to the topk of
the largest scores. A row of up to :data:`CHUNK_SCORES` scores takes one program, that of :mod:`.select_row`.

A longer row is divided into chunks. A program holds the scores of a chunk in registers, as integer keys of the same
order. It finds the topk-th largest key by counting the keys that reach a bound. Each selected entry is stored at the
place that a prefix sum gives it, so in the order of the entries. Of more than :data:`SINGLE_PASS_MAX_SCORES` scores the
program first *narrows*: it finds a bound that topk to 2 · topk keys reach, and keeps only those. It stores their
indices, in order, in the place of the slots to come.

Each chunk nominates its own topk best as candidates, which include all of the row's best, and increments a semaphore;
the last program to finish makes the same selection among the candidates. No program waits. Of equal scores the lower
entry wins in either case, and nothing depends on timing: the result depends on the scores alone.

Scores are ordered as numbers, −inf to +inf; −0 equals +0, and NaN is below all.

Supports topk up to ``MAX_INDEX_TOPK``, and rows of as many chunks as nominate ``MAX_CANDIDATES``. Floor: 4 bytes per
visible entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandTypeError, OperandValueError
from nvfp4_sgl.formats import checks
from nvfp4_sgl.limits import CHUNK_SCORES, MAX_CANDIDATES, MAX_INDEX_TOPK

from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..plan.batch import Batch
from .scores import visible_entries
from .select_row import _select_row_kernel
from .topk_keys import ABSENT_KEY, entry_slot, ordered_keys

SINGLE_PASS_MAX_SCORES = 4096
"""Scores at most among which the threshold is found without narrowing first; half as many up to a topk of 512.

One pass takes 5.6 µs instead of 7.0 for one query, but longer for 256 queries (``launch/results/tunings_h200.md``).
"""

CHUNK_LANES = 256
"""Threads of a chunk's program. Twice as many take up to 1.2 times as long (``launch/results/tunings_h200.md``)."""
ROW_THREADS = 512
"""Threads at most of a program that holds all scores of a row; 128 at least."""
ROW_SCORES = 8
"""Scores of a thread of such a program, unless :data:`ROW_THREADS` are too few."""
ROW_REGISTERS = 64
"""Registers of such a thread at most."""
ROW_KEPT = 2048
"""Scores at most that such a program keeps all, without finding a bound first."""
MAX_REGISTERS = 128
"""Registers of a thread at most, so that a multiprocessor holds two programs: one loads while the other counts."""

LINEAR_FRACTION = tl.constexpr(1 / 16)
"""Fraction of the larger magnitude of a search's two ends: the scale on which probes are placed is linear in scores
below it, logarithmic above."""
PROBE_SPREAD = tl.constexpr(0.35)
"""Half the distance between a round's two probes is this over the square root of the number of keys in the range, as a
fraction of the range."""


@triton.jit
def _to_scale(key, unit):
    """Map a key to an int32 scale, nearly linear in the score up to ``unit`` (fp32) and nearly logarithmic above."""
    distance = (tl.abs(key).to(tl.float32, bitcast=True) + unit).to(tl.int32, bitcast=True)
    distance -= unit.to(tl.int32, bitcast=True)
    return tl.where(key < 0, -distance, distance)


@triton.jit
def _from_scale(place, unit):
    """Invert :func:`_to_scale`, up to rounding: the key at ``place``."""
    reach = tl.abs(place) + unit.to(tl.int32, bitcast=True)
    distance = (reach.to(tl.float32, bitcast=True) - unit).to(tl.int32, bitcast=True)
    return tl.where(place < 0, -distance, distance)


@triton.jit
def _find_bound(keys, k, slack, low, high, count):
    """Find a bound that ``k`` to ``k + slack`` keys reach or, if none is found, the k-th largest key.

    Returns (bound, number of keys that reach it). low: a bound, int32, that ``count`` keys reach, at least k. high: a
    bound, int32, that no key reaches.
    """
    none, slow = 0, low > high
    unit = tl.maximum(-low, high).to(tl.float32, bitcast=True) * LINEAR_FRACTION
    unit = tl.where(unit < float("inf"), unit, 0.0)
    while (count > k + slack) & (low + 1 < high):
        # Each round counts the keys that reach two probes. They lie on both sides of where the aim would be if scores
        # were spread evenly between low and high on the scale of _to_scale, as far apart as chance moves the count; the
        # scale suits normally distributed scores, and scores of one sign and many magnitudes. After a round that did no
        # better than halving, the next puts its probes at the quarters of the range of keys: so the loop ends whatever
        # the scores.
        before = count - none
        root = tl.rsqrt(before * 1.0)
        aim = (count - k - slack * 0.5) * root * root
        spread = tl.maximum(root * PROBE_SPREAD, root * root * 0.5)
        bottom, top = tl.where(slow, low, _to_scale(low, unit)), tl.where(slow, high, _to_scale(high, unit))
        half = top * 0.5 - bottom * 0.5
        below = bottom + 2 * (tl.where(slow, 0.25, tl.maximum(aim - spread, 0.03)) * half).to(tl.int32)
        above = bottom + 2 * (tl.where(slow, 0.75, tl.minimum(aim + spread, 0.97)) * half).to(tl.int32)
        below, above = tl.where(slow, below, _from_scale(below, unit)), tl.where(slow, above, _from_scale(above, unit))
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
def _stretch_length(SIZE: tl.constexpr, LANES: tl.constexpr):
    """Return the length of a warp's stretch of indices if the program holds SIZE: the warp holds all of the stretch."""
    return max(SIZE * 32 // LANES, min(32, SIZE))


@triton.jit
def _thread_offsets(stretch, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Return the terms of :func:`_indices` that differ between threads, both four-dimensional.

    They are (where each lane begins in a stretch, where each warp's stretch begins).
    """
    EACH: tl.constexpr = max(1, min(4, SIZE // LANES))
    WIDE: tl.constexpr = min(32, SIZE // EACH)
    WARPS: tl.constexpr = min(LANES, SIZE // EACH) // WIDE
    lane = tl.arange(0, WIDE) * EACH
    return lane[None, None, :, None], (tl.arange(0, WARPS) * stretch)[None, :, None, None]


@triton.jit
def _common_offsets(SIZE: tl.constexpr, LANES: tl.constexpr):
    """Return the term of :func:`_indices` that is the same for all threads, [parts, 1, 1, up to 4]."""
    EACH: tl.constexpr = max(1, min(4, SIZE // LANES))
    PARTS: tl.constexpr = max(1, SIZE // (LANES * EACH))
    part = tl.arange(0, PARTS) * min(32 * EACH, SIZE)
    return part[:, None, None, None] + tl.arange(0, EACH)[None, None, None, :]


@triton.jit
def _indices(stretch, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Return the indices, SIZE at most, that a program of LANES threads holds: [parts, warps, lanes, up to 4].

    Each warp holds a stretch of its own, part after part; indices beyond its stretch belong to the next warp.
    """
    lane, begin = _thread_offsets(stretch, SIZE, LANES)
    return begin + lane + _common_offsets(SIZE, LANES)


@triton.jit
def _is_below(limit, stretch, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Tell which of :func:`_indices` are in their warp's stretch and below the limit, without computing each index."""
    lane, begin = _thread_offsets(stretch, SIZE, LANES)
    return _common_offsets(SIZE, LANES) < tl.minimum(limit - begin, stretch) - lane


@triton.jit
def _drop_ties(keys, stretch, threshold, count, k, most, LANES: tl.constexpr):
    """Make keys absent so that only ``k`` to ``most`` reach the threshold, which is the k-th largest key.

    ``count`` keys reach it at first. Of those equal to the threshold only the first stay. Keys below it may become
    absent, too.
    """
    begin, end = 0, keys.numel
    while count > most:
        middle = (begin + end) // 2
        taken = (keys > threshold) | ((keys == threshold) & _is_below(middle, stretch, keys.numel, LANES))
        reached = tl.sum(tl.where(taken, 1, 0))
        begin, end = tl.where(reached >= k, begin, middle), tl.where(reached >= k, middle, end)
        count = tl.where(reached >= k, reached, count)
    return tl.where((keys > threshold) | _is_below(end, stretch, keys.numel, LANES), keys, ABSENT_KEY)


@triton.jit
def _counts_before(chosen):
    """Count the chosen values before each lane's of each part, and all of them: (int32 [words, warps, lanes], int32).

    chosen: bool [parts, warps, lanes, n] in the order of :func:`_indices`, up to 8 parts; fewer than 65536 chosen. A
    part's counts take 16 bits of a word: the lower ones in the first half of the parts, the upper ones in the second.
    """
    counts = tl.sum(tl.where(chosen, 1, 0), axis=3)
    if chosen.shape[0] == 1:
        words = counts
    else:
        halves = tl.reshape(counts, (2, chosen.shape[0] // 2, chosen.shape[1], chosen.shape[2]))
        words = tl.sum(halves << (tl.arange(0, 2) * 16)[:, None, None, None], axis=0)
    # Within a warp the prefix sum uses shuffles; between warps it needs one count of each.
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
def _counts_before_part(before, PART: tl.constexpr):
    """Extract one part's counts from the words of :func:`_counts_before`: int32 [warps, lanes]."""
    words = tl.arange(0, before.shape[0])[:, None, None]
    word = tl.sum(tl.where((words == PART) | (words + before.shape[0] == PART), before, 0), axis=0)
    return word & 0xFFFF if before.shape[0] > PART else word >> 16


@triton.jit
def _element(x, PART: tl.constexpr, PLACE: tl.constexpr):
    """Return x[PART, :, :, PLACE]; it costs nothing, because a thread holds all parts and places."""
    part, place = tl.arange(0, x.shape[0])[:, None, None, None], tl.arange(0, x.shape[3])[None, None, :]
    of_part = tl.sum(tl.where(part == PART, x, 0), axis=0)
    return tl.sum(tl.where(place == PLACE, of_part, 0), axis=2)


@triton.jit
def _narrow(keys, stretch, to, TOPK: tl.constexpr, NARROWED: tl.constexpr):
    """Keep TOPK to 2 * TOPK of the largest keys [parts, warps, 32, 4]: store their indices, int16, in order, at ``to``.

    Returns (a bound that they all reach, a bound that no key reaches, their number). All threads of the
    program see the stored indices afterwards.
    """
    LANES: tl.constexpr = keys.shape[1] * 32
    # If the maxima of k groups reach a bound, at least k keys do. A group's keys lie far apart in the row, because
    # neighbours often score alike.
    GROUPS: tl.constexpr = max(NARROWED, 4 * LANES)
    SLACK: tl.constexpr = min(TOPK // 2, (GROUPS - TOPK) // 6)
    OF_LANE: tl.constexpr = GROUPS // (4 * LANES)
    grouped = tl.reshape(keys, (keys.shape[0] // OF_LANE, OF_LANE, keys.shape[1], keys.shape[2], keys.shape[3]))
    maxima = tl.max(grouped, axis=0)
    high = tl.max(maxima) + 1
    low, _ = _find_bound(maxima, TOPK, SLACK, tl.min(maxima), high, tl.full((), GROUPS, tl.int32))
    # Fewer than TOPK groups may hold any key.
    low = tl.maximum(low, ABSENT_KEY + 1)
    before, count = _counts_before(keys >= low)
    if count > 2 * TOPK:
        low, count = _find_bound(keys, TOPK, TOPK, low, high, count)
        if count > 2 * TOPK:
            keys = _drop_ties(keys, stretch, low, count, TOPK, 2 * TOPK, LANES)
        before, count = _counts_before(keys >= low)
    # A thread stores one of each of its groups of four at a time, in the layout in which it counts: only the counts
    # move between threads.
    index = tl.arange(0, keys.shape[1])[:, None] * stretch + tl.arange(0, 32)[None, :] * 4
    for part in tl.static_range(keys.shape[0]):
        place = _counts_before_part(before, part)
        for of_four in tl.static_range(4):
            chosen = _element(keys, part, of_four) >= low
            tl.store(to + place, (index + (128 * part + of_four)).to(tl.int16), mask=chosen)
            place += chosen.to(tl.int32)
    tl.debug_barrier()
    return low, high, count


@triton.jit
def _take_all(table, visible, slots, TOPK: tl.constexpr, PADDED: tl.constexpr):
    """Store the slots of all visible entries, which are at most TOPK, then −1."""
    entry = tl.arange(0, PADDED)
    known = entry < visible
    tl.store(slots + entry, tl.where(known, entry_slot(table, entry, known), -1), mask=entry < TOPK)


@triton.jit
def _store_best(
    keys, entry, present, k, low, high, count, table, slots, candidates, whole, TOPK: tl.constexpr, LANES: tl.constexpr
):
    """Store the k best of these entries: their slots if ``whole``, else their keys and entries as candidates.

    keys, entry: in the order of :func:`_indices`. whole: these are all entries of the row, or the candidates of all its
    chunks. low, high, count: as in :func:`_find_bound`.
    """
    slot = entry_slot(table, entry, present & whole)
    low, count = _find_bound(keys, k, 0, low, high, count)
    if count > k:
        keys = _drop_ties(keys, _stretch_length(keys.numel, LANES), low, count, k, k, LANES)
    before, _ = _counts_before(keys >= low)
    for part in tl.static_range(keys.shape[0]):
        place = _counts_before_part(before, part)
        for of_lane in tl.static_range(keys.shape[3]):
            key = _element(keys, part, of_lane)
            chosen = key >= low
            tl.store(slots + place, _element(slot, part, of_lane), mask=chosen & whole)
            tl.store(candidates + place, key, mask=chosen & ~whole)
            tl.store(candidates + TOPK + place, _element(entry, part, of_lane), mask=chosen & ~whole)
            place += chosen.to(tl.int32)


@triton.jit
def _load_keys(scores, count, limit, stretch, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Load the keys of ``count`` scores, at most SIZE; ABSENT_KEY elsewhere. At most ``limit`` scores may be read."""
    # Read the last group of four that holds any score as a whole, if the row has all four: one load takes four.
    readable = _is_below(tl.minimum((count + 3) // 4 * 4, limit), stretch, SIZE, LANES)
    keys = ordered_keys(tl.load(scores + _indices(stretch, SIZE, LANES), mask=readable, other=0.0))
    return tl.where(_is_below(count, stretch, SIZE, LANES), keys, ABSENT_KEY)


@triton.jit
def _select_single_pass(
    scores, limit, begin, count, row_arguments, TOPK: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr
):
    """Do the work of :func:`_select` for at most BLOCK scores, without narrowing."""
    stretch = _stretch_length(BLOCK, LANES)
    keys, present = _load_keys(scores, count, limit, stretch, BLOCK, LANES), _is_below(count, stretch, BLOCK, LANES)
    low, high = tl.min(tl.where(present, keys, 0x7FFFFFFF)), tl.max(keys) + 1
    entry = begin + _indices(stretch, BLOCK, LANES)
    _store_best(keys, entry, present, tl.minimum(count, TOPK), low, high, count, *row_arguments, TOPK, LANES)


@triton.jit
def _load_narrowed(narrowed, count, NARROWED: tl.constexpr, LANES: tl.constexpr):
    """Load what :func:`_narrow` stored: (indices, which of them exist). Their memory may be overwritten afterwards."""
    stretch = _stretch_length(NARROWED, LANES)
    present = _is_below(count, stretch, NARROWED, LANES)
    index = tl.load(narrowed + _indices(stretch, NARROWED, LANES), mask=present, other=0, cache_modifier=".cg")
    tl.debug_barrier()
    return index.to(tl.int32), present


@triton.jit
def _select_narrowed(
    scores,
    limit,
    begin,
    count,
    row_arguments,
    narrowed,
    TOPK: tl.constexpr,
    NARROWED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Do the work of :func:`_select` for more than TOPK, at most BLOCK scores.

    narrowed: int16 [2 * TOPK], overwritten.
    """
    stretch = tl.cdiv(count, 4 * LANES) * 128
    keys = _load_keys(scores, count, limit, stretch, BLOCK, LANES)
    low, high, count = _narrow(keys, stretch, narrowed, TOPK, NARROWED)
    index, present = _load_narrowed(narrowed, count, NARROWED, LANES)
    keys = tl.where(present, ordered_keys(tl.load(scores + index, mask=present, other=0.0)), ABSENT_KEY)
    _store_best(keys, begin + index, present, TOPK, low, high, count, *row_arguments, TOPK, LANES)


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
    SINGLE_PASS_MAX_SCORES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Select the best TOPK of ``count`` scores from column ``begin`` on: slots if ``whole``, else candidates.

    Of no more than TOPK scores all become candidates. columns: number of scores that may be read.
    """
    row_arguments = (table, slots, candidates, whole)
    scores += begin
    if count <= SINGLE_PASS_MAX_SCORES:
        _select_single_pass(scores, columns - begin, begin, count, row_arguments, TOPK, SINGLE_PASS_MAX_SCORES, LANES)
    elif BLOCK > SINGLE_PASS_MAX_SCORES:
        narrowed = tl.where(whole, slots, candidates).to(tl.pointer_type(tl.int16))
        _select_narrowed(scores, columns - begin, begin, count, row_arguments, narrowed, TOPK, NARROWED, BLOCK, LANES)


@triton.jit
def _elect_single_pass(candidates, count, row_arguments, TOPK: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Do the work of :func:`_elect` for at most BLOCK candidates, without narrowing."""
    stretch = _stretch_length(BLOCK, LANES)
    index, present = _indices(stretch, BLOCK, LANES), _is_below(count, stretch, BLOCK, LANES)
    at = candidates + index + index // TOPK * TOPK
    keys = tl.load(at, mask=present, other=ABSENT_KEY, cache_modifier=".cg")
    entry = tl.load(at + TOPK, mask=present, other=0, cache_modifier=".cg")
    low, high = tl.min(tl.where(present, keys, 0x7FFFFFFF)), tl.max(keys) + 1
    _store_best(keys, entry, present, TOPK, low, high, count, *row_arguments, TOPK, LANES)


@triton.jit
def _elect_narrowed(
    candidates,
    count,
    row_arguments,
    narrowed,
    TOPK: tl.constexpr,
    NARROWED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Do the work of :func:`_elect` for more than TOPK, at most BLOCK candidates.

    narrowed: int16 [2 * TOPK], overwritten.
    """
    stretch = tl.cdiv(count, 4 * LANES) * 128
    index, present = _indices(stretch, BLOCK, LANES), _is_below(count, stretch, BLOCK, LANES)
    at = candidates + index + index // TOPK * TOPK
    keys = tl.load(at, mask=present, other=ABSENT_KEY, cache_modifier=".cg")
    low, high, narrow = _narrow(keys, stretch, narrowed, TOPK, NARROWED)
    left, known = _load_narrowed(narrowed, narrow, NARROWED, LANES)
    of_left = candidates + left + left // TOPK * TOPK
    keys = tl.load(of_left, mask=known, other=ABSENT_KEY, cache_modifier=".cg")
    entry = tl.load(of_left + TOPK, mask=known, other=0, cache_modifier=".cg")
    _store_best(keys, entry, known, TOPK, low, high, narrow, *row_arguments, TOPK, LANES)


@triton.jit
def _elect(
    candidates,
    visible,
    table,
    slots,
    TOPK: tl.constexpr,
    NARROWED: tl.constexpr,
    SINGLE_PASS_MAX_SCORES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the slots of the best of at most BLOCK candidates, which the programs of all chunks have stored."""
    before = (visible - 1) // CHUNK
    count = before * TOPK + tl.minimum(visible - before * CHUNK, TOPK)
    row_arguments = (table, slots, candidates, tl.full((), True, tl.int1))
    if count <= SINGLE_PASS_MAX_SCORES:
        _elect_single_pass(candidates, count, row_arguments, TOPK, SINGLE_PASS_MAX_SCORES, LANES)
    elif BLOCK > SINGLE_PASS_MAX_SCORES:
        narrowed = slots.to(tl.pointer_type(tl.int16))
        _elect_narrowed(candidates, count, row_arguments, narrowed, TOPK, NARROWED, BLOCK, LANES)


@triton.jit(do_not_specialize=["first"])
def _select_kernel(
    scores, row_stride, columns, positions, owners, table, table_stride, slots, lengths, first,
    candidates, candidates_row, semaphores,
    TOPK: tl.constexpr, PADDED: tl.constexpr, SINGLE_PASS_MAX_SCORES: tl.constexpr,
    BLOCK: tl.constexpr, CANDIDATE_BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Select one chunk's best entries, and in a row's last program the best of its candidates.

    Grid: (rows, chunks). CANDIDATE_BLOCK: candidates of a row at most, a power of two.
    """
    after_previous()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = first + row
    visible = visible_entries(tl.load(positions + token), columns)
    begin = chunk * BLOCK
    if (chunk == 0) | (visible > begin):
        scores += row * row_stride
        slots += row * TOPK
        table += tl.load(owners + token) * table_stride
        if chunk == 0:
            tl.store(lengths + row, tl.minimum(visible, TOPK))
        if visible <= TOPK:
            _take_all(table, visible, slots, TOPK, PADDED)
        else:
            candidates += row * candidates_row
            row_arguments = (table, slots, candidates + chunk * (2 * TOPK))
            sizes: tl.constexpr = (TOPK, 2 * PADDED, SINGLE_PASS_MAX_SCORES, BLOCK, LANES)
            count = tl.minimum(visible - begin, BLOCK)
            _select(scores, columns, begin, count, visible <= BLOCK, *row_arguments, *sizes)
            if visible > BLOCK:
                chunks = tl.cdiv(visible, BLOCK)
                # Every thread has stored its candidates before the semaphore is incremented.
                tl.debug_barrier()
                if tl.atomic_add(semaphores + row, 1, sem="acq_rel", scope="gpu") == chunks - 1:
                    tl.store(semaphores + row, 0)
                    _elect(
                        candidates,
                        visible,
                        table,
                        slots,
                        TOPK,
                        2 * PADDED,
                        SINGLE_PASS_MAX_SCORES,
                        BLOCK,
                        CANDIDATE_BLOCK,
                        LANES,
                    )


@dataclass(frozen=True)
class Candidates:
    """Workspace in which the chunks of a row collect their candidates.

    One workspace serves all layers of a CUDA stream, one after another.

    Attributes:
        nominated: int32 [rows, chunks, 2, topk]: keys, then entries.
        semaphores: int32 [rows], the chunks of a row that are done; zero between launches.
    """

    nominated: Tensor
    semaphores: Tensor


def new_candidates(rows: int, columns: int, topk: int, device: torch.device | str) -> Candidates:
    """Allocate the workspace for up to ``rows`` rows of ``columns`` columns; no candidates where a row is one chunk."""
    chunks = cdiv(columns, CHUNK_SCORES) if columns > CHUNK_SCORES else 0
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
    """Select the slots of each query's ``topk`` best visible ratio-4 entries by their scores (specification §5).

    Args:
        scores: fp32 [rows, columns] from :func:`.scores.index_scores`, the last dimension contiguous; row i belongs to
            token ``first + i``. At most three columns that the token does not see are read, to no effect; no column of
            a token that sees no more than ``topk`` entries is read. Entries beyond ``columns`` are left out.
        batch: where all tokens of the pass stand.
        topk: 1 to 2048; ``topk`` times the chunks of a row (``columns`` / 16384, rounded up) is at most 16384.
        slots: int32 [rows, topk], contiguous, written: slots of the selected entries in the order of the entries, then
            -1.
        lengths: int32 [rows], contiguous, written: number of slots, ``min(visible, topk)``.
        first: the token of the first row.
        candidates: from :func:`new_candidates`, for as many rows and columns or more; required, and used, beyond 16384
            columns only.

    One launch, whose grid depends on shapes alone. Floor: 4 bytes per visible entry. Scores are compared, never
    rounded.

    Raises:
        OperandTypeError: a dtype is not one of the above, or ``candidates`` are missing.
        OperandValueError: a shape, stride or device is not as above, ``topk`` or ``first`` is out of range, or the
            candidates are of another ``topk`` or too small.
    """
    rows, columns = _check(scores, batch, topk, slots, lengths, first, candidates, CHUNK_SCORES)
    if not rows:
        return
    pages = batch.pages
    given = (scores, scores.stride(0), columns, batch.positions, batch.owners, pages, pages.stride(0))
    row = (*given, slots, lengths, first)
    padded = next_power_of_2(topk)
    if columns <= CHUNK_SCORES:
        _select_rows(rows, row, topk, padded)
        return
    assert candidates is not None  # as _check requires
    chunks = cdiv(columns, CHUNK_SCORES)
    _select_kernel[(rows, chunks)](
        *row,
        candidates.nominated,
        candidates.nominated.stride(0),
        candidates.semaphores,
        topk,
        padded,
        min(max(4 * padded, SINGLE_PASS_MAX_SCORES // 2), SINGLE_PASS_MAX_SCORES),
        CHUNK_SCORES,
        max(128, next_power_of_2(topk * chunks)),
        CHUNK_LANES,
        num_warps=CHUNK_LANES // 32,
        maxnreg=MAX_REGISTERS,
        **OVERLAPPED,
    )


def _select_rows(rows: int, row: tuple[Any, ...], topk: int, padded: int) -> None:
    """Launch a program for each row. row: arguments that both kernels take. padded: topk's next power of two."""
    scores, stride, columns, *_ = row
    block = max(128, next_power_of_2(columns))
    threads = min(ROW_THREADS, max(128, block // ROW_SCORES))
    _select_row_kernel[(rows,)](
        *row,
        topk,
        block if block <= ROW_KEPT else min(max(2 * padded, threads), block),
        max(block, 4 * threads),
        threads,
        stride % 4 == 0 and scores.data_ptr() % 16 == 0,
        num_warps=threads // 32,
        maxnreg=ROW_REGISTERS,
        **OVERLAPPED,
    )


@checks.once
def _check(
    scores: Tensor,
    batch: Batch,
    topk: int,
    slots: Tensor,
    lengths: Tensor,
    first: int,
    candidates: Candidates | None,
    chunk: int,
) -> tuple[int, int]:
    """Refuse what :func:`select_entries` cannot read or write, metadata only; returns the shape of ``scores``."""
    batch.check("select_entries")
    checks.require_dimensions("scores", scores, 2, "[rows, columns]")
    checks.require_dtype("scores", scores, torch.float32)
    checks.require_rows("scores", scores)
    rows, columns = scores.shape
    checks.require_range("topk", topk, 1, MAX_INDEX_TOPK)
    checks.require_range("first", first, 0, batch.tokens - rows)
    checks.require_dtype("slots", slots, torch.int32)
    checks.require_shape("slots", slots, (rows, topk), "[rows, topk]")
    checks.require_contiguous("slots", slots)
    checks.require_dtype("lengths", lengths, torch.int32)
    checks.require_shape("lengths", lengths, (rows,), "[rows]")
    checks.require_contiguous("lengths", lengths)
    chunks = max(1, cdiv(columns, chunk))
    if chunks > 1:
        checks.require_range("topk times chunks of scores", topk * chunks, 1, MAX_CANDIDATES)
        nominated, semaphores = _check_candidates(candidates, rows, chunks, topk)
        checks.require_same_device("scores", scores, candidates=nominated, semaphores=semaphores)
    checks.require_same_device("scores", scores, slots=slots, lengths=lengths, positions=batch.positions)
    return rows, columns


def _check_candidates(candidates: Candidates | None, rows: int, chunks: int, topk: int) -> tuple[Tensor, Tensor]:
    """Refuse ``candidates`` that are missing, malformed or too small; return both tensors."""
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
