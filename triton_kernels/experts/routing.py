"""The router: the experts of each token, their weights, and the permutation into rows by expert (specification §6.1).

Scores are ``sqrt(softplus(logits))`` in fp32. :func:`route_topk` takes the experts of the best biased scores,
:func:`route_hash` those of a table indexed by token id; both weigh them by their unbiased scores. With
``shared_expert=True`` the shared expert is one more group, which every token visits with weight 1. Padding of a
captured graph visits no group. The permutation (:mod:`.permutation`) is part of the same launch if one program can
place all pairs, and takes two more otherwise.

Supports bf16 and fp32 logits of up to :data:`MAX_ROUTED_EXPERTS` experts. Experts are not grouped for the choice, and
the logits are a GEMM of the caller's.

Floor: the logits read, 16 bytes a pair and 4 a padded row written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats.checks import (
    once,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_range,
    require_rows,
    require_same_device,
    require_shape,
)
from nvfp4_sgl.limits import MAX_ROUTED_EXPERTS

from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..plan.batch import PAGE_TOKENS
from .permutation import (
    COUNTED_BLOCK_TOKENS,
    MAX_GROUPS,
    Counted,
    Routes,
    count_visits,
    fill_padding,
    permute_one,
    permute_sorted,
    place_counted,
)

SINGLE_MAX_PAIRS = 8
"""Most pairs of a token that is routed alone and whose pairs are compared with each other: 2.56 µs by scores instead of
4.11 with the sort of other launches (``launch/results/tunings_h200.md``)."""
SINGLE_PROGRAM_TILINGS = {16: (4, 4), 64: (4, 4), 256: (8, 8)}
"""If one program sorts all pairs: by the max_tokens tokens of a launch, (tokens, warps) of a program."""
COUNTED_BLOCK_TOKENS_AT_ONCE = 4
"""If blocks of pairs are counted: tokens that a program chooses experts for at once, one a warp."""
EXCLUDED = tl.constexpr(-0x80000000)
"""Stands for the score of an expert that is chosen already, and of the padding: below that of every expert."""
PADDING_SLOTS = tl.constexpr(PAGE_TOKENS)
"""Window slots below this are page 0, which only padding writes."""


@triton.jit
def _score(logit):
    """``sqrt(softplus(logit))``; log1p(e) as 2 atanh(e / (2 + e)), whose series is within 2e-8 for e in (0, 1]."""
    e = tl.exp(-tl.abs(logit))
    s = e / (2.0 + e)
    t = s * s
    series = 1.0 / 11 + t * (1.0 / 13)
    series = 1.0 / 7 + t * (1.0 / 9 + t * series)
    series = 1.0 + t * (1.0 / 3 + t * (1.0 / 5 + t * series))
    return tl.sqrt(tl.maximum(logit, 0.0) + 2.0 * s * series)


@triton.jit
def _is_routed(window_write, token, here, PADDED: tl.constexpr):
    """Whether a token exists and, if PADDED, is none of a graph's padding."""
    if PADDED:
        here = here & (tl.load(window_write + token, mask=here, other=0) >= PADDING_SLOTS)
    return here


