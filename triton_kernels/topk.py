"""The best entries of each query, without sorting: a threshold and one pass of prefix sums (DEEPSEEK_V4.md §5).

A query at position p sees ratio-4 entries ``w < (p + 1) // 4``; of more than topk it attends to those of the largest
scores. A program holds up to :data:`CHUNK` scores of one query in registers as integers of the same order, finds the
topk-th largest by counting those that reach a bound, and stores what is chosen at the place that a prefix sum gives it,
so in the order of the entries. Of a longer row each chunk nominates its own best, which hold all of the row's best, and
counts itself in; the program that comes last makes the same choice among the nominated. Nobody waits. Equal scores go
to the lower entry in either case, and nothing else is left to chance: the result depends on the scores alone.

The order of scores is that of the numbers, −inf to +inf; −0 equals +0, and NaN is below all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from .batch import Batch
from .indexer import visible_entries
from .overlap import OVERLAPPED, after_previous

CHUNK = 16384
"""Scores that a program holds at most."""
GROUPS = 2048
"""Of a chunk, for the first estimate of its threshold: the most that a query may choose."""
SMALL = 4096
"""Scores that cost less: of short contexts where many columns were captured."""
CANDIDATES = 16384
"""What the chunks of a row may yield together."""

REGISTERS = 64
"""Of a thread, so that a multiprocessor holds two programs of 512 threads: one loads while the other counts."""

NAN_KEY = tl.constexpr(-0x7F800001)
AIMED_STEPS = tl.constexpr(20)
ABSENT_KEY = tl.constexpr(-0x7F800002)


@triton.jit
def _ordered(scores):
    """int32 keys of the same order as the fp32 scores."""
    bits = scores.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude > 0x7F800000, NAN_KEY, tl.where(bits < 0, -magnitude, magnitude))


@triton.jit
def _score(key):
    """The fp32 score whose key it is; the keys beyond the infinities are NaN."""
    return tl.where(key < 0, -key | -0x80000000, key).to(tl.float32, bitcast=True)


@triton.jit
def _bound(keys, k, slack, low, high):
    """A bound that ``k`` to ``k + slack`` keys reach, or else the k-th largest key.

    low: a bound that at least k keys reach; high: one that none does. int32.
    """
    count = tl.sum((keys >= low).to(tl.int32))
    # How far the counts at both ends are from the aim, a place that counts as between keys.
    aim = k + (slack + 1) * 0.5
    above, below = count - aim, aim
    side, steps = 0, 0
    while (count > k + slack) & (low + 1 < high):
        # First where the aim would be if scores lay evenly, of an end that stays, half as far: false position in the
        # Illinois form. That does not end for every distribution, but halving does.
        halfway = (low + (high.to(tl.int64) - low) // 2).to(tl.int32)
        bottom = _score(low)
        aimed = bottom + (_score(high) - bottom) * (above / (above + below))
        usable = (tl.abs(aimed) < float("inf")) & (steps < AIMED_STEPS)
        middle = tl.where(usable, _ordered(aimed), halfway)
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        reached = tl.sum((keys >= middle).to(tl.int32))
        enough = reached >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        count = tl.where(enough, reached, count)
        above = tl.where(enough, reached - aim, tl.where(side < 0, above * 0.5, above))
        below = tl.where(enough, tl.where(side > 0, below * 0.5, below), aim - reached)
        side = tl.where(enough, 1, -1)
        steps += 1
    return low


@triton.jit
def _cut(keys, k, GROUPS: tl.constexpr):
    """Where the k largest of keys [n] end: (threshold, end); those above it and those equal to it at indices below end.

    At least k keys are not ABSENT_KEY. k <= GROUPS.
    """
    if keys.shape[0] > GROUPS:
        # Of k groups whose maximum reaches a bound, k keys do. Groups are strided: neighbours often score alike. It is
        # a first estimate, so half as many again will do.
        maxima = tl.max(tl.reshape(keys, (keys.shape[0] // GROUPS, GROUPS)), axis=0)
        high = tl.max(maxima, axis=0) + 1
        low = _bound(maxima, k, k // 2, tl.maximum(tl.min(maxima, axis=0), NAN_KEY), high)
    else:
        high = tl.max(keys, axis=0) + 1
        low = tl.maximum(tl.min(keys, axis=0), NAN_KEY)
    threshold = _bound(keys, k, 0, low, high)
    # Rarely are more than k: then the threshold is the k-th largest, and the end lies where k are reached.
    index = tl.arange(0, keys.shape[0])
    begin, end = 0, keys.shape[0]
    taken = tl.sum((keys >= threshold).to(tl.int32))
    while taken > k:
        middle = (begin + end) // 2
        reached = tl.sum(_chosen(keys, index, threshold, middle).to(tl.int32))
        enough = reached >= k
        begin, end = tl.where(enough, begin, middle), tl.where(enough, middle, end)
        taken = tl.where(enough, reached, taken)
    return threshold, end


@triton.jit
def _chosen(keys, index, threshold, end):
    """Which of the keys at these indices are those of :func:`_cut`."""
    return (keys > threshold) | ((keys == threshold) & (index < end))


@triton.jit
def _counts_before(counts):
    """counts [parts, n], of at most 2048 together: (first, second), int64 [n], with how many lie before each place.

    The order is that of the parts, at most 8; 16 bits a part, of which four are in each of both.
    """
    part = tl.arange(0, counts.shape[0])[:, None]
    shifted = counts.to(tl.int64) << (part % 4 * 16).to(tl.int64)
    first = tl.sum(tl.where(part < 4, shifted, 0), axis=0)
    total = tl.sum(first, axis=0)
    before = tl.cumsum(first, axis=0) - first + (total << 16) + (total << 32) + (total << 48)
    if counts.shape[0] <= 4:
        return before, before
    else:
        second = tl.sum(tl.where(part < 4, 0, shifted), axis=0)
        both = total + (total >> 32)
        all_first = (both + (both >> 16)) & 0xFFFF
        total = tl.sum(second, axis=0)
        after = tl.cumsum(second, axis=0) - second + (total << 16) + (total << 32) + (total << 48)
        return before, after + all_first * 0x0001000100010001


@triton.jit
def _one(x, PART: tl.constexpr, PLACE: tl.constexpr):
    """x[PART, :, PLACE]: what costs nothing where a thread holds all parts and places."""
    part, place = tl.arange(0, x.shape[0])[:, None, None], tl.arange(0, x.shape[2])[None, :]
    of_part = tl.sum(tl.where(part == PART, x, 0), axis=0)
    return tl.sum(tl.where(place == PLACE, of_part, 0), axis=1)


@triton.jit
def _store_choice(keys, threshold, end, to, GROUPS: tl.constexpr):
    """Indices of what :func:`_cut` chose of the keys, in order, int32; all threads see them then."""
    # A thread holds groups of four keys as they were loaded and stores one of each at a time, in the layout that it
    # counts in: nothing moves between threads but the counts. What is done with the choice is done with it alone.
    FOURS: tl.constexpr = min(keys.shape[0], GROUPS) // 4
    PARTS: tl.constexpr = keys.shape[0] // (4 * FOURS)
    index = tl.arange(0, keys.shape[0])
    chosen = _chosen(keys, index, threshold, end).to(tl.int32)
    first, second = _counts_before(tl.sum(tl.reshape(chosen, (PARTS, FOURS, 4)), axis=2))
    keys = tl.reshape(keys, (PARTS, FOURS, 4))
    for part in tl.static_range(PARTS):
        before = first if part < 4 else second
        place = (before >> (part % 4 * 16)).to(tl.int32) & 0xFFFF
        for of_four in tl.static_range(4):
            index = (part * FOURS + tl.arange(0, FOURS)) * 4 + of_four
            chosen = _chosen(_one(keys, part, of_four), index, threshold, end)
            tl.store(to + place, index, mask=chosen)
            place += chosen.to(tl.int32)
    tl.debug_barrier()


@triton.jit
def _choice(at, known):
    """What :func:`_store_choice` stored; the places may be overwritten then."""
    index = tl.load(at, mask=known, other=0, cache_modifier=".cg")
    # Where there are fewer places than threads, several read each, and one will write it: after all have read.
    tl.debug_barrier()
    return index


@triton.jit
def _entry_slot(table, entry, known):
    """Slot of a request's ratio-4 entry, int32; ``table``: the request's row of full slots."""
    return tl.load(table + entry * 4, mask=known, other=0) // 4


@triton.jit
def _take_all(table, visible, slots, TOPK: tl.constexpr, PADDED: tl.constexpr):
    """All of at most TOPK visible entries, then −1."""
    entry = tl.arange(0, PADDED)
    known = entry < visible
    tl.store(slots + entry, tl.where(known, _entry_slot(table, entry, known), -1), mask=entry < TOPK)


@triton.jit
def _keys(scores, count, limit, BLOCK: tl.constexpr):
    """Of ``count`` scores, then ABSENT_KEY: [BLOCK]. ``limit``: how many may be read."""
    index = tl.arange(0, BLOCK)
    # Of the last four that hold any all are read, if there are four: so they come together.
    readable = index < tl.minimum((count + 3) // 4 * 4, limit)
    keys = _ordered(tl.load(scores + index, mask=readable, other=0.0))
    return tl.where(index < count, keys, ABSENT_KEY)


@triton.jit
def _select(
    scores,
    columns,
    begin,
    visible,
    whole,
    table,
    slots,
    candidates,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    NOMINATES: tl.constexpr,
):
    """The best of the BLOCK scores at ``begin``: slots of them if they are the whole row, more than TOPK of at most
    BLOCK; else (NOMINATES) they are candidates, keys and entries, and all are if there are no more than TOPK."""
    count = visible - begin
    keys = _keys(scores + begin, count, columns - begin, BLOCK)
    threshold, end = _cut(keys, tl.minimum(count, TOPK), GROUPS)
    place = tl.arange(0, PADDED)
    if whole:
        _store_choice(keys, threshold, end, slots, GROUPS)
        entry = begin + _choice(slots + place, place < TOPK)
        tl.store(slots + place, _entry_slot(table, entry, place < TOPK), mask=place < TOPK)
    elif NOMINATES:
        entries = candidates + TOPK
        _store_choice(keys, threshold, end, entries, GROUPS)
        stored = place < tl.minimum(count, TOPK)
        entry = begin + _choice(entries + place, stored)
        tl.store(candidates + place, _ordered(tl.load(scores + entry, mask=stored, other=0.0)), mask=stored)
        tl.store(entries + place, entry, mask=stored)


@triton.jit
def _elect(
    candidates,
    visible,
    table,
    slots,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Slots of the best of at most BLOCK candidates, which other programs have stored."""
    index = tl.arange(0, BLOCK)
    present = index % TOPK < visible - index // TOPK * CHUNK
    at = candidates + index + index // TOPK * TOPK
    keys = tl.load(at, mask=present, other=ABSENT_KEY, cache_modifier=".cg")
    threshold, end = _cut(keys, TOPK, GROUPS)
    _store_choice(keys, threshold, end, slots, GROUPS)
    place = tl.arange(0, PADDED)
    index = _choice(slots + place, place < TOPK)
    at = candidates + TOPK + index + index // TOPK * TOPK
    entry = tl.load(at, mask=place < TOPK, other=0, cache_modifier=".cg")
    tl.store(slots + place, _entry_slot(table, entry, place < TOPK), mask=place < TOPK)


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
    arrivals,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    SMALL: tl.constexpr,
    BLOCK: tl.constexpr,
    ELECTORS: tl.constexpr,
    GROUPS: tl.constexpr,
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
        of_row = (table, slots, candidates + row * candidates_row + chunk * (2 * TOPK))
        if chunk == 0:
            tl.store(lengths + row, tl.minimum(visible, TOPK))
        if visible <= TOPK:
            _take_all(table, visible, slots, TOPK, PADDED)
        elif visible <= SMALL:
            _select(scores, columns, 0, visible, True, *of_row, TOPK, PADDED, SMALL, GROUPS, False)
        else:
            whole = visible <= BLOCK
            _select(scores, columns, begin, visible, whole, *of_row, TOPK, PADDED, BLOCK, GROUPS, ELECTORS > 0)
            if (ELECTORS > 0) & (not whole):
                chunks = tl.cdiv(visible, BLOCK)
                # All that the program nominates lies in memory before it is counted in.
                tl.debug_barrier()
                if tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu") == chunks - 1:
                    tl.store(arrivals + row, 0)
                    candidates += row * candidates_row
                    if chunks * TOPK <= SMALL:
                        _elect(candidates, visible, table, slots, TOPK, PADDED, BLOCK, SMALL, GROUPS)
                    elif ELECTORS > SMALL:
                        _elect(candidates, visible, table, slots, TOPK, PADDED, BLOCK, ELECTORS, GROUPS)


