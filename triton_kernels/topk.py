"""The best entries of each query, without sorting: a threshold and one pass of prefix sums (DEEPSEEK_V4.md §5).

A query at position p sees ratio-4 entries ``w < (p + 1) // 4``; of more than topk it attends to those of the largest
scores. A program holds up to :data:`CHUNK` scores of one query in registers as integers of the same order, finds the
topk-th largest by counting those that reach a bound, and stores what is chosen at the place that a prefix sum gives it,
so in the order of the entries. Longer rows take a second launch: each chunk first nominates its own best, which hold
all of the row's best, and the same choice is made among them. Equal scores go to the lower entry in either case, and
nothing else is left to chance: the result depends on the scores alone.

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
SMALL = 4096
"""Scores that cost less: of short contexts where many columns were captured."""
CANDIDATES = 16384
"""What the chunks of a row may yield together."""

REGISTERS = 64
"""Of a thread, so that a multiprocessor holds two programs of 512 threads: one loads while the other counts."""

NAN_KEY = tl.constexpr(-0x7F800001)
AIMED_STEPS = tl.constexpr(16)
ABSENT_KEY = tl.constexpr(-0x7F800002)


@triton.jit
def _ordered(scores):
    """int32 keys of the same order as the fp32 scores."""
    bits = scores.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude > 0x7F800000, NAN_KEY, tl.where(bits < 0, -magnitude, magnitude))


@triton.jit
def _bound(keys, k, low, high):
    """A bound that at least ``k`` keys reach: exactly ``k``, or else it is the k-th largest key.

    low: a bound that at least k keys reach; high: one that none does. int32.
    """
    count = tl.sum((keys >= low).to(tl.int32))
    fewer = 0  # that reach high
    steps = 0
    while (count != k) & (low + 1 < high):
        # First where the k-th key would be if they lay evenly, which takes half the steps of halving; but that ends.
        share = tl.where(steps < AIMED_STEPS, (count - k).to(tl.float32) / (count - fewer).to(tl.float32), 0.5)
        gap = high.to(tl.int64) - low
        step = tl.minimum(tl.maximum((gap.to(tl.float32) * share).to(tl.int64), 1), gap - 1)
        middle = (low + step).to(tl.int32)
        reached = tl.sum((keys >= middle).to(tl.int32))
        enough = reached >= k
        low = tl.where(enough, middle, low)
        count = tl.where(enough, reached, count)
        high = tl.where(enough, high, middle)
        fewer = tl.where(enough, fewer, reached)
        steps += 1
    return low


@triton.jit
def _cut(keys, k, GROUPS: tl.constexpr):
    """Where the k largest of keys [n] end: (threshold, how many equal to it are among them, counts).

    counts, [n]: how many of the keys so far are above the threshold, in the upper half, and equal to it, in the lower.
    At least k keys are not ABSENT_KEY; equal ones count from the first. k <= GROUPS.
    """
    low = NAN_KEY
    high = tl.max(keys, axis=0) + 1
    if keys.shape[0] > GROUPS:
        # Of k groups whose maximum reaches a bound, k keys do. Groups are strided: neighbours often score alike.
        maxima = tl.max(tl.reshape(keys, (keys.shape[0] // GROUPS, GROUPS)), axis=0)
        low = _bound(maxima, k, low, high)
    threshold = _bound(keys, k, low, high)
    above = (keys > threshold).to(tl.int32)
    counts = tl.cumsum((above << 16) + (keys == threshold).to(tl.int32), axis=0)
    return threshold, k - tl.sum(above), counts


@triton.jit
def _placed(keys, counts, threshold, equals_taken):
    """(chosen, place) of each key by :func:`_cut`: the chosen at places 0 to k − 1 in order of index."""
    equals = counts & 0xFFFF
    chosen = (keys > threshold) | ((keys == threshold) & (equals <= equals_taken))
    return chosen, (counts >> 16) + tl.minimum(equals, equals_taken) - 1


@triton.jit
def _piece(x, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Elements PIECE · n/PIECES and following, n/PIECES of them, of x [n]; 1 or 4 pieces."""
    if PIECES == 1:
        return x
    else:
        low, high = tl.split(tl.trans(tl.reshape(x, (2, x.shape[0] // 2))))
        half = high if PIECE >= 2 else low
        low, high = tl.split(tl.trans(tl.reshape(half, (2, x.shape[0] // 4))))
        return high if PIECE % 2 == 1 else low


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
def _keys(scores, count, BLOCK: tl.constexpr):
    """Of ``count`` scores, then ABSENT_KEY: [BLOCK]."""
    index = tl.arange(0, BLOCK)
    present = index < count
    return tl.where(present, _ordered(tl.load(scores + index, mask=present, other=0.0)), ABSENT_KEY)


@triton.jit
def _select(scores, visible, table, slots, TOPK: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Slots of the best of TOPK to BLOCK scores."""
    # In pieces: what is stored at once is in registers at once.
    PIECES: tl.constexpr = 4 if BLOCK > 2 * GROUPS else 1
    keys = _keys(scores, visible, BLOCK)
    threshold, equals_taken, counts = _cut(keys, TOPK, GROUPS)
    for piece in tl.static_range(PIECES):
        entry = piece * (BLOCK // PIECES) + tl.arange(0, BLOCK // PIECES)
        chosen, place = _placed(_piece(keys, piece, PIECES), _piece(counts, piece, PIECES), threshold, equals_taken)
        tl.store(slots + place, _entry_slot(table, entry, chosen), mask=chosen)


@triton.jit
def _nominate(scores, begin, visible, candidates, TOPK: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr):
    """Keys and entries of the best of the chunk of scores at ``begin``, all of it if it has no more than TOPK."""
    PIECES: tl.constexpr = 4 if CHUNK > 2 * GROUPS else 1
    count = visible - begin
    keys = _keys(scores + begin, count, CHUNK)
    threshold, equals_taken, counts = _cut(keys, tl.minimum(count, TOPK), GROUPS)
    for piece in tl.static_range(PIECES):
        entry = begin + piece * (CHUNK // PIECES) + tl.arange(0, CHUNK // PIECES)
        key = _piece(keys, piece, PIECES)
        chosen, place = _placed(key, _piece(counts, piece, PIECES), threshold, equals_taken)
        tl.store(candidates + place, key, mask=chosen)
        tl.store(candidates + TOPK + place, entry, mask=chosen)


@triton.jit
def _elect(
    candidates,
    visible,
    table,
    slots,
    TOPK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Slots of the best of at most BLOCK candidates."""
    PIECES: tl.constexpr = 4 if BLOCK > 2 * GROUPS else 1
    index = tl.arange(0, BLOCK)
    present = index % TOPK < visible - index // TOPK * CHUNK
    keys = tl.load(candidates + index + index // TOPK * TOPK, mask=present, other=ABSENT_KEY)
    threshold, equals_taken, counts = _cut(keys, TOPK, GROUPS)
    for piece in tl.static_range(PIECES):
        chosen, place = _placed(_piece(keys, piece, PIECES), _piece(counts, piece, PIECES), threshold, equals_taken)
        index = piece * (BLOCK // PIECES) + tl.arange(0, BLOCK // PIECES)
        entry = tl.load(candidates + TOPK + index + index // TOPK * TOPK, mask=chosen, other=0)
        tl.store(slots + place, _entry_slot(table, entry, chosen), mask=chosen)


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
    workspace,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    SMALL: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = first + row
    visible = visible_entries(tl.load(positions + token), columns)
    scores += row * row_stride
    if chunk == 0:
        tl.store(lengths + row, tl.minimum(visible, TOPK))
        table += tl.load(requests + tl.load(owners + token)) * table_stride
        slots += row * TOPK
        if visible <= TOPK:
            _take_all(table, visible, slots, TOPK, PADDED)
        elif visible <= SMALL:
            _select(scores, visible, table, slots, TOPK, SMALL, GROUPS)
        elif visible <= BLOCK:
            _select(scores, visible, table, slots, TOPK, BLOCK, GROUPS)
    if CHUNKED:
        begin = chunk * BLOCK
        if (visible > BLOCK) & (visible > begin):
            candidates = workspace + (row * tl.num_programs(1) + chunk) * (2 * TOPK)
            _nominate(scores, begin, visible, candidates, TOPK, BLOCK, GROUPS)


@triton.jit(do_not_specialize=["first"])
def _elect_kernel(
    columns,
    positions,
    owners,
    requests,
    table,
    table_stride,
    slots,
    first,
    workspace,
    chunks,
    TOPK: tl.constexpr,
    SMALL: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = first + row
    visible = visible_entries(tl.load(positions + token), columns)
    if visible > CHUNK:
        candidates = workspace + row * chunks * (2 * TOPK)
        table += tl.load(requests + tl.load(owners + token)) * table_stride
        slots += row * TOPK
        if tl.cdiv(visible, CHUNK) * TOPK <= SMALL:
            _elect(candidates, visible, table, slots, TOPK, CHUNK, SMALL, GROUPS)
        elif BLOCK > SMALL:
            _elect(candidates, visible, table, slots, TOPK, CHUNK, BLOCK, GROUPS)


def new_workspace(rows: int, columns: int, topk: int, device: torch.device | str) -> Tensor:
    """int32 [rows, chunks, 2, topk] for :func:`select_entries`; no chunks where a row is chosen from in one launch."""
    chunks = triton.cdiv(columns, CHUNK) if columns > CHUNK else 0
    return torch.empty(rows, chunks, 2, topk, dtype=torch.int32, device=device)


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
        checks.require_dtype("workspace", workspace, torch.int32)
        checks.require_shape("workspace", workspace, (rows, chunks, 2, topk), "[rows, chunks, 2, topk]")
        checks.require_contiguous("workspace", workspace)
    checks.require_same_device(
        "scores", scores, slots=slots, lengths=lengths, workspace=workspace, positions=batch.positions
    )
    if not rows:
        return
    where = (columns, batch.positions, batch.owners, batch.requests, batch.slots, batch.slots.stride(0), slots)
    block = min(max(128, triton.next_power_of_2(columns)), CHUNK)
    _select_kernel[(rows, max(chunks, 1))](
        scores,
        scores.stride(0),
        *where,
        lengths,
        first,
        lengths if workspace is None else workspace,
        topk,
        triton.next_power_of_2(topk),
        min(SMALL, block),
        block,
        GROUPS,
        chunks > 1,
        num_warps=_warps(block),
        maxnreg=REGISTERS,
    )
    if chunks > 1:
        block = max(128, triton.next_power_of_2(topk * chunks))
        _elect_kernel[(rows,)](
            *where,
            first,
            workspace,
            chunks,
            topk,
            min(SMALL, block),
            CHUNK,
            block,
            GROUPS,
            num_warps=_warps(block),
            maxnreg=REGISTERS,
        )


def _warps(block: int) -> int:
    """So many that a thread's elements of a block, four at a time, are one of each group of :data:`GROUPS`."""
    return max(1, min(block, GROUPS) // 128)
