"""Lightning indexer: score the ratio-4 entries that each query sees (specification §5).

Contract: ``nvfp4_sgl.ops.indexer``. A query at position p sees entries ``w < (p + 1) // 4`` of its request, with the
scores

    I[t, w] = sum_h weights[t, h] · relu(q[t, h] · k[w])

Queries and keys are E4M3 with one fp32 scale for each (query, head) and each key. A query's scales are positive, so
they are multiplied into its weights; a key's scale multiplies the sum over the heads.

Precision of the scores: products of E4M3 are exact, and the tensor cores add 128 of them. Blackwell's add in fp32.
Hopper's align the 32 products of an instruction and the previous sum to the largest among them and keep 13 bits below
its leading one, so a dot product is off by at most 132 · 2^-13 times the largest product or partial sum. Weighted sums
over heads are fp32, in an order that the tiling sets: with the same tiling a score depends on its query and key alone.

Supports heads of 128 values, up to ``MAX_INDEX_HEADS`` of them, and keys packed or bf16 in pages of 64. Floor: see
:func:`index_scores`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks
from nvfp4_sgl.limits import MAX_INDEX_HEADS

from ..common import chip
from ..common.integers import cdiv, cut, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import INTERPRETED, UNFUSED
from ..entries.index_entry import DIM, page_bytes
from ..plan.batch import PAGE_TOKENS, Batch
from .query import check_queries, prepare_heads, prepare_queries, run_length

ENTRIES_PER_PAGE = tl.constexpr(PAGE_TOKENS // 4)
"""Ratio-4 entries, that is keys, of a page."""
TOKENS_PER_PAGE = tl.constexpr(PAGE_TOKENS)
"""``PAGE_TOKENS`` for kernels."""


@triton.jit
def visible_entries(position, columns):
    """Return the number, int32, of ratio-4 entries that a query at ``position`` (int64) sees, at most ``columns``."""
    return tl.minimum((position + 1) // 4, columns).to(tl.int32)


@dataclass(frozen=True)
class Tiling:
    """Layout of a program that scores.

    Attributes:
        prepares: a program prepares its query from the projection; else a separate launch has prepared all queries.
            Only with one query: more would not fit the registers.
        queries: number of queries that a program scores against each key it reads.
        pages: pages of keys that a program reads at once, 1 or 2.
        warps: warps of a program.
        stages: stages of the pipeline of keys.
        registers: limit of registers of a thread, ``None`` for no limit.
        programs: programs per multiprocessor, if there are as many pages of keys; see :func:`choose_splits`.
    """

    prepares: bool
    queries: int
    pages: int
    warps: int
    stages: int
    registers: int | None
    programs: int


DECODE = Tiling(prepares=True, queries=1, pages=2, warps=8, stages=3, registers=None, programs=3)
"""Each request has one query, and its keys are read at memory bandwidth. There are only as many programs as a
multiprocessor holds, since each prepares the query again."""
ONE_PROGRAM_MAX_STEPS = 16
"""Steps of keys per multiprocessor up to which it has one program in decode: preparing a query takes as long as several
steps. 8 queries of 16,384 keys take 7.9 µs instead of 9.6 with three (``launch/results/tunings_h200.md``)."""
PREFILL = Tiling(prepares=False, queries=2, pages=1, warps=4, stages=3, registers=None, programs=8)
"""MMAs of 64 keys and 2 · 64 heads: of the programs that share a multiprocessor some multiply while others reduce."""
HOPPER_PREFILL = Tiling(prepares=False, queries=4, pages=1, warps=8, stages=3, registers=128, programs=8)
"""Twice the queries, so that keys are read from L2 half as often; a multiprocessor holds two programs."""


def default_tiling(batch: Batch) -> Tiling:
    """Return the tiling of a decode pass, or of a prefill on the architecture that Triton compiles for."""
    if batch.is_decode:
        return DECODE
    return HOPPER_PREFILL if chip.is_before_blackwell() else PREFILL


@triton.jit
def _dot_operand(x):
    """Convert ``x`` to an MMA operand: fp32 in the interpreter, which multiplies fp32 matrices only."""
    if INTERPRETED:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def _halves(x, ROWS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """Split [ROWS, QUERIES · HEADS] or [ROWS, QUERIES, HEADS] into the lower and the upper half of the heads."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, QUERIES, 2, HEADS // 2)), (0, 1, 3, 2)))


