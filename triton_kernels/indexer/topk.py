"""Select the topk best entries of each query without sorting, by histograms and prefix sums (specification §5).

A query at position p sees ratio-4 entries ``w < (p + 1) // 4``; if they are more than topk, it attends to the topk of
the largest scores. A program holds up to :data:`CHUNK_SCORES` scores of one query in registers, as integer keys of the
same order. It finds the topk-th largest key with histograms in shared memory: the first one covers all keys above a
lower bound, each further one the bin that holds the key looked for. Each selected entry is stored at the place that a
prefix sum gives it, so in the order of the entries.

A longer row is divided into chunks. Each chunk nominates its own topk best as candidates, which include all of the
row's best, and increments a semaphore; the last program to finish makes the same selection among the candidates. No
program waits. Of equal scores the lower entry wins in either case, and nothing depends on timing: the result depends on
the scores alone.

Scores are ordered as numbers, −inf to +inf; −0 equals +0, and NaN is below all.

Supports topk up to ``MAX_INDEX_TOPK``, and rows of as many chunks as nominate ``MAX_CANDIDATES``. Floor: 4 bytes per
visible entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandTypeError, OperandValueError
from nvfp4_sgl.formats import checks
from nvfp4_sgl.limits import CHUNK_SCORES, MAX_CANDIDATES, MAX_INDEX_TOPK

from ..common.gluon import gl, jit
from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import INTERPRETED
from ..plan.batch import Batch
from .scores import visible_entries

WARP_SCORES = 128
"""Scores of a part that a warp holds: four a thread, which one load takes."""
MAX_WARPS = 8
"""Warps of a program at most."""
MAX_REGISTERS = 128
"""Registers of a thread at most, so that a multiprocessor holds two programs: one loads while the other counts."""

ABSENT_KEY = tl.constexpr(-0x80000000)
"""Key of a place without a score, below the key of every score."""
BIN_BITS = tl.constexpr(8)
"""A histogram has two to the power of so many bins, :data:`BINS`."""
BINS = tl.constexpr(2**8)
HISTOGRAMS = tl.constexpr(6)
"""Histograms of a selection at most: one of groups, then until a bin holds a single key of 32 bits."""


@jit
def _ordered_keys(scores):
    """Convert fp32 scores to int32 keys of the same order, all above ABSENT_KEY.

    ``~`` reverses the order, not a negation: ptxas (12.9, 13.0, 13.3) loses a negation that it merges into a maximum of
    three keys, triton-lang/triton PR 11032. With a negation rows of 4100 scores got no slots on an H200.
    """
    # The difference makes both zeros equal, and every NaN the same: on a GPU it has these bits.
    bits = (0.0 - scores).to(tl.int32, bitcast=True)
    if INTERPRETED:
        bits = tl.where(scores != scores, 0x7FFFFFFF, bits)
    return tl.maximum(~(bits ^ ((bits >> 31) & 0x7FFFFFFF)), ABSENT_KEY + 1)


@jit
def _score_bits(key):
    """Return the bits, int32, of a score that :func:`_ordered_keys` gives this key."""
    return key ^ ((key >> 31) & 0x7FFFFFFF)


@jit
def _score(key):
    """Return a score, fp32, that :func:`_ordered_keys` gives this key."""
    return _score_bits(key).to(tl.float32, bitcast=True)


@jit
def _again(value):
    """Return the int32 scalar, from lane 0, so that the assembler does not know that it is the same.

    Masks that follow from it are computed again rather than held: each bit of a mask takes three instructions to hold.
    """
    if INTERPRETED:
        return value
    else:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
        )


@jit
def _along(SIZE: tl.constexpr, AXIS: tl.constexpr, HELD: tl.constexpr):
    """Return 0 to SIZE − 1 along one of the four axes of a block of layout HELD; the other axes have one place."""
    if AXIS == 0:
        return gl.arange(0, SIZE, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, HELD))))[:, None, None, None]
    elif AXIS == 1:
        return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, HELD))))[None, :, None, None]
    elif AXIS == 2:
        return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, HELD))))[None, None, :, None]
    else:
        return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, HELD))))[None, None, None, :]


@jit
def _indices(stretch, PARTS: tl.constexpr, WARPS: tl.constexpr, HELD: tl.constexpr):
    """Return the indices that a program holds, int32 [parts, warps, 32, 4].

    Each warp holds a stretch of its own, part after part; indices beyond its stretch belong to the next warp.
    """
    common = _along(PARTS, 0, HELD) * 128 + _along(4, 3, HELD)
    return _along(WARPS, 1, HELD) * stretch + _along(32, 2, HELD) * 4 + common


@jit
def _is_below(limit, stretch, PARTS: tl.constexpr, WARPS: tl.constexpr, HELD: tl.constexpr):
    """Tell which of :func:`_indices` are in their warp's stretch and below the limit, without computing each index."""
    common = _along(PARTS, 0, HELD) * 128 + _along(4, 3, HELD)
    return common < tl.minimum(limit - _along(WARPS, 1, HELD) * stretch, stretch) - _along(32, 2, HELD) * 4


