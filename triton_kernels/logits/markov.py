"""A step of DSpark's chain of guesses: the token before biases the logits, and the likeliest token is the next guess.

``tokens[b, i] = argmax_v (base[b, i, v] + w2[v] . w1[t])`` where t is the guess before, or in step 0 the anchor
(specification §7). One launch a step: the bias is never stored.

A program multiplies a part of the vocabulary with the ``w1`` rows of up to :data:`MAX_ROWS` requests by tensor cores
(``mma.sync``), block of tokens by block, and stores its likeliest token of each request. Of the programs of these
requests the one that comes last compares the parts.

Supports bf16 ``w1`` and ``w2`` of any rank, any vocabulary and number of requests. Floor of a step: ``w2`` read once,
66 MB for Flash's vocabulary and rank 256, and the requests' logits. Not yet timed on a GPU.
"""

from __future__ import annotations

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
    require_same_device,
    require_shape,
)

from ..common.dot import dot_bf16
from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous

BLOCK = 128
"""Tokens of the vocabulary that a program multiplies at once."""
BLOCK_K = 64
"""Columns of ``w1`` and ``w2`` that it multiplies at once."""
STAGES = 3
MIN_ROWS, MAX_ROWS = 16, 32
"""Requests of a program: the rows of an ``mma.sync``, and twice as many. The programs of further requests run beside it
and find its part of ``w2`` in L2."""
MAX_PARTS = 256
"""Most parts of the vocabulary; the last program compares as many values of each of its requests. About two programs
a multiprocessor, so that the loads of one hide behind the other's."""
NEVER = tl.constexpr(2**31 - 1)
"""Above any token."""


@triton.jit
def _likelier(value, token, other, other_token):
    """The larger of two values with its token; of equal ones the lower token."""
    other_wins = (other > value) | ((other == value) & (other_token < token))
    return tl.where(other_wins, other, value), tl.where(other_wins, other_token, token)


