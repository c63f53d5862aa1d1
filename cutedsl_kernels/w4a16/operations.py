"""GEMMs of NVFP4 weights with bf16 activations on Hopper's tensor cores: the operations that callers use.

Each writes into ``out``, which it allocates unless given. Weights are expanded to bf16, which is exact; sums are fp32;
then ``acc * alpha``, SwiGLU if any, and one rounding to the output dtype.

Programmatic dependent launch: a dense GEMM loads its weights before the kernel in front of it has ended, so that kernel
may not write them (``launcher.CudaLauncher``). The same holds for the weights, offsets and counts of an experts' GEMM
with ``counts_ahead``.

Limits: K a multiple of 64; the address of every operand, every stride, and a row of outputs a multiple of 16 bytes
(features in multiples of 8 for bf16, 4 for fp32); gated features in multiples of 8; at most 512 experts.

The GEMMs raise OperandTypeError if a dtype does not fit; OperandValueError if a shape, stride, alignment, device or
value does not; ArchitectureError on other devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError

from .. import launcher, plan
from ..plan import w4a16_gathers
from . import custom_ops  # noqa: F401  registers torch.ops.nvfp4_sgl
from .operand import TiledWeights

__all__ = [
    "expert_down",
    "expert_gate_up",
    "grouped_product",
    "product",
    "w4a16_expert_token_tile_for",
    "w4a16_gathers",
]


def w4a16_expert_token_tile_for(pairs: int, experts: int) -> int:
    """The token tile to align offsets to, if ``experts`` share ``pairs`` token-expert pairs."""
    return plan.w4a16_expert_token_tile_for(pairs, experts, launcher.current().pin)


def product(
    tokens: Tensor,
    weights: TiledWeights,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    copies: Sequence[Tensor] = (),
) -> Tensor:
    """Compute the dense GEMM ``tokens @ weights.T``.

    Args:
        tokens: bf16 [T, K], the last dimension contiguous.
        weights: ``TiledWeights.dense`` [F, K].
        out: bf16 or fp32 [T, F], the last dimension contiguous; allocated unless given.
        dtype: dtype of the result if ``out`` is not given.
        copies: none, or 1, 3 or 7 tensors that get the same values as ``out``, which is then given, bf16 and of their
            shape and strides. They may lie in memory of other GPUs that is mapped to this one. Stores arrive in any
            order, and no signal says when they have.

    Returns:
        ``out``.

    A bf16 result is never 0xFFFF, so that a reader may take that value for one that has not arrived: any NaN is stored
    as 0x7FFF.
    """
    if out is None:
        if copies:
            raise OperandValueError(f"product: out: expected a tensor for {len(copies)} copies to be like, found None")
        out = tokens.new_empty((tokens.shape[0], weights.features), dtype=dtype)
    torch.ops.nvfp4_sgl.w4a16_product(tokens, weights.tiles, weights.scale, out, list(copies))
    return out


def grouped_product(
    tokens: Tensor, weights: TiledWeights, *, out: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute the block-diagonal GEMM of the attention output, ``out[t, g] = weights[g] @ tokens[t, g]``.

    Args:
        tokens: bf16 [T, G, K]: rows and groups may have any stride of a multiple of 16 bytes.
        weights: ``TiledWeights.grouped`` [G, F, K].
        out: bf16 or fp32 [T, G, F], the last dimension contiguous; allocated unless given.
        dtype: dtype of the result if ``out`` is not given.

    Returns:
        ``out``.
    """
    if out is None:
        out = tokens.new_empty((*tokens.shape[:2], weights.features), dtype=dtype)
    torch.ops.nvfp4_sgl.w4a16_product(tokens, weights.tiles, weights.scale, out, [])
    return out


def expert_gate_up(
    tokens: Tensor,
    token_tile: int,
    offsets: Tensor,
    counts: Tensor,
    weights: TiledWeights,
    limit: float,
    *,
    sources: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the gate and up projections of each row by its expert and their clamped SwiGLU.

    Args:
        tokens: bf16 [R, K], rows sorted by expert; or with ``sources`` [T, K], T up to R, in any order.
        token_tile: what the experts' first rows are multiples of: :func:`w4a16_expert_token_tile_for`.
        offsets, counts: int32 [E], the first row and the rows of each expert.
        weights: ``TiledWeights.allocate_gated_experts``, E matrices of 2 I rows.
        limit: the SwiGLU clamp; part of the kernel's code.
        sources: int32 [R], the row of ``tokens`` of each sorted row; negative for a row without a token. R is a
            multiple of ``token_tile``, which must be one that gathers (:func:`w4a16_gathers`).
        out: bf16 [R, I]; allocated unless given. Rows that belong to no expert's tiles are left as they are.

    Returns:
        ``out``.

    Rounding: SwiGLU is computed from the fp32 sums; one rounding to bf16.
    """
    if out is None:
        rows = tokens.shape[0] if sources is None else sources.shape[0]
        out = tokens.new_empty((rows, weights.features // 2))
    arguments = (tokens, token_tile, offsets, counts, weights.tiles, weights.scale)
    torch.ops.nvfp4_sgl.w4a16_experts(*arguments, limit, sources, False, out)
    return out


def expert_down(
    tokens: Tensor,
    token_tile: int,
    offsets: Tensor,
    counts: Tensor,
    weights: TiledWeights,
    *,
    out: Tensor | None = None,
    counts_ahead: bool = False,
) -> Tensor:
    """Compute the down projection of each row by its expert, or any other without SwiGLU.

    Args:
        tokens, token_tile, offsets, counts: as in :func:`expert_gate_up`.
        weights: ``TiledWeights.allocate_experts`` [E, F, K].
        out: bf16 or fp32 [R, F]; bf16, allocated, unless given. Rows that belong to no expert's tiles are left as they
            are.
        counts_ahead: read offsets and counts, and load the first weights, before the launch in front has ended. That
            launch must have waited for the one that wrote them before it triggers this one, as :func:`expert_gate_up`
            and the Triton kernels do.

    Returns:
        ``out``.
    """
    if out is None:
        out = tokens.new_empty((tokens.shape[0], weights.features))
    arguments = (tokens, token_tile, offsets, counts, weights.tiles, weights.scale)
    torch.ops.nvfp4_sgl.w4a16_experts(*arguments, None, None, counts_ahead, out)
    return out