@dataclass(frozen=True)
class Candidates:
    """Where the chunks of rows meet; one serves all layers of a stream, one after another.

    Attributes:
        nominated: int32 [rows, chunks, 2, topk]: keys and entries. arrivals: int32 [rows], zero between launches.
    """

    nominated: Tensor
    arrivals: Tensor


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
    checks.require_range("topk", topk, 1, GROUPS)
    checks.require_range("first", first, 0, batch.tokens - rows)
    checks.require_dtype("slots", slots, torch.int32)
    checks.require_shape("slots", slots, (rows, topk), "[rows, topk]")
    checks.require_contiguous("slots", slots)
    checks.require_dtype("lengths", lengths, torch.int32)
    checks.require_shape("lengths", lengths, (rows,), "[rows]")
    checks.require_contiguous("lengths", lengths)
    chunks = max(1, triton.cdiv(columns, CHUNK))
    nominated, arrivals = lengths, lengths  # unused
    if chunks > 1:
        checks.require_range("topk times chunks of scores", topk * chunks, 1, CANDIDATES)
        nominated, arrivals = _checked(candidates, rows, chunks, topk)
    checks.require_same_device(
        "scores",
        scores,
        slots=slots,
        lengths=lengths,
        candidates=nominated,
        arrivals=arrivals,
        positions=batch.positions,
    )
    if not rows:
        return
    block = min(max(128, triton.next_power_of_2(columns)), CHUNK)
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
        arrivals,
        topk,
        triton.next_power_of_2(topk),
        min(SMALL, block),
        block,
        max(128, triton.next_power_of_2(topk * chunks)) if chunks > 1 else 0,
        GROUPS,
        num_warps=_warps(block),
        maxnreg=REGISTERS,
        **OVERLAPPED,
    )


def _checked(candidates: Candidates | None, rows: int, chunks: int, topk: int) -> tuple[Tensor, Tensor]:
    """Both tensors of ``candidates``, which are enough."""
    if candidates is None:
        raise checks.OperandTypeError(f"candidates: expected those of {chunks} chunks, found None")
    nominated, arrivals = candidates.nominated, candidates.arrivals
    for name, tensor in (("nominated", nominated), ("arrivals", arrivals)):
        checks.require_dtype(f"candidates.{name}", tensor, torch.int32)
        checks.require_contiguous(f"candidates.{name}", tensor)
    held = (*nominated.shape[:2], 2, topk)
    checks.require_shape("candidates.nominated", nominated, held, "[rows, chunks, 2, topk]")
    checks.require_shape("candidates.arrivals", arrivals, held[:1], "[rows]")
    if held[0] < rows or held[1] < chunks:
        raise checks.OperandValueError(
            f"candidates: expected at least {rows} rows of {chunks} chunks, found {held[0]} of {held[1]}"
        )
    return nominated, arrivals


def _warps(block: int) -> int:
    """So many that a thread's elements of a block, four at a time, are one of each group of :data:`GROUPS`."""
    return max(1, min(block, GROUPS) // 128)
