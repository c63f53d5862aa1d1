"""Lightning indexer: how much each ratio-4 entry matters to a query (DEEPSEEK_V4.md §5).

Contract: ``nvfp4_sgl.ops.indexer``. A query at position p sees entries ``w < (p + 1) // 4`` of its request and scores

    I[t, w] = sum_h weights[t, h] · relu(q[t, h] · k[w])

Queries and keys meet as E4M3 with one fp32 scale for each (query, head) and each key. A query's scales are positive, so
they go into its weights; a key's multiplies the sum over the heads.

Precision of the scores: products of E4M3 are exact, 128 of them are added in fp32 by the tensor cores. Blackwell's keep
fp32; Hopper's align the 32 products of an instruction and what was added before to the largest among them and keep 13
bits below its leading one, so a dot is off by at most 132 · 2^-13 times the largest product or partial sum. Weighted
sums over heads are fp32, their order the tiling's: with the same one a score depends on its query and key alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from .batch import PAGE_TOKENS, Batch
from .index_entry import DIM, hadamard128, pack_index_row, page_bytes
from .rope import require_turns, rotate
from .rounding import INTERPRETED, UNFUSED, round_to_bf16

ROPE_DIM = 64
MAX_HEADS = 64
ENTRIES = tl.constexpr(PAGE_TOKENS // 4)
"""Of a page, and of a program's step."""
PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def visible_entries(position, columns):
    """int32, how many ratio-4 entries a query at ``position`` (int64) sees, of at most ``columns``."""
    return tl.minimum((position + 1) // 4, columns).to(tl.int32)


@triton.jit
def _query_kernel(
    q,
    q_token,
    q_head,
    weights,
    weights_token,
    turns,
    factor,
    codes,
    scaled,
    heads,
    HEADS: tl.constexpr,
    PACKED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = head < heads
    column = tl.arange(0, 128)
    at = q + token * q_token + head.to(tl.int64)[:, None] * q_head + column[None, :]
    values = round_to_bf16(tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32))
    even, odd = tl.split(tl.reshape(values, (HEADS, 64, 2)))
    # Rotated as a whole and the first half left out: its turns are those of the second, so no load needs a mask.
    pair = tl.arange(0, 64)
    at = turns + token * 64 + pair % 32 * 2
    cos, sin = tl.load(at)[None, :], tl.load(at + 1)[None, :]
    even_turned, odd_turned = rotate(even, odd, cos, sin)
    rotary = (pair >= 32)[None, :]
    even = tl.where(rotary, round_to_bf16(even_turned), even)
    odd = tl.where(rotary, round_to_bf16(odd_turned), odd)
    values = tl.reshape(tl.join(even, odd), (HEADS, 128))

    weight = tl.load(weights + token * weights_token + head, mask=inside, other=0.0).to(tl.float32) * factor
    out = codes + (token * heads + head)[:, None] * 128 + column[None, :]
    if PACKED:
        code, scale = pack_index_row(hadamard128(values))
        weight *= scale
        tl.store(out, code.to(tl.uint8), mask=inside[:, None])
    else:
        tl.store(out, values.to(tl.bfloat16), mask=inside[:, None])
    tl.store(scaled + token * heads + head, weight, mask=inside)


def index_query(q: Tensor, weights: Tensor, turns: Tensor, factor: float, codes: Tensor, scaled: Tensor) -> None:
    """Queries as they meet the cached keys, and the weights of their heads.

    Args:
        q: bf16 or fp32 [T, H, 128], the projection, the last dimension contiguous.
        weights: bf16 or fp32 [T, H], the projection, the last dimension contiguous.
        turns: fp32 [T, 64] from ``rope.rope_turns``.
        factor: ``128**-0.5 * H**-0.5``.
        codes: uint8 [T, H, 128], contiguous: E4M3, for keys in the form of ``index_entry``. Or bf16, for exact keys.
        scaled: fp32 [T, H], contiguous.

    Rounding: q to bf16; its last 64 rotated in fp32 and rounded to bf16; Hadamard in fp32 and the codes, bit-equal to
    ``index_entry``. ``scaled`` is fp32(fp32(weights · factor) · the query's scale). Exact queries are rotated
    only, and their weights only multiplied by ``factor``. Floor: q, weights, turns, codes and scaled once.
    """
    checks.require_dimensions("q", q, 3, "[T, H, 128]")
    tokens, heads = q.shape[:2]
    checks.require_shape("q", q, (tokens, heads, DIM), "[T, H, 128]")
    checks.require_dtype("q", q, torch.bfloat16, torch.float32)
    checks.require_rows("q", q)
    checks.require_shape("weights", weights, (tokens, heads), "[T, H]")
    checks.require_dtype("weights", weights, torch.bfloat16, torch.float32)
    checks.require_rows("weights", weights)
    checks.require_one_of("rope_dim of turns", require_turns("turns", turns, tokens, DIM), (ROPE_DIM,))
    checks.require_shape("codes", codes, (tokens, heads, DIM), "[T, H, 128]")
    checks.require_dtype("codes", codes, torch.uint8, torch.bfloat16)
    checks.require_contiguous("codes", codes)
    checks.require_shape("scaled", scaled, (tokens, heads), "[T, H]")
    checks.require_dtype("scaled", scaled, torch.float32)
    checks.require_contiguous("scaled", scaled)
    checks.require_same_device("q", q, weights=weights, turns=turns, codes=codes, scaled=scaled)
    if tokens and heads:
        per_program = min(8, triton.next_power_of_2(heads))
        _query_kernel[(tokens, triton.cdiv(heads, per_program))](
            q,
            q.stride(0),
            q.stride(1),
            weights,
            weights.stride(0),
            turns,
            factor,
            codes,
            scaled,
            heads,
            per_program,
            codes.dtype == torch.uint8,
            num_warps=max(1, per_program // 4),
            **UNFUSED,
        )


@dataclass(frozen=True)
class Tiling:
    """How a program scores.

    Attributes:
        queries: scored against each key that is read.
        warps, stages: of a program; stages of keys under way.
        registers: of a thread at most, None for no limit.
        programs: for each multiprocessor, if there are as many pages of keys.
    """

    queries: int
    warps: int
    stages: int
    registers: int | None
    programs: int


DECODE = Tiling(queries=1, warps=4, stages=4, registers=None, programs=8)
"""Each request's query alone: its keys are read at the memory's pace. More programs than run at once, since contexts
differ in length."""
PREFILL = Tiling(queries=2, warps=4, stages=3, registers=None, programs=8)
"""A product of 64 keys and 2 · 64 heads: of the programs that share a multiprocessor some multiply while others
reduce."""
HOPPER_PREFILL = Tiling(queries=4, warps=8, stages=3, registers=128, programs=8)
"""Twice the queries, so that keys are asked of the second-level cache half as often; two programs fit a
multiprocessor."""


def default_tiling(batch: Batch, device: torch.device) -> Tiling:
    if batch.is_decode:
        return DECODE
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9
    return HOPPER_PREFILL if hopper else PREFILL


@triton.jit
def _operand(x):
    """For a product. The interpreter multiplies fp32 matrices only."""
    if INTERPRETED:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def _halves(x, ROWS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """The lower and the upper half of the heads of [ROWS, QUERIES · HEADS] or [ROWS, QUERIES, HEADS]."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, QUERIES, 2, HEADS // 2)), (0, 1, 3, 2)))


@triton.jit
def _quarters(x, ROWS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    low, high = _halves(x, ROWS, QUERIES, HEADS)
    first, second = _halves(low, ROWS, QUERIES, HEADS // 2)
    third, fourth = _halves(high, ROWS, QUERIES, HEADS // 2)
    return first, second, third, fourth


@triton.jit(do_not_specialize=["rows", "first"])
def _scores_kernel(
    queries,
    scaled,
    keys,
    page_stride,
    key_scales,
    scale_stride,
    scores,
    row_stride,
    rows,
    columns,
    positions,
    owners,
    requests,
    table,
    table_stride,
    topk,
    first,
    heads,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * QUERIES
    split, splits = tl.program_id(1), tl.num_programs(1)
    row = begin + tl.arange(0, QUERIES)
    inside = row < rows
    position = tl.load(positions + first + row, mask=inside, other=-1)
    visible = visible_entries(position, columns)
    visible = tl.where(visible > topk, visible, 0)
    if tl.max(visible, axis=0) > 0:
        owner = tl.load(owners + first + tl.minimum(row, rows - 1))
        column = tl.arange(0, QUERIES * HEADS)
        head = column % HEADS
        known = (begin + column // HEADS < rows) & (head < heads)
        at = (begin + column // HEADS) * heads + head
        weight = tl.load(scaled + at, mask=known, other=0.0)
        w0, w1, w2, w3 = _quarters(weight, 1, QUERIES, HEADS)
        dim = tl.arange(0, 128)
        q = tl.load(queries + at[:, None] * 128 + dim[None, :], mask=known[:, None], other=0.0)
        q = tl.trans(_operand(q))
        within = tl.arange(0, ENTRIES)
        # Queries of a tile may be of several requests: each is scored with its own keys.
        for request in range(tl.min(owner, axis=0), tl.max(owner, axis=0) + 1):
            seen = tl.where(owner == request, visible, 0)
            pages = tl.cdiv(tl.max(seen, axis=0), ENTRIES)
            page_slots = table + tl.load(requests + request) * table_stride
            # The page of the next step is looked up during this one.
            following = tl.load(page_slots + split * PAGE, mask=split < pages, other=0)
            for page in tl.range(split, pages, splits, num_stages=STAGES):
                index = (following // PAGE).to(tl.int64)
                ahead = page + splits
                following = tl.load(page_slots + ahead * PAGE, mask=ahead < pages, other=0)
                key = tl.load(keys + index * page_stride + (within[:, None] * 128 + dim[None, :]))
                d0, d1, d2, d3 = _quarters(tl.dot(_operand(key), q), ENTRIES, QUERIES, HEADS)
                # Most of the sum as multiply-adds; a sum of products would be a tree of products and additions.
                part = tl.maximum(d0, 0.0) * w0
                part += tl.maximum(d1, 0.0) * w1
                part += tl.maximum(d2, 0.0) * w2
                part += tl.maximum(d3, 0.0) * w3
                score = tl.sum(part, axis=2)
                if PACKED:
                    score *= tl.load(key_scales + index * scale_stride + within)[:, None]
                entry = page * ENTRIES + within
                out = scores + row[None, :] * row_stride + entry[:, None]
                tl.store(out, score, mask=entry[:, None] < seen[None, :])


def index_scores(
    codes: Tensor,
    scaled: Tensor,
    pages: Tensor,
    page_size: int,
    batch: Batch,
    topk: int,
    scores: Tensor,
    *,
    first: int = 0,
    tiling: Tiling | None = None,
) -> None:
    """Scores of the entries that queries see.

    Args:
        codes: uint8 [rows, H, 128] of E4M3 from :func:`index_query`, contiguous, of tokens ``first`` to
            ``first + rows - 1``; or bf16, for exact keys. At most 64 heads.
        scaled: fp32 [rows, H], contiguous, from :func:`index_query`.
        pages: uint8 [pages, >= 64 · 132], the layer's keys in the form of ``index_entry``, this pass's included; or
            bf16 [pages, >= 64 · 128], exact keys. Pages begin at multiples of 16 bytes.
        page_size: 64, the entries of 256 tokens.
        batch: where all tokens of the pass stand. The entries of one page of tokens are one page of keys.
        topk: a query that sees no more entries is not scored: its row is left alone.
        scores: fp32 [rows, columns], the last dimension contiguous: written in the columns that the row's token sees
            and in no others. A query sees at most ``columns`` entries; further ones are left out.
        first: the token of the first row.
        tiling: None for the default.

    The grid depends on shapes alone: columns that no query sees cost nothing. Floor: 132 bytes per key that a request's
    queries see, 4 per score; 2 · 128 · H operations per score.
    """
    batch.check("index_scores")
    packed = pages.dtype != torch.bfloat16
    checks.require_dimensions("scores", scores, 2, "[rows, columns]")
    checks.require_dtype("scores", scores, torch.float32)
    checks.require_rows("scores", scores)
    rows, columns = scores.shape
    checks.require_range("first", first, 0, batch.tokens - rows)
    checks.require_dimensions("codes", codes, 3, "[rows, H, 128]")
    heads = codes.shape[1]
    checks.require_shape("codes", codes, (rows, heads, DIM), "[rows, H, 128]")
    checks.require_range("H of codes", heads, 1, MAX_HEADS)
    checks.require_dtype("pages", pages, torch.uint8, torch.bfloat16)
    checks.require_dtype("codes", codes, torch.uint8 if packed else torch.bfloat16)
    checks.require_contiguous("codes", codes)
    checks.require_aligned("codes", codes)
    checks.require_dtype("scaled", scaled, torch.float32)
    checks.require_shape("scaled", scaled, (rows, heads), "[rows, H]")
    checks.require_contiguous("scaled", scaled)
    checks.require_one_of("page_size", page_size, (PAGE_TOKENS // 4,))
    if packed:
        checks.require_pages("pages", pages, page_bytes(page_size), page_size)
    else:
        checks.require_pages("pages", pages.view(torch.uint8), page_size * 2 * DIM, page_size)
    checks.require_range("topk", topk, 0, 2**31 - 1)
    checks.require_same_device("codes", codes, scaled=scaled, pages=pages, scores=scores, positions=batch.positions)
    if not rows or not columns:
        return
    tiling = tiling or default_tiling(batch, codes.device)
    tiles = triton.cdiv(rows, tiling.queries)
    splits = choose_splits(tiles, triton.cdiv(columns, page_size), _processors(codes.device), tiling)
    keys, scales = pages, pages
    if packed:
        codes, keys = codes.view(torch.float8_e4m3fn), pages.view(torch.float8_e4m3fn)
        scales = pages[:, page_size * DIM : page_bytes(page_size)].view(torch.float32)
    _scores_kernel[(tiles, splits)](
        codes,
        scaled,
        keys,
        keys.stride(0),
        scales,
        scales.stride(0),
        scores,
        scores.stride(0),
        rows,
        columns,
        batch.positions,
        batch.owners,
        batch.requests,
        batch.slots,
        batch.slots.stride(0),
        topk,
        first,
        heads,
        max(16, triton.next_power_of_2(heads)),
        tiling.queries,
        packed,
        tiling.stages,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
    )


def choose_splits(tiles: int, pages: int, processors: int, tiling: Tiling) -> int:
    """Programs that share the keys of one tile of queries."""
    return max(1, min(pages, triton.cdiv(tiling.programs * processors, tiles)))


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
