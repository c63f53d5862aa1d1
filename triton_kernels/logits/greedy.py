"""The largest logit of each row, and whether a token can be sampled from the row, in one read of the logits.

``tokens[b] = argmax_v logits[b, v]``, the lowest index of equal ones, as ``torch.argmax`` has it. A row that holds NaN
or +inf, or nothing but -inf, has failed: it becomes zeros, and its token the mark that the caller gives.

A program reads a part of a row and stores its largest value with its index. Of a row's programs the one that comes last
compares the parts. A launch has about :data:`PROGRAMS` programs: few rows are spread over the chip, too.

Supports fp32 and bf16, any number of rows and columns, and rows that lie apart. Floor: the logits read once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks

from ..common.integers import cdiv
from ..common.overlap import OVERLAPPED, after_previous

BLOCK = 2048
"""Logits that a program reads at once, 8 a thread."""
WARPS = 8
MAX_PARTS = 64
"""Most programs of a row; the last of them compares as many values at once."""
PROGRAMS = 512
"""Programs of a launch, about: four on each multiprocessor of an H200."""
NEVER = tl.constexpr(2**31 - 1)
"""Above any index."""


@triton.jit(do_not_specialize=["blocks"])
def _greedy_tokens(
    logits, values, places, semaphores, tokens, failed, blocks, width, row_stride,
    MARK: tl.constexpr, MAX_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, parts of ``blocks`` blocks of columns).

    values: fp32 [rows, parts], places: int32 [rows, parts], workspace. failed: uint8 [rows].
    """
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    at = logits + row * row_stride
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    for block in range(part * blocks, (part + 1) * blocks):
        column = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(at + column, mask=column < width, other=float("-inf")).to(tl.float32)
        value = tl.where(value == value, value, float("inf"))  # NaN fails a row, as +inf does
        larger = value > best
        best, place = tl.where(larger, value, best), tl.where(larger, column, place)
    largest = tl.max(best, axis=0)
    tl.store(values + row * parts + part, largest)
    tl.store(places + row * parts + part, tl.min(tl.where(best == largest, place, NEVER), axis=0))
    # All stores of the program's warps must be in memory before the semaphore is raised.
    tl.debug_barrier()
    if tl.atomic_add(semaphores + row, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(semaphores + row, 0)
        others = tl.arange(0, MAX_PARTS)
        at_part, there = row * parts + others, others < parts
        # Past L1, because other programs have stored them.
        of_parts = tl.load(values + at_part, mask=there, other=float("-inf"), cache_modifier=".cg")
        places_of_parts = tl.load(places + at_part, mask=there, other=NEVER, cache_modifier=".cg")
        of_row = tl.max(of_parts, axis=0)
        token = tl.min(tl.where(of_parts == of_row, places_of_parts, NEVER), axis=0)
        fails = (of_row == float("inf")) | (of_row == float("-inf"))
        tl.store(tokens + row, tl.where(fails, MARK, token).to(tl.int64))
        tl.store(failed + row, fails.to(tl.uint8))
        if fails:
            for block in range(tl.cdiv(width, BLOCK)):
                column = block * BLOCK + tl.arange(0, BLOCK)
                zero = tl.zeros((BLOCK,), tl.float32).to(logits.dtype.element_ty)
                tl.store(at + column, zero, mask=column < width)


def greedy_tokens(logits: Tensor, semaphores: Tensor, *, mark: int) -> tuple[Tensor, Tensor]:
    """Take each row's largest logit; rows that cannot be sampled from become zeros, in place.

    Args:
        logits: fp32 or bf16 [B, V], the last dimension contiguous, V at least 1.
        semaphores: int32 [B or more], contiguous. Zero between launches, which leave them so.
        mark: the token of a row that has failed.

    Returns:
        (int64 [B], the tokens; bool [B], which rows have failed).

    Rounding: none.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit, or there are too few semaphores.
    """
    op = "greedy_tokens"
    checks.require_dimensions(f"{op}: logits", logits, 2, "[B, V]")
    checks.require_dtype(f"{op}: logits", logits, torch.float32, torch.bfloat16)
    checks.require_rows(f"{op}: logits", logits)
    rows, width = logits.shape
    checks.require_range(f"{op}: columns", width, 1, 2**31 - BLOCK - 1)
    checks.require_dtype(f"{op}: semaphores", semaphores, torch.int32)
    checks.require_contiguous(f"{op}: semaphores", semaphores)
    checks.require_range(f"{op}: number of semaphores", semaphores.numel(), rows, math.inf)
    checks.require_same_device("logits", logits, semaphores=semaphores)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    failed = logits.new_empty(rows, dtype=torch.uint8)
    if rows:
        blocks = cdiv(cdiv(width, BLOCK), _most_parts(rows))
        parts = cdiv(width, blocks * BLOCK)
        _greedy_tokens[(rows, parts)](
            logits,
            logits.new_empty(rows * parts, dtype=torch.float32),
            logits.new_empty(rows * parts, dtype=torch.int32),
            semaphores,
            tokens,
            failed,
            blocks,
            width,
            logits.stride(0),
            mark,
            MAX_PARTS,
            BLOCK,
            num_warps=WARPS,
            **OVERLAPPED,
        )
    return tokens, failed.view(torch.bool)


def _most_parts(rows: int) -> int:
    """Programs that a row may have."""
    return max(1, min(MAX_PARTS, PROGRAMS // rows))
