"""Rotary position embedding on the last dimensions of a head, in interleaved pairs (DEEPSEEK_V4.md §3.1, §3.2).

Pair i, elements (2i, 2i+1) of the tail, is turned by the angle ``fp32(position) * frequencies[i]``. Every layer of a
pass asks for the same angles, so they are evaluated once: :func:`rope_turns` fills a table *turns*, fp32
[T, rope_dim], of (cos, sin) by pair, one row for each token of the pass (or each entry of a compressor), and every
kernel that rotates reads its token's row. No table of all positions is kept.

Rounding: the rotation is two fp32 products and their fp32 sum or difference, each rounded (fusion is off).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from .rounding import UNFUSED, round_for

HEADS_A_PROGRAM = 32
"""Of ``apply_rope_``, at most: a program's turns serve all its heads."""


@triton.jit
def load_turns(turns_ptr, PAIRS: tl.constexpr):
    """(cos, sin), fp32 [PAIRS] each, of the row of turns at ``turns_ptr``."""
    return tl.split(tl.reshape(tl.load(turns_ptr + tl.arange(0, 2 * PAIRS)), (PAIRS, 2)))


@triton.jit
def rotate(even, odd, cos, sin):
    """The pairs (even, odd) turned forward; give −sin to turn back."""
    return even * cos - odd * sin, even * sin + odd * cos


