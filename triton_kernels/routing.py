"""Which experts a token visits, in which rows its copies stand, and the sum of what comes back (spec section 6).

A *pair* is a token and one of its experts; pairs are numbered token by token. The products of experts take rows
grouped by expert, each group beginning at a multiple of their token tile. Where a pair's row is depends on the data,
how many rows there are does not (:func:`padded_rows`), so that nothing waits for the device. No atomics: equal input
gives equal rows, and within an expert rows are in the order of tokens.

The shared expert may be one more group that every token visits with weight 1: ``shared_expert=True`` when routing.

Floors: routing reads the logits; the permutation moves 12 bytes a pair and 4 a padded row, and takes as long as its
one (few pairs) or three launches; ``finalize`` reads a row a pair and writes one a token. On an H200 (2026-11-21, 256
experts and a shared one) the permutation of 1, 8, 256 and 8192 tokens takes 4.0, 4.0, 6.8 and 15.9 us.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import (
    OperandValueError,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_range,
    require_rows,
    require_same_device,
    require_shape,
)
from .rounding import round_for

MAX_EXPERTS = 512
FEW_PAIRS = 64
"""Up to here one program permutes: one launch in place of three. Measured on an H200, 2026-11-21: 56 pairs of 256
experts take 4.0 us so; 448 pairs 25.2 us, and 9.2 us by three launches (of 256 pairs a program)."""
BLOCK_PAIRS = 128
"""Pairs of one program where there are more: of 64, 128, 256 and 512 the best at 256 and 8192 tokens together."""
CHUNK = tl.constexpr(32)
"""Pairs that a block of pairs is compared with at a time."""
BLOCK_EXPERTS = 32
"""Experts of one program of the scan: a line of memory of each block of pairs."""


@triton.jit
def _score(logit):
    """``sqrt(softplus(logit))``; log1p as 2 atanh(e / (2 + e)), whose series is within 2e-8 for e in (0, 1]."""
    e = tl.exp(-tl.abs(logit))
    s = e / (2.0 + e)
    t = s * s
    series = 1.0 / 11 + t * (1.0 / 13)
    series = 1.0 / 7 + t * (1.0 / 9 + t * series)
    series = 1.0 + t * (1.0 / 3 + t * (1.0 / 5 + t * series))
    return tl.sqrt(tl.maximum(logit, 0.0) + 2.0 * s * series)


@triton.jit
def _store_route(
    experts, weights, chosen, scores, token, here, scaling, count,
    TOPK: tl.constexpr, SHARED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store what was chosen, [BLOCK_T, BLOCK_K] each with zero scores beyond TOPK, normalised to sum to ``scaling``."""
    place = tl.arange(0, BLOCK_K)[None, :]
    weight = scores / (tl.sum(scores, axis=1) + 1e-20)[:, None] * scaling
    if SHARED:
        chosen = tl.where(place == TOPK, count, chosen)
        weight = tl.where(place == TOPK, 1.0, weight)
    at = token[:, None] * (TOPK + SHARED) + place
    mask = here[:, None] & (place < TOPK + SHARED)
    tl.store(experts + at, chosen, mask=mask)
    tl.store(weights + at, weight, mask=mask)