@triton.jit
def _quarters(x, ROWS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    low, high = _halves(x, ROWS, QUERIES, HEADS)
    first, second = _halves(low, ROWS, QUERIES, HEADS // 2)
    third, fourth = _halves(high, ROWS, QUERIES, HEADS // 2)
    return first, second, third, fourth


@triton.jit
def _look_up_pages(page_slots, step, pages, PAGES: tl.constexpr):
    """Look up the first full slots, int32, of the one or two pages of a step; 0 beyond the request's ``pages``."""
    page = step * PAGES
    one = tl.load(page_slots + page, mask=page < pages, other=0)
    if PAGES == 1:
        return one, one
    else:
        return one, tl.load(page_slots + page + 1, mask=page + 1 < pages, other=0)


@triton.jit
def _entry_pointers(base, page_stride, within, first_slot, second_slot, PAGES: tl.constexpr):
    """Compute pointers [PAGES · 64, n] into the pages that begin with full slots ``first_slot`` and ``second_slot``.

    within: int32 [PAGES · 64, n], offsets from the start of an entry's page.
    """
    if PAGES == 1:
        return base + (first_slot // TOKENS_PER_PAGE).to(tl.int64) * page_stride + within
    else:
        in_first = tl.arange(0, 2 * ENTRIES_PER_PAGE) < ENTRIES_PER_PAGE
        page = tl.where(in_first, first_slot // TOKENS_PER_PAGE, second_slot // TOKENS_PER_PAGE).to(tl.int64)
        return base + (page * page_stride)[:, None] + within


@triton.jit
def _score_pages(
    first_slot,
    second_slot,
    page_slots,
    pages,
    query,
    weight,
    keys,
    page_stride,
    key_scales,
    scale_stride,
    out,
    seen,
    QUERIES: tl.constexpr,
    PAGES: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Score a program's share of a request's keys: every ``num_programs(1)``-th step of PAGES pages.

    Args:
        first_slot, second_slot: from :func:`_look_up_pages`, for the program's first step.
        page_slots: the request's row of its pages' first full slots.
        pages: number of pages that the request's queries see.
        query: [128, QUERIES · HEADS], an MMA operand.
        weight: fp32 [QUERIES · HEADS].
        out: pointers [QUERIES] to the rows of scores.
        seen: int32 [QUERIES], the number of entries that each query sees.
    """
    STEP: tl.constexpr = PAGES * ENTRIES_PER_PAGE
    split, splits = tl.program_id(1), tl.num_programs(1)
    w0, w1, w2, w3 = _quarters(weight, 1, QUERIES, HEADS)
    dim, within = tl.arange(0, 128), tl.arange(0, STEP)
    in_page = (within if PAGES == 1 else within % ENTRIES_PER_PAGE)[:, None]
    for step in tl.range(split, tl.cdiv(pages, PAGES), splits, num_stages=STAGES):
        at = _entry_pointers(keys, page_stride, in_page * 128 + dim[None, :], first_slot, second_slot, PAGES)
        scale_at = _entry_pointers(key_scales, scale_stride, in_page, first_slot, second_slot, PAGES)
        # Look up the pages of the next step during this one, and use them for nothing before: otherwise the compiler
        # would make each key's load wait for that of its page.
        first_slot, second_slot = _look_up_pages(page_slots, step + splits, pages, PAGES)
        key = tl.load(at)
        d0, d1, d2, d3 = _quarters(tl.dot(_dot_operand(key), query), STEP, QUERIES, HEADS)
        # Write most of the sum as multiply-adds: a sum of products would become a tree of products and additions.
        part = tl.maximum(d0, 0.0) * w0
        part = tl.fma(tl.maximum(d1, 0.0), w1, part)
        part = tl.fma(tl.maximum(d2, 0.0), w2, part)
        part = tl.fma(tl.maximum(d3, 0.0), w3, part)
        score = tl.sum(part, axis=2)
        if PACKED:
            score *= tl.load(scale_at)
        entry = (within + step * STEP)[:, None]
        tl.store(out[None, :] + entry, score, mask=entry < seen[None, :])


@triton.jit(do_not_specialize=["each", "block", "first"])
def _scores_kernel(
    q,
    q_token,
    q_head,
    weights,
    weights_token,
    cos_sin,
    factor,
    keys,
    page_stride,
    key_scales,
    scale_stride,
    scores,
    row_stride,
    each,
    block,
    columns,
    positions,
    owners,
    table,
    table_stride,
    topk,
    first,
    heads,
    HEADS: tl.constexpr,
    PREPARES: tl.constexpr,
    QUERIES: tl.constexpr,
    PAGES: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
    RUN: tl.constexpr,
):
    """Score a share of the keys for up to QUERIES rows.

    Grid: (blocks, splits, requests). Rows come in ``requests`` times ``each``, cut into blocks of ``block``.
    """
    after_previous()
    request_rows = tl.program_id(2).to(tl.int64) * each
    begin = request_rows + tl.program_id(0) * block
    rows = tl.minimum(begin + block, request_rows + each)
    split = tl.program_id(1)
    row = begin + tl.arange(0, QUERIES)
    position = tl.load(positions + first + row, mask=row < rows, other=-1)
    owner = tl.load(owners + first + tl.minimum(row, rows - 1))  # beside the positions, whether it is used or not
    visible = visible_entries(position, columns)
    visible = tl.where(visible > topk, visible, 0)
    key_arguments = (keys, page_stride, key_scales, scale_stride, scores + row * row_stride)
    if tl.max(visible, axis=0) > split * PAGES * ENTRIES_PER_PAGE:
        if PREPARES:
            pages = tl.cdiv(tl.max(visible, axis=0), ENTRIES_PER_PAGE)
            page_slots = table + tl.max(owner, axis=0) * table_stride
            first_slot, second_slot = _look_up_pages(page_slots, split, pages, PAGES)
            token_arguments = (q + begin * q_token, q_head, weights + begin * weights_token, cos_sin + begin * 64)
            query, weight = prepare_heads(*token_arguments, factor, tl.arange(0, HEADS), heads, PACKED, RUN)
            query = tl.trans(_dot_operand(query))
            request_arguments = (first_slot, second_slot, page_slots, pages)
            _score_pages(
                *request_arguments, query, weight, *key_arguments, visible, QUERIES, PAGES, PACKED, STAGES, HEADS
            )
        else:
            column = tl.arange(0, QUERIES * HEADS)
            token, head = begin + column // HEADS, column % HEADS
            head_mask = (token < rows) & (head < heads)
            weight = tl.load(weights + token * weights_token + head, mask=head_mask, other=0.0)
            at = q + (token * q_token + head * q_head)[:, None] + tl.arange(0, 128)[None, :]
            query = tl.trans(_dot_operand(tl.load(at, mask=head_mask[:, None], other=0.0)))
            # Queries of a tile may belong to several requests of a prompt: score each with its own request's keys.
            for request in range(tl.min(owner, axis=0), tl.max(owner, axis=0) + 1):
                seen = tl.where(owner == request, visible, 0)
                pages = tl.cdiv(tl.max(seen, axis=0), ENTRIES_PER_PAGE)
                page_slots = table + request * table_stride
                first_slot, second_slot = _look_up_pages(page_slots, split, pages, PAGES)
                request_arguments = (first_slot, second_slot, page_slots, pages)
                _score_pages(
                    *request_arguments, query, weight, *key_arguments, seen, QUERIES, PAGES, PACKED, STAGES, HEADS
                )


def index_scores(
    q: Tensor,
    weights: Tensor,
    cos_sin: Tensor,
    factor: float,
    pages: Tensor,
    page_size: int,
    batch: Batch,
    topk: int,
    scores: Tensor,
    *,
    first: int = 0,
    tiling: Tiling | None = None,
) -> None:
    """Score the ratio-4 entries that queries see (specification §5).

    Args:
        q: bf16 or fp32 [rows, H, 128], the projection of tokens ``first`` to ``first + rows - 1``, the last dimension
            contiguous; 1 to ``MAX_INDEX_HEADS`` heads.
        weights: bf16 or fp32 [rows, H], the projection, the last dimension contiguous.
        cos_sin: fp32 [rows, 64], contiguous, from ``common.rope.rope_cos_sin``.
        factor: of the weights, ``128**-0.5 * H**-0.5``.
        pages: uint8 [pages, >= 64 · 132], the layer's keys in the format of ``entries.index_entry``, this pass's
            included; or bf16 [pages, >= 64 · 128], exact keys. Pages begin at multiples of 16 bytes.
        page_size: 64, the entries of 256 tokens.
        batch: where all tokens of the pass stand. The entries of one page of tokens are one page of keys.
        topk: a query that sees no more than ``topk`` entries is not scored: its row is left alone.
        scores: fp32 [rows, columns], the last dimension contiguous: written in the columns that the row's token sees
            and in no others. Entries beyond ``columns`` are left out.
        first: the token of the first row.
        tiling: by default :func:`default_tiling`'s.

    Rounding: queries and weights are those of :func:`.query.prepare_queries` bit for bit. The rest is in the module's
    docstring.

    One launch in decode; otherwise a second launch first prepares the queries, into buffers allocated here. The grid
    depends on shapes alone, and columns that no query sees cost nothing. Floor: 132 bytes per key that a request's
    queries see, 4 per score, q, weights and cos_sin once; 2 · 128 · H operations per score.

    Raises:
        OperandTypeError: a dtype is not one of the above.
        OperandValueError: a shape, stride, alignment, page size or device is not as above, or ``first`` or ``topk`` is
            out of range.
    """
    _check(q, weights, cos_sin, pages, page_size, batch, topk, scores, first)
    packed, heads, (rows, columns) = pages.dtype != torch.bfloat16, q.shape[1], scores.shape
    if not rows or not columns:
        return
    tiling = tiling or default_tiling(batch)
    if not tiling.prepares:
        queries = q.new_empty(q.shape, dtype=torch.float8_e4m3fn if packed else torch.bfloat16)
        scaled = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
        prepare_queries(q, weights, cos_sin, factor, queries, scaled)
        q, weights = queries, scaled
    each, block = rows, tiling.queries
    of_request = batch.tokens_each or 1
    if of_request > 1 and first % of_request == rows % of_request == 0:
        # Cut inside requests: a tile that straddles two would read the keys of both, one after the other.
        each, block = of_request, cut(of_request, tiling.queries)[1]
    blocks, requests = cdiv(each, block), rows // each
    steps = cdiv(columns, page_size * tiling.pages)
    keys, scales = pages, pages
    if packed:
        keys = pages.view(torch.float8_e4m3fn)
        scales = pages[:, page_size * DIM : page_bytes(page_size)].view(torch.float32)
    padded = max(16, next_power_of_2(heads))
    splits = choose_splits(blocks * requests, steps, chip.processors(q.device), tiling)
    _scores_kernel[(blocks, splits, requests)](
        q,
        q.stride(0),
        q.stride(1),
        weights,
        weights.stride(0),
        cos_sin,
        factor,
        keys,
        keys.stride(0),
        scales,
        scales.stride(0),
        scores,
        scores.stride(0),
        each,
        block,
        columns,
        batch.positions,
        batch.owners,
        batch.pages,
        batch.pages.stride(0),
        topk,
        first,
        heads,
        padded,
        tiling.prepares,
        tiling.queries,
        tiling.pages,
        packed,
        tiling.stages,
        run_length(padded, tiling.warps),
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
        **UNFUSED,
        **OVERLAPPED,
    )


@checks.once
def _check(
    q: Tensor,
    weights: Tensor,
    cos_sin: Tensor,
    pages: Tensor,
    page_size: int,
    batch: Batch,
    topk: int,
    scores: Tensor,
    first: int,
) -> None:
    """Refuse what :func:`index_scores` cannot read or write; metadata only."""
    batch.check("index_scores")
    checks.require_dimensions("scores", scores, 2, "[rows, columns]")
    checks.require_dtype("scores", scores, torch.float32)
    checks.require_rows("scores", scores)
    rows = scores.shape[0]
    checks.require_range("first", first, 0, batch.tokens - rows)
    check_queries(q, weights, cos_sin)
    checks.require_shape("q", q, (rows, q.shape[1], DIM), "[rows, H, 128]")
    checks.require_range("H of q", q.shape[1], 1, MAX_INDEX_HEADS)
    checks.require_dtype("pages", pages, torch.uint8, torch.bfloat16)
    checks.require_one_of("page_size", page_size, (PAGE_TOKENS // 4,))
    if pages.dtype != torch.bfloat16:
        checks.require_pages("pages", pages, page_bytes(page_size), page_size)
    else:
        checks.require_pages("pages", pages.view(torch.uint8), page_size * 2 * DIM, page_size)
    checks.require_range("topk", topk, 0, 2**31 - 1)
    checks.require_same_device("q", q, pages=pages, scores=scores, positions=batch.positions)


def choose_splits(tiles: int, steps: int, processors: int, tiling: Tiling) -> int:
    """Return the number of programs that share the ``steps`` steps of keys of one of ``tiles`` tiles of queries.

    Tilings that prepare queries get as many programs as run at once, in one turn or, where that fills the chip better,
    in two.
    """
    if not tiling.prepares:
        return max(1, min(steps, cdiv(tiling.programs * processors, tiles)))
    if tiles * steps <= ONE_PROGRAM_MAX_STEPS * processors:
        return max(1, min(steps, processors // tiles))
    places = tiling.programs * processors
    one, two = max(1, places // tiles), max(1, 2 * places // tiles)
    return min(steps, two if _filled(tiles * two, places) > 1.05 * _filled(tiles * one, places) else one)


def _filled(programs: int, places: int) -> float:
    """Share of the places that programs take, on average over their turns."""
    return programs / (cdiv(programs, places) * places)