@triton.jit
def _store_choice(
    logits,
    out,
    chosen,
    known,
    token,
    here,
    routed,
    logits_stride,
    scaling,
    num_experts,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the weights of the chosen experts and store both; expert −1 and weight 0 where ``known`` is false.

    chosen: int32 [tokens, BLOCK_K]. known: whether an entry of ``chosen`` is an expert. here: whether a token exists.
    routed: whether it visits the shared expert.
    """
    place = tl.arange(0, BLOCK_K)[None, :]
    logit = tl.load(logits + token[:, None] * logits_stride + chosen, mask=known, other=0.0).to(tl.float32)
    scores = tl.where(known, _score(logit), 0.0)
    chosen = tl.where(known, chosen, -1)
    weight = scores / (tl.sum(scores, axis=1) + 1e-20)[:, None] * scaling
    if SHARED:
        visits = (place == TOPK) & routed[:, None]
        chosen = tl.where(visits, num_experts, chosen)
        weight = tl.where(visits, 1.0, weight)
    at = token[:, None] * (TOPK + SHARED) + place
    mask = here[:, None] & (place < TOPK + SHARED)
    tl.store(out.experts + at, chosen, mask=mask)
    tl.store(out.weights + at, weight, mask=mask)


@triton.jit
def _finish(
    out,
    semaphore,
    tokens,
    rows,
    TOPK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SINGLE: tl.constexpr,
    SORTED: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
    SIXTEENS: tl.constexpr,
):
    """Permute, or do this program's part of it, once the choices of its BLOCK_T tokens are stored.

    If SINGLE, there is one token. Else, if SORTED, the program that finds ``semaphore`` at the number of the others
    sorts all pairs and leaves it zero; else each program counts the visits of its own tokens. TOPK: pairs of a token,
    the shared expert included. SIXTEENS: ``tokens`` is a multiple of 16; the sorting program's loads are vectors then.
    """
    fill_padding(out, rows, 128 if SINGLE else 1024)
    # All stores of the program's warps must be in memory before the semaphore is raised, or before they are read again
    # or overwritten.
    tl.debug_barrier()
    if SINGLE:
        permute_one(out, TOPK, BLOCK_K, TILE)
    elif SORTED:
        programs = tl.num_programs(0)
        before = programs - 1
        if programs > 1:
            before = tl.atomic_add(semaphore, 1, sem="acq_rel", scope="gpu")
        if before == programs - 1:
            tl.store(semaphore, 0)
            pairs = tokens * TOPK
            if SIXTEENS:
                pairs = tl.multiple_of(pairs, 16)
            permute_sorted(out, pairs, TOPK, LENGTH, TILE)
    else:
        count_visits(out, tokens * TOPK, BLOCK_T * TOPK, LENGTH)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["tokens"])
def _route_topk(
    logits,
    bias,
    out,
    semaphore,
    window_write,
    tokens,
    rows,
    logits_stride,
    scaling,
    num_experts,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TOKENS_AT_ONCE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SINGLE: tl.constexpr,
    SORTED: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
    SIXTEENS: tl.constexpr,
):
    after_previous()
    # [lines of 128, tokens, 128]: one warp holds all experts of a token, so that no warp waits for another.
    expert = tl.arange(0, LINES)[:, None, None] * 128 + tl.arange(0, 128)[None, None, :]
    is_expert = expert < num_experts
    biases = tl.load(bias + expert, mask=is_expert, other=0.0)
    place = tl.arange(0, BLOCK_K)[None, :]
    for part in range(0, BLOCK_T, TOKENS_AT_ONCE):
        token = (tl.program_id(0) * BLOCK_T + part + tl.arange(0, TOKENS_AT_ONCE)).to(tl.int64)
        here = token < tokens
        # Asked for with the logits, not after them.
        routed = _is_routed(window_write, token, here, PADDED)
        mask = here[None, :, None] & is_expert
        logit = tl.load(logits + token[None, :, None] * logits_stride + expert, mask=mask, other=0.0).to(tl.float32)
        # The bits of a float compare like integers once those of negative ones, but for the sign, are inverted. A warp
        # finds the largest of its integers, and the lowest of its experts, in one instruction each.
        bits = (_score(logit) + biases).to(tl.int32, bitcast=True)
        ordered = tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), EXCLUDED + 1)
        ordered = tl.where(is_expert, ordered, EXCLUDED)
        chosen = tl.zeros((TOKENS_AT_ONCE, BLOCK_K), tl.int32)
        for k in tl.static_range(TOPK):
            best = tl.max(tl.max(ordered, axis=0), axis=1)
            among = tl.where(ordered == best[None, :, None], expert, LINES * 128)
            best_expert = tl.min(tl.min(among, axis=0), axis=1)
            ordered = tl.where(expert == best_expert[None, :, None], EXCLUDED, ordered)
            chosen = tl.where(place == k, best_expert[:, None], chosen)
        known = routed[:, None] & (place < TOPK)
        _store_choice(
            logits, out, chosen, known, token, here, routed, logits_stride, scaling, num_experts, TOPK, SHARED, BLOCK_K
        )
    _finish(out, semaphore, tokens, rows, TOPK + SHARED, BLOCK_T, BLOCK_K, SINGLE, SORTED, LENGTH, TILE, SIXTEENS)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["tokens"])
def _route_hash(
    logits,
    table,
    token_ids,
    out,
    semaphore,
    window_write,
    tokens,
    rows,
    logits_stride,
    scaling,
    num_experts,
    vocabulary,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SINGLE: tl.constexpr,
    SORTED: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
    SIXTEENS: tl.constexpr,
):
    after_previous()
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    here = token < tokens
    place = tl.arange(0, BLOCK_K)[None, :]
    token_id = tl.load(token_ids + token, mask=here, other=0).to(tl.int64)
    routed = _is_routed(window_write, token, here, PADDED)
    known = (routed & (token_id >= 0) & (token_id < vocabulary))[:, None] & (place < TOPK)
    chosen = tl.load(table + token_id[:, None] * TOPK + place, mask=known, other=-1).to(tl.int32)
    known = known & (chosen >= 0) & (chosen < num_experts)
    _store_choice(
        logits, out, chosen, known, token, here, routed, logits_stride, scaling, num_experts, TOPK, SHARED, BLOCK_K
    )
    _finish(out, semaphore, tokens, rows, TOPK + SHARED, BLOCK_T, BLOCK_K, SINGLE, SORTED, LENGTH, TILE, SIXTEENS)


def route_topk(
    logits: Tensor,
    bias: Tensor,
    scaling: float,
    out: Routes,
    semaphore: Tensor,
    *,
    shared_expert: bool = False,
    window_write: Tensor | None = None,
) -> None:
    """Choose each token's experts by ``sqrt(softplus(logit)) + bias``, compute their weights, and permute the pairs.

    A weight is the expert's score without bias, divided by the sum of the chosen experts' scores plus 1e-20, times
    ``scaling``.

    Args:
        logits: bf16 or fp32 [T, E], the last dimension contiguous, E up to 512: ``x @ gate^T``.
        bias: fp32 [E], contiguous, the correction bias.
        scaling: ``routed_scaling_factor``.
        out: written in whole. ``experts``: best first, of equals the lowest; ``weights`` of the routed experts sum to
            ``scaling``. It may have more groups than there are experts.
        semaphore: int32 [1], counts the programs that have routed their tokens; zero between launches, which leave it
            so.
        shared_expert: the last of a token's pairs is expert E with weight 1.
        window_write: int32 [T], contiguous, the window slot that each token writes, as in :class:`..plan.resolve.Plan`.
            A token of page 0 (slots 0 to 255) is padding and is not routed, to the shared expert neither: expert −1,
            weight 0, no row. Without it all tokens are routed.

    Rounding: everything is fp32. Scores are within 2e-6 of exact ones, relatively, down to 1e-18 (softplus itself
    leaves fp32's normal numbers there); experts whose biased scores differ by less may change places with the
    reference's.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit, or there are too many experts, groups or pairs.

    Source: specification §6.1.
    """
    launch = _bind_topk(logits, bias, out, semaphore, shared_expert, window_write)
    (tokens, num_experts), arguments = logits.shape, out.arguments()
    _route_topk[launch.grid](
        logits,
        bias,
        arguments,
        semaphore,
        window_write,
        tokens,
        out.source_row.shape[0],
        logits.stride(0),
        scaling,
        num_experts,
        **launch.constants,
    )
    if launch.counted is not None:
        place_counted(out, arguments, launch.counted)


def route_hash(
    logits: Tensor,
    table: Tensor,
    token_ids: Tensor,
    scaling: float,
    out: Routes,
    semaphore: Tensor,
    *,
    shared_expert: bool = False,
    window_write: Tensor | None = None,
) -> None:
    """Look each token's experts up by its id; compute weights and permute the pairs as :func:`route_topk` does.

    Args:
        logits: bf16 or fp32 [T, E], the last dimension contiguous, E up to 512.
        table: int32 or int64 [vocabulary, topk], contiguous: the experts of each token id.
        token_ids: int32 or int64 [T], contiguous. Ids outside the table and experts outside 0 to E - 1 are not routed:
            expert −1, weight 0, no row.
        scaling, out, semaphore, shared_expert, window_write: as in :func:`route_topk`.

    Rounding: as in :func:`route_topk`.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit, or there are too many experts, groups or pairs.

    Source: specification §6.1.
    """
    launch = _bind_hash(logits, table, token_ids, out, semaphore, shared_expert, window_write)
    (tokens, num_experts), arguments = logits.shape, out.arguments()
    _route_hash[launch.grid](
        logits,
        table,
        token_ids,
        arguments,
        semaphore,
        window_write,
        tokens,
        out.source_row.shape[0],
        logits.stride(0),
        scaling,
        num_experts,
        table.shape[0],
        **launch.constants,
    )
    if launch.counted is not None:
        place_counted(out, arguments, launch.counted)


class _Launch(NamedTuple):
    """The launch of operands that look the same; ``counted`` launches follow it."""

    grid: tuple[int]
    constants: dict[str, Any]
    counted: Counted | None


def _tiling(out: Routes) -> tuple[int, int, int]:
    """(tokens of a program, its warps, LENGTH: the pairs that it sorts or counts, rounded up to a power of two).

    LENGTH is at least the program's threads, see :func:`permute_sorted`.
    """
    if not out.is_sorted:
        return COUNTED_BLOCK_TOKENS, 4, max(next_power_of_2(COUNTED_BLOCK_TOKENS * out.topk), 128)
    max_tokens = min(limit for limit in SINGLE_PROGRAM_TILINGS if out.tokens <= limit)
    block, warps = SINGLE_PROGRAM_TILINGS[max_tokens]
    return block, warps, max(next_power_of_2(max_tokens * out.topk), 32 * warps)


def _grid(out: Routes) -> tuple[int]:
    """At least one program: it writes the groups' counts even if there are no tokens."""
    return (max(cdiv(out.tokens, _tiling(out)[0]), 1),)


def _options(out: Routes, shared_expert: bool, window_write: Tensor | None) -> dict[str, Any]:
    """Compile-time constants and launch options that both kernels share."""
    block, warps, length = _tiling(out)
    return {
        "TOPK": out.topk - shared_expert,
        "SHARED": shared_expert,
        "PADDED": window_write is not None,
        "BLOCK_T": block,
        "BLOCK_K": next_power_of_2(out.topk),
        "SINGLE": out.tokens == 1 and out.topk <= SINGLE_MAX_PAIRS,
        "SORTED": out.is_sorted,
        "LENGTH": length,
        # Only where it changes what is compiled: counting needs no tile, and no thread of a short sort has two pairs.
        "TILE": out.tile if out.is_sorted else 0,
        "SIXTEENS": out.is_sorted and length > 32 * warps and out.tokens % 16 == 0,
        "num_warps": warps,
        **OVERLAPPED,
    }


def _check(
    op: str, logits: Tensor, out: Routes, semaphore: Tensor, shared_expert: bool, window_write: Tensor | None
) -> tuple[int, int]:
    """Check what both operations take; returns the numbers of tokens and of experts."""
    require_dimensions(f"{op}: logits", logits, 2, "[tokens, experts]")
    require_dtype(f"{op}: logits", logits, torch.bfloat16, torch.float32)
    require_rows(f"{op}: logits", logits)
    tokens, num_experts = logits.shape
    require_range(f"{op}: experts (columns of logits)", num_experts, 1, MAX_ROUTED_EXPERTS)
    require_dimensions(f"{op}: experts", out.experts, 2, "[tokens, topk]")
    require_shape(f"{op}: experts", out.experts, (tokens, out.topk), "[tokens, topk]")
    out.check(op)
    require_range(f"{op}: number of groups", out.groups, num_experts + shared_expert, MAX_GROUPS)
    require_shape(f"{op}: semaphore", semaphore, (1,), "[1]")
    require_dtype(f"{op}: semaphore", semaphore, torch.int32)
    require_same_device("logits", logits, **{f"{op}: experts": out.experts, f"{op}: semaphore": semaphore})
    if window_write is not None:
        require_shape(f"{op}: window_write", window_write, (tokens,), "[tokens]")
        require_dtype(f"{op}: window_write", window_write, torch.int32)
        require_contiguous(f"{op}: window_write", window_write)
        require_same_device("logits", logits, **{f"{op}: window_write": window_write})
    return tokens, num_experts


@once
def _bind_topk(
    logits: Tensor, bias: Tensor, out: Routes, semaphore: Tensor, shared_expert: bool, window_write: Tensor | None
) -> _Launch:
    """Refuse what :func:`route_topk` cannot read or write; metadata only."""
    op = "route_topk"
    _, num_experts = _check(op, logits, out, semaphore, shared_expert, window_write)
    require_shape(f"{op}: bias", bias, (num_experts,), "[experts]")
    require_dtype(f"{op}: bias", bias, torch.float32)
    require_contiguous(f"{op}: bias", bias)
    require_same_device("logits", logits, **{f"{op}: bias": bias})
    require_range(f"{op}: topk", out.topk - shared_expert, 1, num_experts)
    constants = {
        "TOKENS_AT_ONCE": _tiling(out)[0] if out.is_sorted else COUNTED_BLOCK_TOKENS_AT_ONCE,
        "LINES": next_power_of_2(cdiv(num_experts, 128)),
        **_options(out, shared_expert, window_write),
    }
    return _Launch(_grid(out), constants, out.counted())


@once
def _bind_hash(
    logits: Tensor,
    table: Tensor,
    token_ids: Tensor,
    out: Routes,
    semaphore: Tensor,
    shared_expert: bool,
    window_write: Tensor | None,
) -> _Launch:
    """Refuse what :func:`route_hash` cannot read or write; metadata only."""
    op = "route_hash"
    tokens, _ = _check(op, logits, out, semaphore, shared_expert, window_write)
    require_shape(f"{op}: table", table, (table.shape[0], out.topk - shared_expert), "[vocabulary, topk]")
    require_shape(f"{op}: token_ids", token_ids, (tokens,), "[tokens]")
    for name, tensor in {f"{op}: table": table, f"{op}: token_ids": token_ids}.items():
        require_dtype(name, tensor, torch.int32, torch.int64)
        require_contiguous(name, tensor)
        require_same_device("logits", logits, **{name: tensor})
    return _Launch(_grid(out), _options(out, shared_expert, window_write), out.counted())