@triton.jit
def _route_topk(
    logits, bias, experts, weights, tokens, row, scaling, count,
    TOPK: tl.constexpr, SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    here = token < tokens
    expert = tl.arange(0, BLOCK_E)
    known = expert < count
    mask = here[:, None] & known[None, :]
    scores = _score(tl.load(logits + token[:, None] * row + expert[None, :], mask=mask, other=0.0).to(tl.float32))
    # One number orders by biased score, then by lowest expert: the bits of a float, negative ones turned round,
    # compare like integers.
    bits = (scores + tl.load(bias + expert, mask=known, other=0.0)[None, :]).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    key = (ordered << 32) | (BLOCK_E - 1 - expert)[None, :].to(tl.int64)
    taken = tl.full((BLOCK_T, BLOCK_E), -0x7FFFFFFFFFFFFFFF, tl.int64)
    key = tl.where(known[None, :], key, taken)
    place = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    chosen_scores = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for k in tl.static_range(TOPK):
        best = tl.max(key, axis=1)[:, None]
        is_best = key == best
        chosen = tl.where(place == k, (BLOCK_E - 1 - (best & 0xFFFFFFFF)).to(tl.int32), chosen)
        score = tl.sum(tl.where(is_best, scores, 0.0), axis=1)
        chosen_scores = tl.where(place == k, score[:, None], chosen_scores)
        key = tl.where(is_best, taken, key)
    _store_route(experts, weights, chosen, chosen_scores, token, here, scaling, count, TOPK, SHARED, BLOCK_K)


@triton.jit
def _route_hash(
    logits, table, token_ids, experts, weights, tokens, row, scaling, count, vocabulary,
    TOPK: tl.constexpr, SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    here = token < tokens
    place = tl.arange(0, BLOCK_K)[None, :]
    token_id = tl.load(token_ids + token, mask=here, other=0).to(tl.int64)
    known = (here & (token_id >= 0) & (token_id < vocabulary))[:, None] & (place < TOPK)
    chosen = tl.load(table + token_id[:, None] * TOPK + place, mask=known, other=-1).to(tl.int32)
    known = known & (chosen >= 0) & (chosen < count)
    logit = tl.load(logits + token[:, None] * row + chosen, mask=known, other=0.0).to(tl.float32)
    scores = tl.where(known, _score(logit), 0.0)
    chosen = tl.where(known, chosen, -1)
    _store_route(experts, weights, chosen, scores, token, here, scaling, count, TOPK, SHARED, BLOCK_K)


@triton.jit
def _experts_of(experts, first, pairs, count, LENGTH: tl.constexpr):
    """Of pairs from ``first`` on, [LENGTH] each: the expert, 0 if there is none, and whether there is one."""
    pair = first + tl.arange(0, LENGTH)
    expert = tl.load(experts + pair, mask=pair < pairs, other=-1)
    routed = (expert >= 0) & (expert < count)
    return tl.where(routed, expert, 0), routed


@triton.jit
def _rank(expert, experts, first, pairs, LENGTH: tl.constexpr):
    """How many pairs before each one of a block have its expert, [LENGTH]."""
    pair = tl.arange(0, LENGTH)
    rank = tl.zeros((LENGTH,), tl.int32)
    for start in range(0, LENGTH, CHUNK):
        other_pair = start + tl.arange(0, CHUNK)
        other = tl.load(experts + first + other_pair, mask=first + other_pair < pairs, other=-1)
        same = (expert[:, None] == other[None, :]) & (other_pair[None, :] < pair[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    return rank


@triton.jit
def _store_pairs(source_row, destination, pair, row, routed, pairs, TOPK: tl.constexpr):
    tl.store(destination + pair, tl.where(routed, row, -1), mask=pair < pairs)
    tl.store(source_row + row, pair // TOPK, mask=routed)


@triton.jit
def _offsets(counts, tile):
    """Where each expert's rows begin."""
    padded = (counts + (tile - 1)) // tile * tile
    return tl.cumsum(padded, axis=0) - padded


@triton.jit
def _fill_padding(source_row, first, last, BLOCK_R: tl.constexpr):
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        tl.store(source_row + row, tl.full((BLOCK_R,), -1, tl.int32), mask=row < last)


@triton.jit
def _permute_few(
    experts, source_row, destination, offsets, counts, pairs, rows, tile, count,
    TOPK: tl.constexpr, LENGTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    _fill_padding(source_row, 0, rows, BLOCK_R)
    chosen, routed = _experts_of(experts, 0, pairs, count, LENGTH)
    rank = _rank(chosen, experts, 0, pairs, LENGTH)
    expert = tl.arange(0, BLOCK_E)
    visits = tl.histogram(chosen, BLOCK_E, mask=routed)
    begin = _offsets(visits, tile)
    tl.store(counts + expert, visits, mask=expert < count)
    tl.store(offsets + expert, begin, mask=expert < count)
    # The padding must be there before rows are put over it.
    tl.debug_barrier()
    row = tl.gather(begin, chosen, axis=0) + rank
    _store_pairs(source_row, destination, tl.arange(0, LENGTH), row, routed, pairs, TOPK)


@triton.jit
def _count(experts, source_row, starts, pairs, rows, rows_each, count, LENGTH: tl.constexpr, BLOCK_E: tl.constexpr,
           BLOCK_R: tl.constexpr):  # fmt: skip
    """Each expert's pairs in a block of them; and padding everywhere."""
    block = tl.program_id(0)
    chosen, routed = _experts_of(experts, block * LENGTH, pairs, count, LENGTH)
    tl.store(starts + block * BLOCK_E + tl.arange(0, BLOCK_E), tl.histogram(chosen, BLOCK_E, mask=routed))
    _fill_padding(source_row, block * rows_each, min((block + 1) * rows_each, rows), BLOCK_R)


@triton.jit
def _scan(starts, counts, blocks, count, BLOCK_E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Counts of blocks to where among their expert's pairs they start; some experts a program."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, blocks, BLOCK_B):
        block = first + tl.arange(0, BLOCK_B)
        at = starts + block[:, None] * BLOCK_E + expert[None, :]
        mask = (block < blocks)[:, None]
        visits = tl.load(at, mask=mask, other=0)
        tl.store(at, tl.cumsum(visits, axis=0) - visits + total[None, :], mask=mask)
        total += tl.sum(visits, axis=0)
    tl.store(counts + expert, total, mask=expert < count)


@triton.jit
def _place(experts, source_row, destination, offsets, counts, starts, pairs, tile, count, TOPK: tl.constexpr,
           LENGTH: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    begin = _offsets(tl.load(counts + expert, mask=expert < count, other=0), tile)
    if block == 0:
        tl.store(offsets + expert, begin, mask=expert < count)
    chosen, routed = _experts_of(experts, block * LENGTH, pairs, count, LENGTH)
    row = tl.gather(begin, chosen, axis=0) + tl.load(starts + block * BLOCK_E + chosen)
    row += _rank(chosen, experts, block * LENGTH, pairs, LENGTH)
    _store_pairs(source_row, destination, block * LENGTH + tl.arange(0, LENGTH), row, routed, pairs, TOPK)


@triton.jit
def _finalize(
    rows, destination, weights, shared, out, d, row_stride, shared_stride,
    TOPK: tl.constexpr, WEIGHTED: tl.constexpr, SHARED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < d
    total = tl.zeros((BLOCK_D,), tl.float32)
    for k in tl.static_range(TOPK):
        row = tl.load(destination + token * TOPK + k).to(tl.int64)
        value = tl.load(rows + row * row_stride + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * TOPK + k)
        total += value
    if SHARED:
        total += tl.load(shared + token * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * d + column, round_for(total, out), mask=inside)


def route_topk(
    logits: Tensor,
    bias: Tensor,
    topk: int,
    scaling: float,
    *,
    shared_expert: bool = False,
    experts: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts by ``sqrt(softplus(logit)) + bias``; weigh them by their scores alone.

    Args:
        logits: [T, E] bf16 or fp32, rows contiguous, E up to 512: ``x @ gate^T``.
        bias: fp32 [E], the correction bias.
        topk: experts per token. scaling: ``routed_scaling_factor``.
        shared_expert: add expert E with weight 1 to every token.
        experts, weights: the results' places; allocated unless given.

    Returns:
        ``experts`` int32 [T, topk (+1)], best first, of equals the lowest; ``weights`` fp32, alike; those of the
        routed experts sum to ``scaling``.

    Scores are within 2e-6 of exact ones, relatively, down to 1e-18 (softplus itself leaves fp32's normal numbers
    there); experts whose biased scores differ by less may change places with the reference's.
    """
    op = "route_topk"
    tokens, count = _check_logits(op, logits)
    require_shape(f"{op}: bias", bias, (count,), "[experts]")
    require_dtype(f"{op}: bias", bias, torch.float32)
    require_contiguous(f"{op}: bias", bias)
    require_same_device("logits", logits, **{f"{op}: bias": bias})
    require_range(f"{op}: topk", topk, 1, count)
    columns = topk + shared_expert
    experts, weights = _route_outputs(op, logits, columns, experts, weights)
    if tokens:
        block_t = 1 if tokens <= 256 else 4
        _route_topk[(triton.cdiv(tokens, block_t),)](
            logits, bias, experts, weights, tokens, logits.stride(0), scaling, count, TOPK=topk, SHARED=shared_expert,
            BLOCK_T=block_t, BLOCK_E=triton.next_power_of_2(count), BLOCK_K=triton.next_power_of_2(columns),
            num_warps=block_t,
        )  # fmt: skip
    return experts, weights


def route_hash(
    logits: Tensor,
    table: Tensor,
    token_ids: Tensor,
    scaling: float,
    *,
    shared_expert: bool = False,
    experts: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts by the token's id; weigh them by their scores, as :func:`route_topk` does.

    Args:
        logits: [T, E] bf16 or fp32, rows contiguous.
        table: int32 or int64 [vocabulary, topk].
        token_ids: int32 or int64 [T]; those outside the table, like experts outside 0..E-1, are not routed: expert
            −1, weight 0.
        scaling, shared_expert, experts, weights: as in :func:`route_topk`.
    """
    op = "route_hash"
    tokens, count = _check_logits(op, logits)
    require_dimensions(f"{op}: table", table, 2, "[vocabulary, topk]")
    require_shape(f"{op}: token_ids", token_ids, (tokens,), "[tokens]")
    for name, tensor in {f"{op}: table": table, f"{op}: token_ids": token_ids}.items():
        require_dtype(name, tensor, torch.int32, torch.int64)
        require_contiguous(name, tensor)
        require_same_device("logits", logits, **{name: tensor})
    vocabulary, topk = table.shape
    columns = topk + shared_expert
    experts, weights = _route_outputs(op, logits, columns, experts, weights)
    if tokens:
        block_t = 32
        _route_hash[(triton.cdiv(tokens, block_t),)](
            logits, table, token_ids, experts, weights, tokens, logits.stride(0), scaling, count, vocabulary, TOPK=topk,
            SHARED=shared_expert, BLOCK_T=block_t, BLOCK_K=triton.next_power_of_2(columns), num_warps=4,
        )  # fmt: skip
    return experts, weights


def _check_logits(op: str, logits: Tensor) -> tuple[int, int]:
    require_dimensions(f"{op}: logits", logits, 2, "[tokens, experts]")
    require_dtype(f"{op}: logits", logits, torch.bfloat16, torch.float32)
    require_rows(f"{op}: logits", logits)
    tokens, count = logits.shape
    require_range(f"{op}: experts (columns of logits)", count, 1, MAX_EXPERTS)
    return tokens, count


def _route_outputs(
    op: str, logits: Tensor, columns: int, experts: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], columns
    experts = logits.new_empty(shape, dtype=torch.int32) if experts is None else experts
    weights = logits.new_empty(shape, dtype=torch.float32) if weights is None else weights
    require_dtype(f"{op}: experts", experts, torch.int32)
    require_dtype(f"{op}: weights", weights, torch.float32)
    for name, tensor in {f"{op}: experts": experts, f"{op}: weights": weights}.items():
        require_shape(name, tensor, shape, "[tokens, topk], and one for a shared expert")
        require_contiguous(name, tensor)
        require_same_device("logits", logits, **{name: tensor})
    return experts, weights


def padded_rows(pairs: int, experts: int, tile: int) -> int:
    """Rows that are enough however ``pairs`` fall to ``experts``, each expert's rounded up to whole tiles.

    The worst case: as many experts as can have any are one row into their last tile.
    """
    return (pairs + min(experts, pairs) * (tile - 1)) // tile * tile


def _bins(experts: int) -> int:
    """Of the histograms: a power of two, and a warp's at least."""
    return max(triton.next_power_of_2(experts), 32)


@dataclass(frozen=True)
class Permutation:
    """Which row is whose; allocate once for each number of tokens that is captured, or for the most.

    Attributes:
        source_row: int32 [padded rows], the token whose copy stands in a row; −1 in the padding.
        destination: int32 [T, k], the row of a pair; −1 if it is not routed.
        offsets: int32 [E], multiples of the tile: where an expert's rows begin.
        counts: int32 [E], how many there are without padding.
        starts: int32 workspace.
    """

    source_row: Tensor
    destination: Tensor
    offsets: Tensor
    counts: Tensor
    starts: Tensor

    @classmethod
    def allocate(cls, tokens: int, topk: int, experts: int, tile: int, device: torch.device | str) -> Permutation:
        """For ``tokens`` tokens with ``topk`` of ``experts`` each, the shared one counted in both if it is a group."""
        pairs = tokens * topk

        def new(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=device)

        blocks = triton.cdiv(pairs, BLOCK_PAIRS) if pairs > FEW_PAIRS else 0
        return cls(
            new(padded_rows(pairs, experts, tile)),
            new(tokens, topk),
            new(experts),
            new(experts),
            new(blocks * _bins(experts)),
        )


def permute(experts: Tensor, tile: int, out: Permutation) -> None:
    """Group the pairs of tokens and experts by expert; within one, in the order of tokens.

    Args:
        experts: int32 [T, k]; a pair whose expert is not one of E (−1, say) has no row.
        tile: the token tile of the products.
        out: written in whole, ``source_row`` with −1 beyond the last expert's rows too.
    """
    op = "permute"
    require_dimensions(f"{op}: experts", experts, 2, "[tokens, topk]")
    tokens, topk = experts.shape
    pairs, count, rows = tokens * topk, out.offsets.shape[0], out.source_row.shape[0]
    require_range(f"{op}: number of experts", count, 1, MAX_EXPERTS)
    require_range(f"{op}: tile", tile, 1, 1024)
    require_range(f"{op}: pairs", pairs, 0, 2**31 - 1 - MAX_EXPERTS * tile)
    block_e = _bins(count)
    blocks = triton.cdiv(pairs, BLOCK_PAIRS) if pairs > FEW_PAIRS else 0
    require_shape(f"{op}: source_row", out.source_row, (padded_rows(pairs, count, tile),), "[padded_rows(...)]")
    require_shape(f"{op}: destination", out.destination, (tokens, topk), "[tokens, topk]")
    require_shape(f"{op}: counts", out.counts, (count,), "[experts]")
    require_shape(f"{op}: starts", out.starts, (blocks * block_e,), "[blocks of pairs * experts, a power of two]")
    tensors = {"experts": experts, **vars(out)}
    for name, tensor in tensors.items():
        require_dtype(f"{op}: {name}", tensor, torch.int32)
        require_contiguous(f"{op}: {name}", tensor)
        require_same_device("experts", experts, **{f"{op}: {name}": tensor})
    if not blocks:
        # As many threads as pairs or fewer, so that no thread holds a pair of another and counts it again.
        length = max(triton.next_power_of_2(pairs), 128)
        _permute_few[(1,)](
            experts, out.source_row, out.destination, out.offsets, out.counts, pairs, rows, tile, count,
            TOPK=max(topk, 1), LENGTH=length, BLOCK_E=block_e, BLOCK_R=1024, num_warps=min(length // 32, 16),
        )  # fmt: skip
        return
    _count[(blocks,)](
        experts, out.source_row, out.starts, pairs, rows, triton.cdiv(rows, blocks), count,
        LENGTH=BLOCK_PAIRS, BLOCK_E=block_e, BLOCK_R=256, num_warps=BLOCK_PAIRS // 32,
    )  # fmt: skip
    _scan[(block_e // BLOCK_EXPERTS,)](
        out.starts, out.counts, blocks, count,
        BLOCK_E=block_e, EXPERTS=BLOCK_EXPERTS, BLOCK_B=min(triton.next_power_of_2(blocks), 256), num_warps=8,
    )  # fmt: skip
    _place[(blocks,)](
        experts, out.source_row, out.destination, out.offsets, out.counts, out.starts, pairs, tile, count,
        TOPK=topk, LENGTH=BLOCK_PAIRS, BLOCK_E=block_e, num_warps=BLOCK_PAIRS // 32,
    )  # fmt: skip


def finalize(
    rows: Tensor,
    destination: Tensor,
    weights: Tensor | None,
    out: Tensor,
    *,
    shared: Tensor | None = None,
) -> Tensor:
    """Sum each token's rows: ``sum_k weights_k rows[destination_k] (+ shared)``.

    Args:
        rows: [padded rows, d] bf16 or fp32, the experts' outputs. Padding is not read.
        destination: int32 [T, k]; a pair with −1 adds nothing.
        weights: fp32 [T, k], or ``None`` where the rows are weighted already.
        out: bf16 or fp32 [T, d], contiguous.
        shared: bf16 or fp32 [T, d], the shared expert's output where that is not among the rows.

    Rounding: fp32, in the order of k, the shared expert last; one rounding to the output dtype.
    """
    op = "finalize"
    require_dimensions(f"{op}: rows", rows, 2, "[padded rows, d]")
    require_dimensions(f"{op}: destination", destination, 2, "[tokens, topk]")
    d = rows.shape[1]
    tokens, topk = destination.shape
    require_dtype(f"{op}: destination", destination, torch.int32)
    require_contiguous(f"{op}: destination", destination)
    require_shape(f"{op}: out", out, (tokens, d), "[tokens, d]")
    require_contiguous(f"{op}: out", out)
    for name, tensor in {"rows": rows, "out": out, "shared": shared}.items():
        if tensor is not None:
            require_dtype(f"{op}: {name}", tensor, torch.bfloat16, torch.float32)
            require_rows(f"{op}: {name}", tensor)
            require_same_device("destination", destination, **{f"{op}: {name}": tensor})
    if weights is not None:
        require_shape(f"{op}: weights", weights, (tokens, topk), "[tokens, topk]")
        require_dtype(f"{op}: weights", weights, torch.float32)
        require_contiguous(f"{op}: weights", weights)
        require_same_device("destination", destination, **{f"{op}: weights": weights})
    if shared is not None:
        require_shape(f"{op}: shared", shared, (tokens, d), "[tokens, d]")
    if d == 0:
        raise OperandValueError(f"{op}: rows: expected at least one column, found shape {tuple(rows.shape)}")
    if tokens:
        block = min(triton.next_power_of_2(d), 1024)
        _finalize[(tokens, triton.cdiv(d, block))](
            rows, destination, weights, shared, out, d, rows.stride(0), 0 if shared is None else shared.stride(0),
            TOPK=topk, WEIGHTED=weights is not None, SHARED=shared is not None, BLOCK_D=block, num_warps=4,
        )  # fmt: skip
    return out
