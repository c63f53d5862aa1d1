"""Prepare queries of the lightning indexer in the format of the cached keys (specification §5).

Of each head of a raw projection, RoPE rotates the last 64 of 128 values; then the Hadamard matrix rotates the whole
head, which is packed as E4M3 with one scale (``entries.index_entry``). The scale is positive, so it is multiplied into
the head's weight. The kernel of ``scores`` prepares its query itself where few programs share a query; otherwise
:func:`prepare_queries` is a launch of its own.

Supports heads of 128 values only. Floor: see :func:`prepare_queries`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks
from nvfp4_sgl.limits import ROPE_DIM

from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rope import require_cos_sin, rotate
from ..common.rounding import UNFUSED, round_to_bf16, widen
from ..entries.index_entry import DIM, hadamard128, pack_index_row


@triton.jit
def _load_half_heads(q, head, stride, heads, RUN: tl.constexpr):
    """Load 64 dimensions of heads (int [R]) from ``q`` on: [64 / RUN, R, RUN], 0 for a head beyond ``heads``."""
    dim = tl.arange(0, 64 // RUN)[:, None, None] * RUN + tl.arange(0, RUN)[None, None, :]
    at = q + head.to(tl.int64)[None, :, None] * stride + dim
    return tl.load(at, mask=(head < heads)[None, :, None], other=0.0)


@triton.jit
def _as_bf16(x):
    """Round ``x``, bf16 or fp32, to bf16, as fp32."""
    if x.dtype == tl.bfloat16:
        return widen(x)
    else:
        return widen(round_to_bf16(x).to(tl.bfloat16))


@triton.jit
def prepare_heads(q, q_head, weights, cos_sin, factor, head, heads, PACKED: tl.constexpr, RUN: tl.constexpr):
    """Prepare the query [R, 128] and the weights, fp32 [R], of heads of one token. Launch with ``UNFUSED``.

    Args:
        q, weights, cos_sin: pointers to the token's rows.
        q_head: stride of heads in ``q``, in elements.
        factor: of the weights.
        head: int [R], the heads; R a power of two.
        heads: the token's number of heads; queries and weights of heads beyond it are zero.
        PACKED: return an E4M3 query, its scale in the weight; else a bf16 query, rotated by RoPE only.
        RUN: neighbouring dimensions that go to neighbouring threads, 16 or 32. With ``8 · threads / R`` a thread holds
            one head at the same few of every RUN dimensions, and all but one or two of the Hadamard matrix's
            butterflies stay within the thread. See :func:`run_length`.
    """
    HEADS: tl.constexpr = head.shape[0]
    RUNS: tl.constexpr = 64 // RUN
    plain, rotary = _load_half_heads(q, head, q_head, heads, RUN), _load_half_heads(q + 64, head, q_head, heads, RUN)
    # Without the barrier the compiler loads one half only when it is done with the other.
    tl.debug_barrier()
    even, odd = tl.split(tl.reshape(_as_bf16(rotary), (RUNS, HEADS, RUN // 2, 2)))
    # Load cos and sin again for each head: a thread then holds them beside its values, and no value moves.
    dim = tl.arange(0, RUNS)[:, None, None] * RUN + tl.arange(0, RUN)[None, None, :]
    cos_sin_pairs = tl.load(cos_sin + dim + tl.zeros((RUNS, HEADS, RUN), tl.int32))
    cos, sin = tl.split(tl.reshape(cos_sin_pairs, (RUNS, HEADS, RUN // 2, 2)))
    even, odd = rotate(even, odd, cos, sin)
    rotary = tl.reshape(tl.join(_as_bf16(even), _as_bf16(odd)), (RUNS, HEADS, RUN))
    halves = tl.join(_as_bf16(plain), rotary)
    values = tl.reshape(tl.permute(halves, (1, 3, 0, 2)), (HEADS, 128))
    weight = tl.load(weights + head, mask=head < heads, other=0.0).to(tl.float32) * factor
    if PACKED:
        code, scale = pack_index_row(hadamard128(values))
        return code.to(tl.float8e4nv, bitcast=True), weight * scale
    else:
        return values.to(tl.bfloat16), weight


def run_length(heads: int, warps: int) -> int:
    """Return ``RUN`` for programs of ``heads`` heads and ``warps`` warps."""
    return 16 if 8 * 32 * warps // heads <= 16 else 32


@triton.jit
def _query_kernel(
    q,
    q_token,
    q_head,
    weights,
    weights_token,
    cos_sin,
    factor,
    queries,
    scaled,
    heads,
    HEADS: tl.constexpr,
    PACKED: tl.constexpr,
    RUN: tl.constexpr,
):
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = head < heads
    token_arguments = (q + token * q_token, q_head, weights + token * weights_token, cos_sin + token * 64)
    query, weight = prepare_heads(*token_arguments, factor, head, heads, PACKED, RUN)
    out = queries + (token * heads + head)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out, query, mask=inside[:, None])
    tl.store(scaled + token * heads + head, weight, mask=inside)


def check_queries(q: Tensor, weights: Tensor, cos_sin: Tensor) -> None:
    """Refuse what :func:`prepare_heads` cannot read, by ``OperandTypeError`` or ``OperandValueError``; metadata only.

    The arguments are those of :func:`prepare_queries`.
    """
    checks.require_dimensions("q", q, 3, "[T, H, 128]")
    tokens, heads = q.shape[:2]
    checks.require_shape("q", q, (tokens, heads, DIM), "[T, H, 128]")
    checks.require_dtype("q", q, torch.bfloat16, torch.float32)
    checks.require_rows("q", q)
    checks.require_shape("weights", weights, (tokens, heads), "[T, H]")
    checks.require_dtype("weights", weights, torch.bfloat16, torch.float32)
    checks.require_rows("weights", weights)
    checks.require_one_of("rope_dim of cos_sin", require_cos_sin("cos_sin", cos_sin, tokens, DIM), (ROPE_DIM,))
    checks.require_same_device("q", q, weights=weights, cos_sin=cos_sin)


def prepare_queries(
    q: Tensor, weights: Tensor, cos_sin: Tensor, factor: float, queries: Tensor, scaled: Tensor
) -> None:
    """Prepare queries in the format of the cached keys, and scale the weights of their heads (specification §5).

    Args:
        q: bf16 or fp32 [T, H, 128], the projection, the last dimension contiguous.
        weights: bf16 or fp32 [T, H], the projection, the last dimension contiguous.
        cos_sin: fp32 [T, 64], contiguous, from ``common.rope.rope_cos_sin``.
        factor: of the weights, ``128**-0.5 * H**-0.5``.
        queries: written. float8_e4m3fn [T, H, 128], contiguous, for keys in the format of ``entries.index_entry``; or
            bf16, for exact keys.
        scaled: fp32 [T, H], contiguous, written.

    Rounding: q to bf16; its last 64 values rotated in fp32 and rounded to bf16; Hadamard rotation in fp32 and E4M3
    codes, bit-equal to ``index_entry``. ``scaled`` is fp32(fp32(weights · factor) · the query's scale). Exact queries
    (bf16) are rotated by RoPE only, and their weights multiplied by ``factor`` only. Floor: q, weights, cos_sin,
    queries and scaled once.

    Raises:
        OperandTypeError: a dtype is not one of the above.
        OperandValueError: a shape, stride or device is not as above.
    """
    _check(q, weights, cos_sin, queries, scaled)
    tokens, heads = q.shape[:2]
    if tokens and heads:
        per_program = min(16, next_power_of_2(heads))
        _query_kernel[(tokens, cdiv(heads, per_program))](
            q,
            q.stride(0),
            q.stride(1),
            weights,
            weights.stride(0),
            cos_sin,
            factor,
            queries,
            scaled,
            heads,
            per_program,
            queries.dtype != torch.bfloat16,
            run_length(per_program, 1),
            num_warps=1,
            **UNFUSED,
            **OVERLAPPED,
        )


@checks.once
def _check(q: Tensor, weights: Tensor, cos_sin: Tensor, queries: Tensor, scaled: Tensor) -> None:
    """Refuse what :func:`prepare_queries` cannot read or write; metadata only."""
    check_queries(q, weights, cos_sin)
    tokens, heads = q.shape[:2]
    checks.require_shape("queries", queries, (tokens, heads, DIM), "[T, H, 128]")
    checks.require_dtype("queries", queries, torch.float8_e4m3fn, torch.bfloat16)
    checks.require_contiguous("queries", queries)
    checks.require_shape("scaled", scaled, (tokens, heads), "[T, H]")
    checks.require_dtype("scaled", scaled, torch.float32)
    checks.require_contiguous("scaled", scaled)
    checks.require_same_device("q", q, queries=queries, scaled=scaled)
