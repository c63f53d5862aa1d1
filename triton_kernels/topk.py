"""The best entries of each query, without sorting: a threshold and one pass of prefix sums (DEEPSEEK_V4.md §5).

A query at position p sees ratio-4 entries ``w < (p + 1) // 4``; of more than topk it attends to those of the largest
scores. A program holds up to :data:`CHUNK` scores of one query in registers as integers of the same order, finds the
topk-th largest by bisection, and stores what is chosen at the place that a prefix sum gives it, so in the order of the
entries. Longer rows take a second launch: each chunk first yields its own best, which hold all of the row's best, and
the same choice is made among them. Equal scores go to the lower entry in either case, and nothing else is left to
chance: the result depends on the scores alone.

The order of scores is that of the numbers, −inf to +inf; −0 equals +0, and NaN is below all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from .batch import Batch
from .indexer import visible_entries

CHUNK = 16384
"""Scores that a program holds."""
GROUPS = 2048
"""Of a chunk, for the first estimate of its threshold: the most that a query may choose."""
CANDIDATES = 16384
"""What the chunks of a row may yield together."""

NAN_KEY = tl.constexpr(-0x7F800001)
ABSENT_KEY = tl.constexpr(-0x7F800002)


@triton.jit
def _ordered(scores):
    """int32 keys of the same order as the fp32 scores."""
    bits = scores.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude > 0x7F800000, NAN_KEY, tl.where(bits < 0, -magnitude, magnitude))


@triton.jit
def _bisect(keys, k, low, high):
    """A bound that at least ``k`` keys reach: exactly ``k``, or else it is the k-th largest key.

    low: a bound that at least k keys reach; high: one that fewer do. int32.
    """
    count = tl.sum((keys >= low).to(tl.int32))
    while (count != k) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)
        reached = tl.sum((keys >= middle).to(tl.int32))
        enough = reached >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        count = tl.where(enough, reached, count)
    return low


@triton.jit
def _choose(keys, k, GROUPS: tl.constexpr):
    """(chosen, place) of each of the keys [n]: the k largest, at places 0 to k − 1 in order of index.

    At least k keys are not ABSENT_KEY; equal ones are chosen from the first. k <= GROUPS.
    """
    low = NAN_KEY
    high = tl.max(keys, axis=0) + 1
    if keys.shape[0] > GROUPS:
        # Of k groups whose maximum reaches a bound, k keys do. Groups are strided: neighbours often score alike.
        maxima = tl.max(tl.reshape(keys, (keys.shape[0] // GROUPS, GROUPS)), axis=0)
        low = _bisect(maxima, k, low, high)
    threshold = _bisect(keys, k, low, high)
    above = keys > threshold
    equal = keys == threshold
    counts = tl.cumsum((above.to(tl.int32) << 16) + equal.to(tl.int32), axis=0)
    equals_taken = k - tl.sum(above.to(tl.int32))
    equals = counts & 0xFFFF
    chosen = above | (equal & (equals <= equals_taken))
    return chosen, (counts >> 16) + tl.minimum(equals, equals_taken) - 1


@triton.jit
def _entry_slot(table, entry, known):
    """Slot of a request's ratio-4 entry, int32; ``table``: the request's row of full slots."""
    return tl.load(table + entry * 4, mask=known, other=0) // 4


@triton.jit
def _take_all(table, visible, out, TOPK: tl.constexpr, PADDED: tl.constexpr):
    """All of at most TOPK visible entries, then −1."""
    entry = tl.arange(0, PADDED)
    known = entry < visible
    tl.store(out + entry, tl.where(known, _entry_slot(table, entry, known), -1), mask=entry < TOPK)


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
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = first + row
    visible = visible_entries(tl.load(positions + token), columns)
    table += tl.load(requests + tl.load(owners + token)) * table_stride
    slots += row * TOPK
    tl.store(lengths + row, tl.minimum(visible, TOPK))
    if visible <= TOPK:
        _take_all(table, visible, slots, TOPK, PADDED)
    else:
        entry = tl.arange(0, BLOCK)
        present = entry < visible
        keys = _ordered(tl.load(scores + row * row_stride + entry, mask=present, other=0.0))
        chosen, place = _choose(tl.where(present, keys, ABSENT_KEY), TOPK, GROUPS)
        tl.store(slots + place, _entry_slot(table, entry, chosen), mask=chosen)


@triton.jit(do_not_specialize=["first"])
def _select_in_chunks_kernel(
    scores,
    row_stride,
    columns,
    positions,
    workspace,
    first,
    TOPK: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    visible = visible_entries(tl.load(positions + first + row), columns)
    begin = chunk * CHUNK
    if (visible > TOPK) & (visible > begin):
        entry = begin + tl.arange(0, CHUNK)
        present = entry < visible
        keys = _ordered(tl.load(scores + row * row_stride + entry, mask=present, other=0.0))
        keys = tl.where(present, keys, ABSENT_KEY)
        chosen, place = _choose(keys, tl.minimum(visible - begin, TOPK), GROUPS)
        out = workspace + (row * tl.num_programs(1) + chunk) * TOPK
        tl.store(out + place, (keys.to(tl.int64) << 32) | entry, mask=chosen)


@triton.jit(do_not_specialize=["first"])
def _merge_chunks_kernel(
    workspace,
    chunks,
    columns,
    positions,
    owners,
    requests,
    table,
    table_stride,
    slots,
    lengths,
    first,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = first + row
    visible = visible_entries(tl.load(positions + token), columns)
    table += tl.load(requests + tl.load(owners + token)) * table_stride
    slots += row * TOPK
    tl.store(lengths + row, tl.minimum(visible, TOPK))
    if visible <= TOPK:
        _take_all(table, visible, slots, TOPK, PADDED)
    else:
        candidate = tl.arange(0, BLOCK)
        chunk, place = candidate // TOPK, candidate % TOPK
        present = place < visible - chunk * CHUNK
        found = tl.load(workspace + row * chunks * TOPK + candidate, mask=present, other=0)
        chosen, place = _choose(tl.where(present, (found >> 32).to(tl.int32), ABSENT_KEY), TOPK, GROUPS)
        tl.store(slots + place, _entry_slot(table, found & 0xFFFFFFFF, chosen), mask=chosen)


def new_workspace(rows: int, columns: int, topk: int, device: torch.device | str) -> Tensor:
    """int64 [rows, chunks, topk] for :func:`select_entries`; no chunks where a row is chosen from in one launch."""
    chunks = triton.cdiv(columns, CHUNK) if columns > CHUNK else 0
    return torch.empty(rows, chunks, topk, dtype=torch.int64, device=device)


def select_entries(
    scores: Tensor,
    batch: Batch,
    topk: int,
    slots: Tensor,
    lengths: Tensor,
    *,
    first: int = 0,
    workspace: Tensor | None = None,
) -> None:
    """Slots of the ``topk`` best visible ratio-4 entries of the queries whose scores are given.

    Args:
        scores: fp32 [rows, columns] from ``indexer.index_scores``, the last dimension contiguous; row i belongs to
            token ``first + i``. Columns that the token does not see are not read, nor is the row of one that sees no
            more than ``topk``. A query sees at most ``columns`` entries; further ones are left out.
        batch: where all tokens of the pass stand.
        topk: at most 2048, and ``topk`` times the chunks of a row (``columns`` / 16384, rounded up) at most 16384.
        slots: int32 [rows, topk], contiguous: slots of entries in the order of the entries, then -1.
        lengths: int32 [rows]: how many slots there are, ``min(visible, topk)``.
        first: the token of the first row.
        workspace: from :func:`new_workspace`; used beyond 16384 columns only, and there allocated if not given.

    One launch up to 16384 columns, else two; grids from shapes alone. Floor: 4 bytes per visible entry.
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
    chunks = triton.cdiv(columns, CHUNK)
    if chunks > 1:
        checks.require_range("topk times chunks of scores", topk * chunks, 1, CANDIDATES)
        if workspace is None:
            workspace = new_workspace(rows, columns, topk, scores.device)
        checks.require_dtype("workspace", workspace, torch.int64)
        checks.require_shape("workspace", workspace, (rows, chunks, topk), "[rows, chunks, topk]")
        checks.require_contiguous("workspace", workspace)
    checks.require_same_device(
        "scores", scores, slots=slots, lengths=lengths, workspace=workspace, positions=batch.positions
    )
    if not rows:
        return
    padded = triton.next_power_of_2(topk)
    place = (batch.positions, batch.owners, batch.requests, batch.slots, batch.slots.stride(0), slots, lengths, first)
    if chunks <= 1:
        block = max(128, triton.next_power_of_2(columns))
        _select_kernel[(rows,)](
            scores, scores.stride(0), columns, *place, topk, padded, block, GROUPS, num_warps=_warps(block)
        )
        return
    _select_in_chunks_kernel[(rows, chunks)](
        scores,
        scores.stride(0),
        columns,
        batch.positions,
        workspace,
        first,
        topk,
        CHUNK,
        GROUPS,
        num_warps=_warps(CHUNK),
    )
    block = triton.next_power_of_2(topk * chunks)
    _merge_chunks_kernel[(rows,)](
        workspace, chunks, columns, *place, topk, padded, CHUNK, block, GROUPS, num_warps=_warps(block)
    )


def _warps(block: int) -> int:
    """So many that a thread's elements of a block, four at a time, are one of each group of :data:`GROUPS`."""
    return max(1, min(block, GROUPS) // 128)
