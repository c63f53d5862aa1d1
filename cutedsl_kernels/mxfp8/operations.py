"""GEMMs of FP8 weights with MXFP8 activations on SM100's tensor cores: the operations that callers use.

Each takes :class:`MxFp8Rows` (quantised activations) and :class:`MxFp8Weights` and writes into ``out``, which it
allocates unless given. Sums are fp32; then SwiGLU if any, and one rounding to the output dtype.

Limits: K a multiple of 32; the address of every operand, every stride of codes and outputs, and a row of outputs a
multiple of 16 bytes (features in multiples of 8 for bf16, 4 for fp32); gated features in multiples of 16.

The GEMMs raise OperandTypeError if a dtype does not fit; OperandValueError if a shape, stride, alignment, device or
value does not; ArchitectureError on other devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.formats.rows import MxFp8Rows

from ..w4a4.operations import token_tile_for
from . import custom_ops  # noqa: F401  registers torch.ops.nvfp4_sgl
from .operand import MxFp8Weights

__all__ = ["gate_up", "product", "token_tile_for"]


def product(
    rows: MxFp8Rows, weights: MxFp8Weights, *, out: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute the dense GEMM ``rows @ weights.T``, or the block-diagonal one, ``out[t, g] = weights[g] @ rows[t, g]``.

    Args:
        rows: [T, K]; or [T, G, K], rows and groups with any stride of a multiple of 16 bytes.
        weights: ``MxFp8Weights.of`` [F, K] or [G, F, K].
        out: bf16 or fp32 [T, F] or [T, G, F], the last dimension contiguous; allocated unless given.
        dtype: dtype of the result if ``out`` is not given.

    Returns:
        ``out``.
    """
    if out is None:
        out = rows.codes.new_empty((*rows.codes.shape[:-1], weights.features), dtype=dtype)
    torch.ops.nvfp4_sgl.mxfp8_product(*_operands(rows, weights), out)
    return out


def gate_up(
    rows: MxFp8Rows,
    weights: MxFp8Weights,
    limit: float,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute the gate and up projections of one expert and their clamped SwiGLU.

    Args:
        rows: [T, K].
        weights: ``MxFp8Weights.gated``, 2 I rows.
        limit: the SwiGLU clamp, from 0.2785 to 2^60; part of the kernel's code.
        out: bf16 or fp32 [T, I], the last dimension contiguous; allocated unless given.
        dtype: dtype of the result if ``out`` is not given.

    Returns:
        ``out``.

    Rounding: SwiGLU is computed from the fp32 sums; one rounding to the output dtype.
    """
    if out is None:
        out = rows.codes.new_empty((rows.codes.shape[0], weights.features // 2), dtype=dtype)
    torch.ops.nvfp4_sgl.mxfp8_gate_up(*_operands(rows, weights), limit, out)
    return out


def _operands(rows: MxFp8Rows, weights: MxFp8Weights) -> tuple[Tensor, Tensor, int, Tensor, Tensor, Tensor]:
    """Operands as the operators take them."""
    return rows.codes, rows.block_scales, rows.token_tile, weights.codes, weights.block_scales, weights.ones