@jit
def _either(least, most, other_least, other_most):
    return tl.minimum(least, other_least), tl.maximum(most, other_most)


@jit
def _extremes(least, most):
    """Return (minimum of ``least``, maximum of ``most``) over their last axis, in one exchange between threads."""
    if INTERPRETED:
        return tl.min(least, axis=0), tl.max(most, axis=0)
    else:
        return tl.reduce((least, most), 0, _either)


@jit
def _clear(histograms, WARPS: tl.constexpr):
    """Set all bins to zero."""
    LINE: tl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    for number in tl.static_range(HISTOGRAMS):
        histograms.index(number).store(gl.full([BINS], 0, tl.int32, LINE))


@jit
def _bin_shift(span):
    """Return the shift, uint32, that maps the distances 0 to ``span`` (uint32) to bins, to more than half of them."""
    # The exponent of the distance as fp32 says how many bits it has, or one more.
    bits = (span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return tl.maximum(bits - BIN_BITS, 0).to(tl.uint32)


@jit
def _count(histogram, keys, high, span, shift):
    """Count keys in the bins of their distances below ``high``, unless these are larger than ``span``."""
    distance = tl.reshape((high - keys).to(tl.uint32), [keys.numel])
    bin = (distance >> shift).to(tl.int32)
    histogram.atomic_scatter_add(bin * 0 + 1, bin, 0, distance <= span)


@jit
def _bin_of(histogram, k, WARPS: tl.constexpr):
    """Find the bin that holds the ``k``-th counted key: (bin, keys in earlier bins, keys in these and in that bin)."""
    # Every warp reads all bins, so that no exchange between warps follows.
    LINE: tl.constexpr = gl.BlockedLayout([BINS // 32], [32], [WARPS], [0])
    gl.barrier()
    reach = tl.cumsum(histogram.load(LINE), axis=0)
    before = ((gl.arange(0, BINS, LINE) + 1) << 16) | reach
    last = tl.max(tl.where(reach < k, before, 0), axis=0)
    reached = tl.min(tl.where(reach >= k, reach, 0x7FFFFFFF), axis=0)
    return last >> 16, last & 0xFFFF, reached


@jit
def _find_bound(keys, low, high, k, histograms, number, WARPS: tl.constexpr):
    """Find a bound that the ``k`` largest keys reach and, unless others equal the k-th largest, no other key.

    low: a key that at least k keys reach. high: the largest key. histograms: int32 [.., bins] in shared memory, zeros
    from ``number`` on. Returns (bound, how many keys too many reach it, how many of those that equal it are among the k
    largest if others are not).
    """
    # Keys are counted by their distance from the largest, unsigned: in the first bin are the largest keys.
    span = (high - low).to(tl.uint32)
    excess = k
    while (excess > 0) & (number < HISTOGRAMS):
        shift = _bin_shift(span)
        histogram = histograms.index(number)
        _count(histogram, keys, high, span, shift)
        bin, earlier, reached = _bin_of(histogram, k, WARPS)
        k -= earlier
        excess = reached - earlier - k
        high -= (bin.to(tl.uint32) << shift).to(tl.int32)
        span = tl.minimum((gl.full([], 1, tl.uint32, None) << shift) - 1, (high - low).to(tl.uint32))
        number += 1
    return high - span.to(tl.int32), excess, k


@jit
def _group_bound(numbers, histogram, TOPK: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr, HELD: tl.constexpr):
    """Return (a bound that TOPK or a few more groups of numbers reach, the largest number); a guess, to be checked.

    A thread holds GROUPS groups, of which there are more than TOPK. If the maxima of TOPK groups reach a bound, at
    least TOPK numbers do. A group's numbers lie far apart in the row, because neighbours often score alike. Bins are
    linear in the numbers; the bound lies a hundredth of a bin lower than its bin, which rounding does not reach.
    """
    PARTS: tl.constexpr = numbers.shape[0]
    of_part = tl.max(numbers, axis=3)
    group = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, HELD))))[:, None, None] % GROUPS
    largest = tl.max(of_part, axis=0)
    smallest = largest
    for number in tl.static_range(GROUPS):
        of_group = tl.max(tl.where(group == number, of_part, float("-inf")), axis=0)
        # An empty group says nothing.
        smallest = tl.minimum(smallest, tl.where(of_group > float("-inf"), of_group, float("inf")))
    low, high = _extremes(tl.min(smallest, axis=1), tl.max(largest, axis=1))
    scale = tl.where(high > low, (BINS - 1) / (high - low), 0.0)
    for number in tl.static_range(GROUPS):
        of_group = tl.max(tl.where(group == number, of_part, float("-inf")), axis=0)
        bin = tl.minimum(((high - of_group) * scale).to(tl.int32), BINS - 1)
        bin = tl.reshape(tl.maximum(bin, 0), [of_group.numel])
        histogram.atomic_scatter_add(bin * 0 + 1, bin, 0, tl.reshape(of_group >= low, [of_group.numel]))
    bin, _, _ = _bin_of(histogram, TOPK, WARPS)
    return high - (bin + 1.01) * ((high - low) / (BINS - 1)), high


