"""Rotary position embedding on the last dimensions of a head, in interleaved pairs (specification §3.1, §3.2).

Pair i, elements (2i, 2i+1) of the tail, is rotated by the angle ``fp32(position) * frequencies[i]``. Every layer of a
pass uses the same angles, so their cos and sin are computed once a pass: :func:`rope_cos_sin` fills a table
``cos_sin``, fp32 [T, rope_dim], of (cos, sin) by pair, with one row for each token of the pass (or each entry of a
compressor). Every kernel that rotates reads its token's row. There is no table of all positions.

Rounding: a rotated element is two fp32 multiplications and a sum or difference, each rounded, whether or not the launch
fuses multiply-adds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks

from .integers import cdiv
from .overlap import OVERLAPPED, after_previous
from .rounding import UNFUSED, product


@triton.jit
def load_cos_sin(cos_sin_ptr, PAIRS: tl.constexpr):
    """Load (cos, sin), fp32 [PAIRS] each, from the row of the ``cos_sin`` table at ``cos_sin_ptr``."""
    return tl.split(tl.reshape(tl.load(cos_sin_ptr + tl.arange(0, 2 * PAIRS)), (PAIRS, 2)))


@triton.jit
def load_cos_sin_rows(cos_sin_ptrs, mask, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Load (cos, sin), fp32 [ROWS, PAIRS] each, from rows of the ``cos_sin`` table at [ROWS] addresses; 0 if masked."""
    at = cos_sin_ptrs[:, None] + tl.arange(0, 2 * PAIRS)[None, :]
    return tl.split(tl.reshape(tl.load(at, mask=mask[:, None], other=0.0), (ROWS, PAIRS, 2)))


@triton.jit
def rotate(even, odd, cos, sin):
    """Rotate the pairs (even, odd) forward, without fused multiply-add; pass −sin to rotate back."""
    return product(even, cos) - product(odd, sin), product(even, sin) + product(odd, cos)


@triton.jit
def mean_square_scale(square_sum, count, eps):
    """Compute ``1 / sqrt(square_sum / count + eps)`` in fp32, every step correctly rounded."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square_sum, count) + eps))


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _cos_sin_kernel(positions, frequencies, out, tokens, PAIRS: tl.constexpr, TOKENS: tl.constexpr):
    after_previous()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = (token < tokens)[:, None]
    position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.float32)
    pair = tl.arange(0, PAIRS)
    angle = position[:, None] * tl.load(frequencies + pair)[None, :]
    cos_sin = tl.reshape(tl.join(tl.cos(angle), tl.sin(angle)), (TOKENS, 2 * PAIRS))
    offset = token.to(tl.int64)[:, None] * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)[None, :]
    tl.store(out + offset, cos_sin, mask=inside)


def rope_cos_sin(positions: Tensor, frequencies: Tensor, out: Tensor) -> Tensor:
    """Fill the table of cos and sin that the rotations of a pass read (specification §3.1).

    Args:
        positions: int32 or int64 [T], contiguous; absolute positions, 0 to 2^24 (exact in fp32).
        frequencies: fp32 [rope_dim/2], contiguous, radians per position, from the reference's ``inverse_frequencies``;
            rope_dim/2 is a power of two.
        out: fp32 [T, rope_dim], contiguous, written: (cos, sin) by pair.

    Returns:
        ``out``.

    Rounding: the angle is one fp32 product; cos and sin of that angle are within 2 units in the last place of 1, even
    at a million radians. Floor: 4·T·rope_dim bytes.

    Raises:
        OperandTypeError: a dtype is not one of the above.
        OperandValueError: a shape, contiguity or device is not as above, or rope_dim is not a power of two of at least
            2.
    """
    _check_table(positions, frequencies, out)
    tokens, pairs = positions.shape[0], frequencies.numel()
    if tokens:
        tokens_per_program = 16
        _cos_sin_kernel[(cdiv(tokens, tokens_per_program),)](
            positions, frequencies, out, tokens, pairs, tokens_per_program, **UNFUSED, **OVERLAPPED
        )
    return out


def require_norm_weight(weight: Tensor, width: int) -> None:
    """Refuse a norm weight that is not bf16 or fp32 [``width``], contiguous; metadata only."""
    checks.require_shape("weight", weight, (width,), "[n]")
    checks.require_dtype("weight", weight, torch.bfloat16, torch.float32)
    checks.require_contiguous("weight", weight)


def require_cos_sin(name: str, cos_sin: Tensor, tokens: int, width: int) -> int:
    """Check a table fp32 [``tokens``, rope_dim] of cos and sin for heads of ``width`` elements; return its rope_dim.

    Metadata only. rope_dim must be a power of two from 2 to ``width``.
    """
    checks.require_dimensions(name, cos_sin, 2, "[T, rope_dim]")
    rope = cos_sin.shape[1]
    checks.require_shape(name, cos_sin, (tokens, rope), "[T, rope_dim]")
    checks.require_dtype(name, cos_sin, torch.float32)
    checks.require_contiguous(name, cos_sin)
    checks.require_power_of_two(name, "rope_dim", rope)
    checks.require_range(f"rope_dim of {name}", rope, 2, width)
    return rope


@checks.once
def _check_table(positions: Tensor, frequencies: Tensor, out: Tensor) -> None:
    """Refuse what :func:`rope_cos_sin` cannot read or write; metadata only."""
    checks.require_dimensions("positions", positions, 1, "[T]")
    checks.require_dtype("positions", positions, torch.int32, torch.int64)
    checks.require_contiguous("positions", positions)
    checks.require_dtype("frequencies", frequencies, torch.float32)
    checks.require_contiguous("frequencies", frequencies)
    tokens, pairs = positions.shape[0], frequencies.numel()
    checks.require_shape("out", out, (tokens, 2 * pairs), "[T, rope_dim]")
    require_cos_sin("out", out, tokens, 2 * pairs)
    checks.require_same_device("positions", positions, frequencies=frequencies, out=out)