@triton.jit(do_not_specialize=["step", "anchor_row", "requests", "blocks"])
def _markov_step(
    base, anchor, w1, w2, tokens, values, places, semaphores,
    step, anchor_row, requests, blocks, width, steps, rank,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, MAX_PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of ROWS requests, parts of ``blocks`` blocks of tokens).

    values: fp32 [requests, parts], places: int32 [requests, parts], workspace. semaphores: int32 [blocks of requests],
    zero between launches.
    """
    after_previous()
    part, parts = tl.program_id(1), tl.num_programs(1)
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = request < requests
    row = request.to(tl.int64)
    before = tl.load(anchor + row * anchor_row, mask=there & (step == 0), other=0)
    before += tl.load(tokens + row * steps + step - 1, mask=there & (step > 0), other=0)
    before = tl.minimum(tl.maximum(before, 0), width - 1).to(tl.int64)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    place = tl.full((ROWS,), NEVER, tl.int32)
    column = tl.arange(0, BLOCK_K)
    for block in range(part * blocks, (part + 1) * blocks):
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < width
        at = (row * steps + step)[:, None] * width + token[None, :]
        logits = tl.load(base + at, mask=there[:, None] & inside[None, :], other=float("-inf"))
        bias = tl.zeros((ROWS, BLOCK), tl.float32)
        for k in tl.range(0, rank, BLOCK_K, num_stages=STAGES):
            within = k + column < rank
            a = tl.load(
                w1 + before[:, None] * rank + k + column[None, :], mask=there[:, None] & within[None, :], other=0.0
            )
            b = tl.load(
                w2 + token[None, :].to(tl.int64) * rank + k + column[:, None],
                mask=within[:, None] & inside[None, :],
                other=0.0,
            )
            bias = dot_bf16(a, b, bias)
        value = logits + bias
        value = tl.where(value == value, value, float("-inf"))
        largest = tl.max(value, axis=1)
        lowest = tl.min(tl.where(value == largest[:, None], token[None, :], NEVER), axis=1)
        lowest = tl.where(largest == float("-inf"), NEVER, lowest)
        best, place = _likelier(best, place, largest, lowest)
    tl.store(values + row * parts + part, best, mask=there)
    tl.store(places + row * parts + part, place, mask=there)
    # All stores of the program's warps must be in memory before the semaphore is raised.
    tl.debug_barrier()
    semaphore = semaphores + tl.program_id(0)
    if tl.atomic_add(semaphore, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(semaphore, 0)
        others = tl.arange(0, MAX_PARTS)
        at_part = row[:, None] * parts + others[None, :]
        mask = there[:, None] & (others < parts)[None, :]
        # Past L1, because other programs have stored them.
        of_parts = tl.load(values + at_part, mask=mask, other=float("-inf"), cache_modifier=".cg")
        places_of_parts = tl.load(places + at_part, mask=mask, other=NEVER, cache_modifier=".cg")
        of_row = tl.max(of_parts, axis=1)
        chosen = tl.min(tl.where(of_parts == of_row[:, None], places_of_parts, NEVER), axis=1)
        tl.store(tokens + row * steps + step, tl.where(chosen == NEVER, 0, chosen).to(tl.int64), mask=there)


def draft_greedily(base: Tensor, anchor: Tensor, w1: Tensor, w2: Tensor, semaphores: Tensor) -> Tensor:
    """Guess the tokens of blocks, one after the other; as of :func:`nvfp4_sgl.ops.drafts.draft_greedily`.

    Args:
        base: fp32 [B, steps, V], contiguous, logits of the blocks' positions.
        anchor: int64 [B], the tokens in front of the blocks; an id outside of the vocabulary counts as its end.
        w1, w2: bf16 [V, r], contiguous.
        semaphores: int32 [:func:`semaphores_for` or more], contiguous. Zero between launches, which leave them so.

    Returns:
        int64 [B, steps]. Of equal logits the lowest token; NaN counts as -inf, and where all are, the guess is 0.

    Rounding: products exact, sums and bias fp32; nothing is rounded to bf16.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit, or there are too few semaphores.

    Source: specification §7.
    """
    _check(base, anchor, w1, w2, semaphores)
    requests, steps, width = base.shape
    tokens = base.new_empty(requests, steps, dtype=torch.int64)
    if not requests or not steps:
        return tokens
    rows = rows_of_a_program(requests)
    blocks = cdiv(cdiv(width, BLOCK), MAX_PARTS)
    parts = cdiv(width, blocks * BLOCK)
    values = base.new_empty(requests * parts)
    places = base.new_empty(requests * parts, dtype=torch.int32)
    for step in range(steps):
        _markov_step[(cdiv(requests, rows), parts)](
            base, anchor, w1, w2, tokens, values, places, semaphores,
            step, anchor.stride(0), requests, blocks, width, steps, w1.shape[1],
            ROWS=rows, BLOCK=BLOCK, BLOCK_K=BLOCK_K, STAGES=STAGES, MAX_PARTS=MAX_PARTS,
            num_warps=4,
            **OVERLAPPED,
        )  # fmt: skip
    return tokens


def rows_of_a_program(requests: int) -> int:
    """Requests whose guesses a program makes."""
    return min(max(next_power_of_2(requests), MIN_ROWS), MAX_ROWS)


def semaphores_for(requests: int) -> int:
    """Semaphores of :func:`draft_greedily` for so many requests."""
    return cdiv(max(requests, 1), rows_of_a_program(max(requests, 1)))


@once
def _check(base: Tensor, anchor: Tensor, w1: Tensor, w2: Tensor, semaphores: Tensor) -> None:
    """Refuse what :func:`draft_greedily` cannot read or write; metadata only."""
    op = "draft_greedily"
    require_dimensions(f"{op}: base", base, 3, "[requests, steps, vocabulary]")
    require_dtype(f"{op}: base", base, torch.float32)
    require_contiguous(f"{op}: base", base)
    requests, _, width = base.shape
    require_range(f"{op}: vocabulary", width, 1, 2**31 - BLOCK * MAX_PARTS - 1)
    require_shape(f"{op}: anchor", anchor, (requests,), "[requests]")
    require_dtype(f"{op}: anchor", anchor, torch.int64)
    require_dimensions(f"{op}: w1", w1, 2, "[vocabulary, rank]")
    for name, matrix in (("w1", w1), ("w2", w2)):
        require_dtype(f"{op}: {name}", matrix, torch.bfloat16)
        require_shape(f"{op}: {name}", matrix, (width, w1.shape[1]), "[vocabulary, rank]")
        require_contiguous(f"{op}: {name}", matrix)
    require_dtype(f"{op}: semaphores", semaphores, torch.int32)
    require_contiguous(f"{op}: semaphores", semaphores)
    require_range(f"{op}: number of semaphores", semaphores.numel(), semaphores_for(requests), 2**31 - 1)
    require_same_device("base", base, anchor=anchor, w1=w1, w2=w2, semaphores=semaphores)
