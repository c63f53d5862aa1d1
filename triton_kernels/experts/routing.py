"""Which experts a token visits, with what weights, and in which rows its copies stand (DEEPSEEK_V4.md §6).

The shared expert may be one more group that every token visits with weight 1: ``shared_expert=True``. The permutation
(:mod:`.permutation`) is part of the same launch where pairs are few.

Floors: the logits read, 16 bytes a pair and 4 a padded row written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats.checks import (
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_range,
    require_rows,
    require_same_device,
    require_shape,
)

from ..common.overlap import OVERLAPPED, after_previous
from .permutation import MANY_BLOCK, MAX_GROUPS, Routes, count_visits, fill_padding, permute_sorted, place_counted

MAX_EXPERTS = 512
FEW = {16: (4, 4), 64: (4, 4), 256: (8, 8)}
"""Tokens, up to so many, of one program, and its warps, where one program sorts all pairs."""
MANY_AT_ONCE = 4
"""Tokens that a program of more chooses experts for at once: one a warp."""
TAKEN = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""Below every key."""


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
def _store_choice(
    logits,
    out,
    chosen,
    known,
    token,
    here,
    row,
    scaling,
    count,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Weigh what was chosen, [tokens, BLOCK_K], where it is ``known``, and store both; −1 where it is not."""
    place = tl.arange(0, BLOCK_K)[None, :]
    logit = tl.load(logits + token[:, None] * row + chosen, mask=known, other=0.0).to(tl.float32)
    scores = tl.where(known, _score(logit), 0.0)
    chosen = tl.where(known, chosen, -1)
    weight = scores / (tl.sum(scores, axis=1) + 1e-20)[:, None] * scaling
    if SHARED:
        chosen = tl.where(place == TOPK, count, chosen)
        weight = tl.where(place == TOPK, 1.0, weight)
    at = token[:, None] * (TOPK + SHARED) + place
    mask = here[:, None] & (place < TOPK + SHARED)
    tl.store(out.experts + at, chosen, mask=mask)
    tl.store(out.weights + at, weight, mask=mask)


@triton.jit
def _finish(
    out, semaphore, tokens, TOPK: tl.constexpr, BLOCK_T: tl.constexpr, SORTED: tl.constexpr, LENGTH: tl.constexpr
):
    """After the choices of BLOCK_T tokens are stored: the permutation, or this program's part of it.

    TOPK: pairs of a token.
    """
    fill_padding(out)
    # All that the program's warps stored lies in memory before it is counted in, or read again.
    tl.debug_barrier()
    if SORTED:
        programs = tl.num_programs(0)
        before = programs - 1
        if programs > 1:
            before = tl.atomic_add(semaphore, 1, sem="acq_rel", scope="gpu")
        if before == programs - 1:
            tl.store(semaphore, 0)
            permute_sorted(out, tokens * TOPK, TOPK, LENGTH)
    else:
        count_visits(out, tokens * TOPK, BLOCK_T * TOPK, LENGTH)


@triton.jit
def _route_topk(
    logits,
    bias,
    out,
    semaphore,
    tokens,
    row,
    scaling,
    count,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SORTED: tl.constexpr,
    LENGTH: tl.constexpr,
):
    after_previous()
    # [lines of 128, tokens, 128]: all of a token's experts in one warp, so that no warp waits for another.
    expert = tl.arange(0, LINES)[:, None, None] * 128 + tl.arange(0, 128)[None, None, :]
    is_expert = expert < count
    biases = tl.load(bias + expert, mask=is_expert, other=0.0)
    place = tl.arange(0, BLOCK_K)[None, :]
    for part in range(0, BLOCK_T, AT_ONCE):
        token = (tl.program_id(0) * BLOCK_T + part + tl.arange(0, AT_ONCE)).to(tl.int64)
        here = token < tokens
        mask = here[None, :, None] & is_expert
        logit = tl.load(logits + token[None, :, None] * row + expert, mask=mask, other=0.0).to(tl.float32)
        # One number orders by biased score, then by lowest expert: the bits of a float, negative ones rotated round,
        # compare like integers.
        bits = (_score(logit) + biases).to(tl.int32, bitcast=True)
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        key = (ordered << 32) | (LINES * 128 - 1 - expert).to(tl.int64)
        key = tl.where(is_expert, key, TAKEN)
        chosen = tl.zeros((AT_ONCE, BLOCK_K), tl.int32)
        for k in tl.static_range(TOPK):
            best = tl.max(tl.max(key, axis=0), axis=1)
            key = tl.where(key == best[None, :, None], TAKEN, key)
            best_expert = (LINES * 128 - 1 - (best & 0xFFFFFFFF)).to(tl.int32)
            chosen = tl.where(place == k, best_expert[:, None], chosen)
        known = here[:, None] & (place < TOPK)
        _store_choice(logits, out, chosen, known, token, here, row, scaling, count, TOPK, SHARED, BLOCK_K)
    _finish(out, semaphore, tokens, TOPK + SHARED, BLOCK_T, SORTED, LENGTH)


@triton.jit
def _route_hash(
    logits,
    table,
    token_ids,
    out,
    semaphore,
    tokens,
    row,
    scaling,
    count,
    vocabulary,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SORTED: tl.constexpr,
    LENGTH: tl.constexpr,
):
    after_previous()
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    here = token < tokens
    place = tl.arange(0, BLOCK_K)[None, :]
    token_id = tl.load(token_ids + token, mask=here, other=0).to(tl.int64)
    known = (here & (token_id >= 0) & (token_id < vocabulary))[:, None] & (place < TOPK)
    chosen = tl.load(table + token_id[:, None] * TOPK + place, mask=known, other=-1).to(tl.int32)
    known = known & (chosen >= 0) & (chosen < count)
    _store_choice(logits, out, chosen, known, token, here, row, scaling, count, TOPK, SHARED, BLOCK_K)
    _finish(out, semaphore, tokens, TOPK + SHARED, BLOCK_T, SORTED, LENGTH)


def route_topk(
    logits: Tensor, bias: Tensor, scaling: float, out: Routes, semaphore: Tensor, *, shared_expert: bool = False
) -> None:
    """Choose experts by ``sqrt(softplus(logit)) + bias``, weigh them by their scores alone, and group the pairs.

    Args:
        logits: [T, E] bf16 or fp32, rows contiguous, E up to 512: ``x @ gate^T``.
        bias: fp32 [E], the correction bias.
        scaling: ``routed_scaling_factor``.
        out: written in whole. ``experts``: best first, of equals the lowest; ``weights`` of the routed experts sum to
            ``scaling``. It may have more groups than there are experts.
        semaphore: int32 [1], zero between launches.
        shared_expert: the last of a token's pairs is expert E with weight 1.

    Scores are within 2e-6 of exact ones, relatively, down to 1e-18 (softplus itself leaves fp32's normal numbers
    there); experts whose biased scores differ by less may change places with the reference's.
    """
    op = "route_topk"
    tokens, count = _check(op, logits, out, semaphore, shared_expert)
    require_shape(f"{op}: bias", bias, (count,), "[experts]")
    require_dtype(f"{op}: bias", bias, torch.float32)
    require_contiguous(f"{op}: bias", bias)
    require_same_device("logits", logits, **{f"{op}: bias": bias})
    require_range(f"{op}: topk", out.topk - shared_expert, 1, count)
    _route_topk[_grid(out)](
        logits,
        bias,
        out.arguments(),
        semaphore,
        tokens,
        logits.stride(0),
        scaling,
        count,
        AT_ONCE=_tiling(out)[0] if out.is_sorted else MANY_AT_ONCE,
        LINES=triton.next_power_of_2(triton.cdiv(count, 128)),
        **_options(out, shared_expert),
    )
    if not out.is_sorted:
        place_counted(out)


def route_hash(
    logits: Tensor,
    table: Tensor,
    token_ids: Tensor,
    scaling: float,
    out: Routes,
    semaphore: Tensor,
    *,
    shared_expert: bool = False,
) -> None:
    """Choose experts by the token's id; weigh them by their scores and group the pairs as :func:`route_topk` does.

    Args:
        logits: [T, E] bf16 or fp32, rows contiguous.
        table: int32 or int64 [vocabulary, topk].
        token_ids: int32 or int64 [T]; those outside the table, like experts outside 0..E-1, are not routed: expert
            −1, weight 0, no row.
        scaling, out, semaphore, shared_expert: as in :func:`route_topk`.
    """
    op = "route_hash"
    tokens, count = _check(op, logits, out, semaphore, shared_expert)
    require_shape(f"{op}: table", table, (table.shape[0], out.topk - shared_expert), "[vocabulary, topk]")
    require_shape(f"{op}: token_ids", token_ids, (tokens,), "[tokens]")
    for name, tensor in {f"{op}: table": table, f"{op}: token_ids": token_ids}.items():
        require_dtype(name, tensor, torch.int32, torch.int64)
        require_contiguous(name, tensor)
        require_same_device("logits", logits, **{name: tensor})
    _route_hash[_grid(out)](
        logits,
        table,
        token_ids,
        out.arguments(),
        semaphore,
        tokens,
        logits.stride(0),
        scaling,
        count,
        table.shape[0],
        **_options(out, shared_expert),
    )
    if not out.is_sorted:
        place_counted(out)


def _tiling(out: Routes) -> tuple[int, int, int]:
    """(tokens of a program, its warps, room for the pairs that it sorts or counts)."""
    if not out.is_sorted:
        return MANY_BLOCK, 4, max(triton.next_power_of_2(MANY_BLOCK * out.topk), 128)
    most = min(limit for limit in FEW if out.tokens <= limit)
    block, warps = FEW[most]
    return block, warps, max(triton.next_power_of_2(most * out.topk), 32 * warps)


def _grid(out: Routes) -> tuple[int]:
    """Of no tokens, too, the groups' counts are written."""
    return (max(triton.cdiv(out.tokens, _tiling(out)[0]), 1),)


def _options(out: Routes, shared_expert: bool) -> dict[str, Any]:
    """Constants and launch options."""
    block, warps, length = _tiling(out)
    return {
        "TOPK": out.topk - shared_expert,
        "SHARED": shared_expert,
        "BLOCK_T": block,
        "BLOCK_K": triton.next_power_of_2(out.topk),
        "SORTED": out.is_sorted,
        "LENGTH": length,
        "num_warps": warps,
        **OVERLAPPED,
    }


def _check(op: str, logits: Tensor, out: Routes, semaphore: Tensor, shared_expert: bool) -> tuple[int, int]:
    """Tokens and experts."""
    require_dimensions(f"{op}: logits", logits, 2, "[tokens, experts]")
    require_dtype(f"{op}: logits", logits, torch.bfloat16, torch.float32)
    require_rows(f"{op}: logits", logits)
    tokens, count = logits.shape
    require_range(f"{op}: experts (columns of logits)", count, 1, MAX_EXPERTS)
    require_dimensions(f"{op}: experts", out.experts, 2, "[tokens, topk]")
    require_shape(f"{op}: experts", out.experts, (tokens, out.topk), "[tokens, topk]")
    out.check(op)
    require_range(f"{op}: number of groups", out.groups, count + shared_expert, MAX_GROUPS)
    require_shape(f"{op}: semaphore", semaphore, (1,), "[1]")
    require_dtype(f"{op}: semaphore", semaphore, torch.int32)
    require_same_device("logits", logits, **{f"{op}: experts": out.experts, f"{op}: semaphore": semaphore})
    return tokens, count