@triton.jit
def mean_square_scale(square_sum, count, eps):
    """``1 / sqrt(mean + eps)``, every step correctly rounded."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square_sum, count) + eps))


@triton.jit
def _turns_kernel(positions, frequencies, out, tokens, PAIRS: tl.constexpr, TOKENS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = (token < tokens)[:, None]
    position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.float32)
    pair = tl.arange(0, PAIRS)
    angle = position[:, None] * tl.load(frequencies + pair)[None, :]
    turns = tl.reshape(tl.join(tl.cos(angle), tl.sin(angle)), (TOKENS, 2 * PAIRS))
    offset = token.to(tl.int64)[:, None] * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)[None, :]
    tl.store(out + offset, turns, mask=inside)


def rope_turns(positions: Tensor, frequencies: Tensor, out: Tensor) -> Tensor:
    """Fill the table that the rotations of a pass read.

    Args:
        positions: int32 or int64 [T], absolute, 0 to 2^24 (exact in fp32).
        frequencies: fp32 [rope_dim/2], from the reference's ``inverse_frequencies``; a power of two.
        out: fp32 [T, rope_dim], (cos, sin) by pair.

    Returns:
        ``out``.

    The angle is one fp32 product; cos and sin are of that angle, within 2 units in the last place of 1, also where
    the angle is a million radians. Floor: 4·T·rope_dim bytes.
    """
    checks.require_dimensions("positions", positions, 1, "[T]")
    checks.require_dtype("positions", positions, torch.int32, torch.int64)
    checks.require_contiguous("positions", positions)
    checks.require_dtype("frequencies", frequencies, torch.float32)
    checks.require_contiguous("frequencies", frequencies)
    tokens, pairs = positions.shape[0], frequencies.numel()
    checks.require_shape("out", out, (tokens, 2 * pairs), "[T, rope_dim]")
    require_turns("out", out, tokens, 2 * pairs)
    checks.require_same_device("positions", positions, frequencies=frequencies, out=out)
    if tokens:
        block = 16
        _turns_kernel[(triton.cdiv(tokens, block),)](positions, frequencies, out, tokens, pairs, block, **UNFUSED)
    return out


@triton.jit
def _apply_rope_kernel(
    x, turns, heads, x_token, x_head, tail, PAIRS: tl.constexpr, HEADS: tl.constexpr, INVERSE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cos, sin = load_turns(turns + token * (2 * PAIRS), PAIRS)
    if INVERSE:
        sin = -sin
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (head < heads)[:, None]
    at = x + token * x_token + head.to(tl.int64)[:, None] * x_head + tail + tl.arange(0, 2 * PAIRS)[None, :]
    pairs = tl.reshape(tl.load(at, mask=inside, other=0.0).to(tl.float32), (HEADS, PAIRS, 2))
    even, odd = tl.split(pairs)
    even, odd = rotate(even, odd, cos[None, :], sin[None, :])
    turned = tl.reshape(tl.join(even, odd), (HEADS, 2 * PAIRS))
    tl.store(at, round_for(turned, x), mask=inside)


def apply_rope_(x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last rope_dim dimensions of ``x``, in place; the others are neither read nor written.

    Args:
        x: bf16 or fp32 [T, H, n], n >= rope_dim, the last dimension contiguous.
        turns: fp32 [T, rope_dim] from :func:`rope_turns`.
        inverse: turn back, as the attention output is, at the query's position.

    Returns:
        ``x``.

    Rounding: fp32 rotation, one rounding to ``x``'s dtype. Floor: T·H·rope_dim read and written once, the turns read.
    """
    checks.require_dimensions("x", x, 3, "[T, H, n]")
    checks.require_dtype("x", x, torch.bfloat16, torch.float32)
    checks.require_rows("x", x)
    tokens, heads, width = x.shape
    rope = require_turns("turns", turns, tokens, width)
    checks.require_same_device("x", x, turns=turns)
    if tokens and heads:
        per_program = min(HEADS_A_PROGRAM, triton.next_power_of_2(heads))
        grid = (tokens, triton.cdiv(heads, per_program))
        _apply_rope_kernel[grid](
            x,
            turns,
            heads,
            x.stride(0),
            x.stride(1),
            width - rope,
            rope // 2,
            per_program,
            inverse,
            # No element in two warps, of which one might store what the other has yet to load.
            num_warps=max(1, per_program * rope // (32 * 16)),
            **UNFUSED,
        )
    return x


@triton.jit
def _norm_rope_kernel(
    x,
    weight,
    turns,
    out,
    eps,
    heads,
    x_token,
    x_head,
    out_token,
    out_head,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    TAIL: tl.constexpr = WIDTH - 2 * PAIRS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (head < heads)[:, None]
    rows = x + token * x_token + head.to(tl.int64)[:, None] * x_head
    out_rows = out + token * out_token + head.to(tl.int64)[:, None] * out_head
    column = tl.arange(0, PADDED)[None, :]
    values = tl.load(rows + column, mask=inside & (column < WIDTH), other=0.0).to(tl.float32)
    rotary = tl.arange(0, 2 * PAIRS)[None, :]
    tail = tl.load(rows + TAIL + rotary, mask=inside, other=0.0).to(tl.float32)

    scale = mean_square_scale(tl.sum(values * values, axis=1), WIDTH * 1.0, eps)[:, None]
    values, tail = values * scale, tail * scale
    if WEIGHTED:
        values *= tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        tail *= tl.load(weight + TAIL + rotary).to(tl.float32)
    cos, sin = load_turns(turns + token * (2 * PAIRS), PAIRS)
    even, odd = tl.split(tl.reshape(tail, (HEADS, PAIRS, 2)))
    even, odd = rotate(even, odd, cos[None, :], sin[None, :])
    tl.store(out_rows + column, round_for(values, out), mask=inside & (column < TAIL))
    turned = tl.reshape(tl.join(even, odd), (HEADS, 2 * PAIRS))
    tl.store(out_rows + TAIL + rotary, round_for(turned, out), mask=inside)


def rms_norm_rope(x: Tensor, weight: Tensor | None, eps: float, turns: Tensor, out: Tensor) -> Tensor:
    """Root-mean-square normalisation of each head, then the rotation of its tail.

    Args:
        x: bf16 or fp32 [T, H, n], the last dimension contiguous.
        weight: bf16 or fp32 [n], or ``None`` (queries).
        eps: added to the mean square.
        turns: fp32 [T, rope_dim] from :func:`rope_turns`.
        out: bf16 or fp32 [T, H, n], the last dimension contiguous; may be ``x``.

    Returns:
        ``out``.

    Rounding: everything in fp32, one rounding to ``out``'s dtype; the sum of squares in an order of its own, the same
    for every T and H. Floor: ``x`` read and ``out`` written once.
    """
    checks.require_dimensions("x", x, 3, "[T, H, n]")
    checks.require_dtype("x", x, torch.bfloat16, torch.float32)
    checks.require_rows("x", x)
    checks.require_dtype("out", out, torch.bfloat16, torch.float32)
    checks.require_shape("out", out, x.shape, "x's shape")
    checks.require_rows("out", out)
    tokens, heads, width = x.shape
    rope = require_turns("turns", turns, tokens, width)
    if weight is not None:
        require_norm_weight(weight, width)
    checks.require_same_device("x", x, weight=weight, turns=turns, out=out)
    if tokens and heads:
        per_program = 4
        grid = (tokens, triton.cdiv(heads, per_program))
        _norm_rope_kernel[grid](
            x,
            x if weight is None else weight,
            turns,
            out,
            eps,
            heads,
            *x.stride()[:2],
            *out.stride()[:2],
            width,
            triton.next_power_of_2(width),
            rope // 2,
            per_program,
            weight is not None,
            **UNFUSED,
        )
    return out


def require_norm_weight(weight: Tensor, width: int) -> None:
    checks.require_shape("weight", weight, (width,), "[n]")
    checks.require_dtype("weight", weight, torch.bfloat16, torch.float32)
    checks.require_contiguous("weight", weight)


def require_turns(name: str, turns: Tensor, tokens: int, width: int) -> int:
    """rope_dim of a table of turns that fits ``tokens`` heads of ``width``."""
    checks.require_dimensions(name, turns, 2, "[T, rope_dim]")
    rope = turns.shape[1]
    checks.require_shape(name, turns, (tokens, rope), "[T, rope_dim]")
    checks.require_dtype(name, turns, torch.float32)
    checks.require_contiguous(name, turns)
    checks.require_power_of_two(name, "rope_dim", rope)
    checks.require_range(f"rope_dim of {name}", rope, 2, width)
    return rope