@jit
def _begins(chosen, WARPS: tl.constexpr, HELD: tl.constexpr):
    """Count the chosen values before each lane's of each part, in the order of :func:`_indices`, and all of them.

    chosen: bool [parts, warps, 32, 4]. Returns (int32 [parts, warps, 32], int32).
    """
    PARTS: tl.constexpr = chosen.shape[0]
    OF_LANES: tl.constexpr = gl.SliceLayout(3, HELD)
    OF_WARPS: tl.constexpr = gl.SliceLayout(2, OF_LANES)
    LANES: tl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    of_lane = tl.sum(tl.where(chosen, 1, 0), axis=3)
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, OF_LANES)))[:, None, None]
    begin = gl.full([PARTS, WARPS], 0, tl.int32, OF_WARPS)
    of_warp = tl.sum(begin, axis=0)
    lanes_before = of_lane * 0
    # A warp holds at most 128 of a part: the counts of four parts take 8 bits each of a word.
    for word in tl.static_range((PARTS + 3) // 4):
        packed = tl.sum(tl.where(part // 4 == word, of_lane << (part % 4 * 8), 0), axis=0)
        until = tl.cumsum(gl.convert_layout(packed, LANES), axis=1)
        until = gl.convert_layout(until, gl.SliceLayout(0, OF_LANES))
        lanes_before = tl.where(
            part // 4 == word, ((until - packed)[None, :, :] >> (part % 4 * 8)) & 0xFF, lanes_before
        )
        totals = tl.sum(packed[None, :, :], axis=2)
        for of_word in tl.static_range(min(4, PARTS)):
            total = (totals >> (8 * of_word)) & 0xFF
            later = gl.arange(0, PARTS, gl.SliceLayout(1, OF_WARPS))[:, None] > 4 * word + of_word
            begin += tl.where(later, total, 0)
            of_warp += tl.sum(total, axis=0)
    # Every warp gets all warps' counts, a lane each.
    other = gl.arange(0, WARPS, gl.SliceLayout(0, LANES))[None, :]
    earlier = other < gl.arange(0, WARPS, gl.SliceLayout(1, LANES))[:, None]
    counts = gl.convert_layout(of_warp, gl.SliceLayout(0, LANES))[None, :]
    warps_before = gl.convert_layout(tl.sum(tl.where(earlier, counts, 0), axis=1), gl.SliceLayout(0, OF_WARPS))
    begin += warps_before[None, :]
    return begin[:, :, None] + lanes_before, tl.sum(
        gl.convert_layout(of_warp, gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0
    )


@jit
def _places(begins, chosen):
    """Return the place of each chosen value, int32 [parts, warps, 32, 4], from what :func:`_begins` gives for them."""
    ones = tl.where(chosen, 1, 0)
    return begins[:, :, :, None] + tl.cumsum(ones, axis=3) - ones


@jit
def _entry_slot(table, entry, known):
    """Return the int32 slots of a request's ratio-4 entries. table: the request's row of its pages' full slots."""
    return tl.load(table + entry // 64, mask=known, other=0) // 4 + entry % 64


@jit
def _take_all(table, visible, slots, TOPK: tl.constexpr, WARPS: tl.constexpr):
    """Store the slots of all visible entries, which are at most TOPK, then −1."""
    LANES: tl.constexpr = 32 * WARPS
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [WARPS], [0]))
    for part in tl.static_range((TOPK + LANES - 1) // LANES):
        entry = part * LANES + lane
        known = entry < visible
        tl.store(slots + entry, tl.where(known, _entry_slot(table, entry, known), -1), mask=entry < TOPK)


@jit
def _keep(kept, numbers, index, place, chosen, WARPS: tl.constexpr, HELD: tl.constexpr):
    """Store the chosen fp32 numbers and their indices in the first half of ``kept``, each at its place.

    The other half is for all else, a place a thread: a mask would make each store a branch. All threads of the program
    see what is kept after a barrier.
    """
    size: tl.constexpr = numbers.numel
    thread = _along(WARPS, 1, HELD) * 32 + _along(32, 2, HELD)
    place = tl.where(chosen, place, thread + kept.shape[0] // 2)
    both = (index.to(tl.int64) << 32) | numbers.to(tl.uint32, bitcast=True).to(tl.int64)
    kept.scatter(tl.reshape(both, [size]), tl.reshape(place, [size]), 0)


@jit
def _load_kept(kept, PARTS: tl.constexpr, WARPS: tl.constexpr, HELD: tl.constexpr):
    """Load what is kept in shared memory, in the order of :func:`_indices`: (fp32, int32) [parts, warps, 32, 4]."""
    both = kept.slice(0, kept.shape[0] // 2).load(gl.BlockedLayout([4], [32], [WARPS], [0]))
    both = gl.convert_layout(tl.permute(tl.reshape(both, [WARPS, PARTS, 32, 4]), (1, 0, 2, 3)), HELD)
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32)


@jit
def _store_best(
    keys,
    index,
    low,
    high,
    k,
    number,
    source,
    electing,
    begin,
    whole,
    table,
    slots,
    candidates,
    entries,
    histograms,
    WARPS: tl.constexpr,
    HELD: tl.constexpr,
):
    """Store the ``k`` best of these keys, at ``index`` of the source, in the order in which a program holds them.

    low, high, number: as in :func:`_find_bound`. The others are as in :func:`_select`.
    """
    # Looked up for all keys, before it is known which are chosen: this takes as long as a round trip to memory.
    present = keys > ABSENT_KEY
    entry = begin + index
    if electing:
        entry = tl.load(source.to(tl.pointer_type(tl.int32)) + entries + index, mask=present, other=0, cache_modifier=".cg")
    slot = _entry_slot(table, entry, present & whole)
    bound, excess, k = _find_bound(keys, low, high, k, histograms, number, WARPS)
    chosen = keys >= bound
    if excess > 0:
        equal = keys == bound
        chosen = (keys > bound) | (equal & (_places(_begins(equal, WARPS, HELD)[0], equal) < k))
    place = _places(_begins(chosen, WARPS, HELD)[0], chosen)
    if whole:
        tl.store(slots + place, slot, mask=chosen)
    else:
        tl.store(candidates + place, _score_bits(keys), mask=chosen)
        tl.store(candidates + entries + place, entry, mask=chosen)


@jit
def _select(
    source,
    readable,
    count,
    electing,
    begin,
    whole,
    table,
    slots,
    candidates,
    entries,
    histograms,
    kept,
    TOPK: tl.constexpr,
    KEPT_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Select the TOPK best of ``count`` scores: slots if ``whole``, else candidates. Of fewer, all become candidates.

    source: fp32 pointer to the scores or, if ``electing``, to those of all chunks' candidates. readable: number of
    scores that may be read. begin: entry of the first score. candidates: int32 pointer. entries: how far a candidate's
    entry lies behind its score. kept: int64 in shared memory, for twice KEPT_PARTS parts.
    """
    HELD: tl.constexpr = gl.BlockedLayout([PARTS, 1, 1, 4], [1, 1, 32, 1], [1, WARPS, 1, 1], [3, 2, 1, 0])
    stretch = tl.cdiv(count, 128 * WARPS) * 128
    index = _indices(stretch, PARTS, WARPS, HELD)
    present = _is_below(count, stretch, PARTS, WARPS, HELD)
    # Read the last group of four that holds any score as a whole, if the row has all four: one load takes four.
    in_row = _is_below(tl.minimum((count + 3) // 4 * 4, readable), stretch, PARTS, WARPS, HELD)
    numbers = tl.load(source + index, mask=in_row, other=0.0, cache_modifier=".cg")
    row_arguments = (source, electing, begin, whole, table, slots, candidates, entries, histograms)
    k, number = tl.minimum(count, TOPK), 0
    found = gl.full([], False, tl.int1, None)
    GROUPS: tl.constexpr = max(2, TOPK // (16 * WARPS))
    if (PARTS > KEPT_PARTS) & (PARTS >= GROUPS):
        # Narrow: keep what reaches a bound that TOPK or a few more do.
        numbers = tl.where(present, numbers, float("-inf"))
        bound, highest = _group_bound(numbers, histograms.index(0), TOPK, GROUPS, WARPS, HELD)
        number = 1
        begins, held = _begins(numbers >= bound, WARPS, HELD)
        found = (bound > float("-inf")) & (held >= TOPK) & (held <= KEPT_PARTS * 128 * WARPS)
        if found:
            low, high = _ordered_keys(bound), _ordered_keys(highest)
            reach = numbers >= _score(_again(low))
            _keep(kept, numbers, index, _places(begins, reach), reach, WARPS, HELD)
            gl.barrier()
            LEFT: tl.constexpr = gl.BlockedLayout([KEPT_PARTS, 1, 1, 4], [1, 1, 32, 1], [1, WARPS, 1, 1], [3, 2, 1, 0])
            numbers_left, index_left = _load_kept(kept, KEPT_PARTS, WARPS, LEFT)
            present_left = _indices(KEPT_PARTS * 128, KEPT_PARTS, WARPS, LEFT) < held
            keys = tl.where(present_left, _ordered_keys(numbers_left), ABSENT_KEY)
            _store_best(keys, index_left, low, high, k, number, *row_arguments, WARPS, LEFT)
    if found == 0:
        present = _is_below(_again(count), stretch, PARTS, WARPS, HELD)
        keys = tl.where(present, _ordered_keys(numbers), ABSENT_KEY)
        least = tl.min(tl.min(tl.where(present, keys, 0x7FFFFFFF), axis=3), axis=0)
        low, high = _extremes(tl.min(least, axis=1), tl.max(tl.max(tl.max(keys, axis=3), axis=0), axis=1))
        _store_best(keys, index, low, high, k, number, *row_arguments, WARPS, HELD)


@jit(do_not_specialize=["first"])
def _select_kernel(
    scores,
    row_stride,
    columns,
    positions,
    owners,
    table,
    table_stride,
    slots,
    lengths,
    first,
    candidates,
    candidates_row,
    entries,
    semaphores,
    TOPK: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
    KEPT_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Select one chunk's best entries, and in a row's last program the best of its candidates.

    Grid: (rows, chunks). HAS_CHUNKS: a row may have several chunks. A program of WARPS warps holds PARTS parts of
    :func:`_indices`, or KEPT_PARTS where they suffice.
    """
    ROWS: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    histograms = gl.allocate_shared_memory(tl.int32, [8, BINS], ROWS)
    kept = gl.allocate_shared_memory(tl.int64, [2 * KEPT_PARTS * 128 * WARPS], ROWS)
    _clear(histograms, WARPS)
    # What narrowing does not fill is loaded, too.
    LINE: tl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    kept.store(gl.full([2 * KEPT_PARTS * 128 * WARPS], 0, tl.int64, LINE))
    after_previous()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = first + row
    visible = visible_entries(tl.load(positions + token), columns)
    begin = chunk * CHUNK
    if (chunk == 0) | (visible > begin):
        slots += row * TOPK
        table += tl.load(owners + token) * table_stride
        if chunk == 0:
            tl.store(lengths + row, tl.minimum(visible, TOPK))
        if visible <= TOPK:
            _take_all(table, visible, slots, TOPK, WARPS)
        else:
            candidates += row * candidates_row
            nominated = candidates + chunk * TOPK
            source = scores + row * row_stride + begin
            count, readable = tl.minimum(visible - begin, CHUNK), columns - begin
            electing, whole = gl.full([], False, tl.int1, None), visible <= CHUNK
            more = gl.full([], True, tl.int1, None)
            while more:
                arguments = (
                    source,
                    readable,
                    count,
                    electing,
                    begin,
                    whole,
                    table,
                    slots,
                    nominated,
                    entries,
                    histograms,
                    kept,
                )
                if count <= KEPT_PARTS * 128 * WARPS:
                    _select(*arguments, TOPK, KEPT_PARTS, KEPT_PARTS, WARPS)
                elif PARTS > KEPT_PARTS:
                    _select(*arguments, TOPK, KEPT_PARTS, PARTS, WARPS)
                more = gl.full([], False, tl.int1, None)
                if HAS_CHUNKS:
                    if whole == 0:
                        # Every thread has stored its candidates before the semaphore is incremented.
                        gl.barrier()
                        chunks = tl.cdiv(visible, CHUNK)
                        more = tl.atomic_add(semaphores + row, 1, sem="acq_rel", scope="gpu") == chunks - 1
                        if more:
                            tl.store(semaphores + row, 0)
                            _clear(histograms, WARPS)
                            source = candidates.to(tl.pointer_type(tl.float32))
                            count = (chunks - 1) * TOPK + tl.minimum(visible - (chunks - 1) * CHUNK, TOPK)
                            readable = chunks * TOPK
                            electing, whole = more, more


@dataclass(frozen=True)
class Candidates:
    """Workspace in which the chunks of a row collect their candidates.

    One workspace serves all layers of a CUDA stream, one after another.

    Attributes:
        nominated: int32 [rows, 2, chunks, topk]: scores' bits, then entries.
        semaphores: int32 [rows], the chunks of a row that are done; zero between launches.
    """

    nominated: Tensor
    semaphores: Tensor


def new_candidates(rows: int, columns: int, topk: int, device: torch.device | str) -> Candidates:
    """Allocate the workspace for up to ``rows`` rows of ``columns`` columns; no candidates where a row is one chunk."""
    chunks = cdiv(columns, CHUNK_SCORES) if columns > CHUNK_SCORES else 0
    nominated = torch.empty(rows, 2, chunks, topk, dtype=torch.int32, device=device)
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
    chunks = max(1, cdiv(columns, CHUNK_SCORES))
    nominated, semaphores = lengths, lengths  # unused
    if candidates is not None and chunks > 1:
        nominated, semaphores = candidates.nominated, candidates.semaphores
    if not rows:
        return
    chunk = min(max(WARP_SCORES, next_power_of_2(columns)), CHUNK_SCORES)
    held = max(chunk, next_power_of_2(topk * chunks)) if chunks > 1 else chunk
    warps = _warps(held)
    parts = held // (WARP_SCORES * warps)
    _select_kernel[(rows, chunks)](
        scores,
        scores.stride(0),
        columns,
        batch.positions,
        batch.owners,
        batch.pages,
        batch.pages.stride(0),
        slots,
        lengths,
        first,
        nominated,
        nominated.stride(0),
        nominated.stride(1) if chunks > 1 else 0,
        semaphores,
        topk,
        chunk,
        chunks > 1,
        min(cdiv(2 * next_power_of_2(topk), WARP_SCORES * warps), parts),
        parts,
        warps,
        num_warps=warps,
        maxnreg=MAX_REGISTERS,
        **OVERLAPPED,
    )


def _warps(held: int) -> int:
    return min(MAX_WARPS, held // WARP_SCORES)


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
    checks.require_dimensions("candidates.nominated", nominated, 4, "[rows, 2, chunks, topk]")
    held, _, of_row, _ = nominated.shape
    checks.require_shape("candidates.nominated", nominated, (held, 2, of_row, topk), "[rows, 2, chunks, topk]")
    checks.require_shape("candidates.semaphores", semaphores, (held,), "[rows]")
    if held < rows or of_row < chunks:
        raise OperandValueError(
            f"candidates: expected at least {rows} rows of {chunks} chunks, found {held} of {of_row}"
        )
    return nominated, semaphores
