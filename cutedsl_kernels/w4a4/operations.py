"""NVFP4 GEMMs on SM100's tensor cores: the operations that callers use.

Each takes :class:`Rows` (quantised activations) and :class:`Weights` and writes into ``out``, which it allocates unless
given. Sums are fp32; then ``(acc * row_scale) * alpha``, the activation if any, the row weight if any, and one rounding
to the output type.

Programmatic dependent launch: a GEMM may load weights before the kernel in front of it has ended, so that that kernel
may not write them (``launcher.CudaLauncher``). The same holds for the offsets and counts of experts with
``counts_ahead``.

Limits: K a multiple of 64; the address of every operand, every stride of codes and outputs, and a row of outputs a
multiple of 16 bytes (features in multiples of 8 for bf16, 4 for fp32, 32 for NVFP4); gated features in multiples of 16;
at most 512 experts.

The GEMMs raise OperandTypeError if a dtype does not fit, or if an argument that is needed is absent (or the reverse);
OperandValueError if a shape, stride, alignment, device or value does not fit; ArchitectureError on other devices.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nvfp4_sgl.formats.nvfp4 import swiglu_row_scale
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.formats.scale_layout import scale_bytes

from .. import launcher, plan
from . import custom_ops  # noqa: F401  registers torch.ops.nvfp4_sgl
from .operand import Weights

__all__ = [
    "expert_down",
    "expert_gate_up",
    "expert_gate_up_quantized",
    "expert_token_tile_for",
    "grouped_product",
    "hidden_rows",
    "product",
    "token_tile_for",
]


def token_tile_for(tokens: int) -> int:
    """The token tile to quantise this many rows for, before any dense or block-diagonal GEMM of them."""
    return plan.token_tile_for(tokens, launcher.current().pin)


def expert_token_tile_for(pairs: int, experts: int) -> int:
    """The token tile to quantise for, and to align offsets to, if ``experts`` share ``pairs`` token-expert pairs."""
    return plan.expert_token_tile_for(pairs, experts, launcher.current().pin)


def product(rows: Rows, weights: Weights, *, out: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Compute the dense GEMM ``rows @ weights.T``.

    Args:
        rows: [T, K].
        weights: ``Weights.dense`` [F, K].
        out: bf16 or fp32 [T, F], the last dimension contiguous; allocated unless given.
        dtype: dtype of the result if ``out`` is not given.

    Returns:
        ``out``.
    """
    if out is None:
        out = rows.codes.new_empty((rows.codes.shape[0], weights.codes.shape[0]), dtype=dtype)
    torch.ops.nvfp4_sgl.product(*_rows(rows), *_weights(weights), out)
    return out


def grouped_product(
    rows: Rows, weights: Weights, *, out: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute the block-diagonal GEMM of the attention output, ``out[t, g] = weights[g] @ rows[t, g]``.

    Args:
        rows: [T, G, K], as attention writes it: rows and groups may have any stride of a multiple of 16 bytes.
        weights: ``Weights.grouped`` [G, F, K].
        out: bf16 or fp32 [T, G, F], the last dimension contiguous; allocated unless given.
        dtype: dtype of the result if ``out`` is not given.

    Returns:
        ``out``.
    """
    if out is None:
        out = rows.codes.new_empty((*rows.codes.shape[:2], weights.codes.shape[1]), dtype=dtype)
    torch.ops.nvfp4_sgl.grouped_product(*_rows(rows), *_weights(weights), out)
    return out


def expert_gate_up(
    rows: Rows,
    weights: Weights,
    limit: float,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    counts_ahead: bool = False,
) -> Tensor:
    """Compute the gate and up projections of each row by its expert and their clamped SwiGLU.

    Args:
        rows: [R, K]: :class:`ExpertRows`, or plain :class:`Rows` that all belong to a single (shared) expert.
        weights: ``Weights.gated_experts``, E matrices of 2 I rows.
        limit: the SwiGLU clamp, from 0.2785 to 2^60; part of the kernel's code.
        out: bf16 or fp32 [R, I], the last dimension contiguous; allocated unless given. Rows that belong to no expert's
            tiles are left as they are.
        dtype: dtype of the result if ``out`` is not given.
        counts_ahead: of :class:`ExpertRows`: read their offsets and counts, and load the first weights, before the
            launch in front has ended. That launch must have waited for the one that wrote them before it triggers this
            one (PDL), as Triton's kernels and the GEMMs over experts do.

    Returns:
        ``out``.

    Rounding: SwiGLU is computed from the fp32 sums; one rounding to the output dtype.
    """
    if out is None:
        out = rows.codes.new_empty((rows.codes.shape[0], weights.codes.shape[1] // 2), dtype=dtype)
    groups = rows.offsets_and_counts
    torch.ops.nvfp4_sgl.expert_gate_up(*_rows(rows), *groups, *_weights(weights), limit, counts_ahead, out, None)
    return out


def expert_gate_up_quantized(
    rows: Rows, weights: Weights, limit: float, *, out: Rows | None = None, counts_ahead: bool = False
) -> Rows:
    """Compute :func:`expert_gate_up` and quantise it to NVFP4, as :func:`expert_down` takes it.

    Args:
        rows, weights, limit: as in :func:`expert_gate_up`.
        out: rows [R, I] that :func:`hidden_rows` made, written again; allocated unless given.
        counts_ahead: as in :func:`expert_gate_up`.

    Returns:
        ``out``, with the constant row scale fp32(limit² / 2688).
    """
    if out is None:
        out = hidden_rows(rows, weights.codes.shape[1] // 2, limit)
    groups, outputs = rows.offsets_and_counts, (out.codes, out.block_scales)
    torch.ops.nvfp4_sgl.expert_gate_up(*_rows(rows), *groups, *_weights(weights), limit, counts_ahead, *outputs)
    return out


def hidden_rows(rows: Rows, features: int, limit: float) -> Rows:
    """Room for the NVFP4 hidden activations [R, features] of ``rows``, with the constant row scale set.

    Block scales that no kernel writes are zero, so that all of it is valid NVFP4.
    """
    count, device = rows.codes.shape[0], rows.codes.device
    codes = torch.empty(count, features // 2, dtype=torch.uint8, device=device)
    scales = torch.zeros(scale_bytes(count, features, rows.token_tile), dtype=torch.uint8, device=device)
    scale = torch.full((1,), swiglu_row_scale(limit), dtype=torch.float32, device=device)
    return replace(rows, codes=codes, block_scales=scales.view(torch.float8_e4m3fn), scale=scale)


def expert_down(
    rows: Rows,
    weights: Weights,
    row_weight: Tensor | None = None,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    counts_ahead: bool = False,
) -> Tensor:
    """Compute the down projection of each row by its expert, times the row's weight if given.

    Args:
        rows: [R, K]: :class:`ExpertRows`, or plain :class:`Rows` of a single expert, as for :func:`expert_gate_up`.
        weights: ``Weights.experts`` [E, F, K].
        row_weight: fp32 [R], contiguous, the routing weights in the order of rows.
        out: bf16 or fp32 [R, F], the last dimension contiguous; allocated unless given. Rows that belong to no expert's
            tiles are left as they are.
        dtype: dtype of the result if ``out`` is not given.
        counts_ahead: as in :func:`expert_gate_up`.

    Returns:
        ``out``.
    """
    if out is None:
        out = rows.codes.new_empty((rows.codes.shape[0], weights.codes.shape[1]), dtype=dtype)
    groups = rows.offsets_and_counts
    torch.ops.nvfp4_sgl.expert_down(*_rows(rows), row_weight, *groups, *_weights(weights), counts_ahead, out)
    return out


def _rows(rows: Rows) -> tuple[Tensor, Tensor, Tensor, int]:
    """``rows`` as the operators take them."""
    return rows.codes, rows.block_scales, rows.scale, rows.token_tile


def _weights(weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """``weights`` as the operators take them."""
    return weights.codes, weights.block_scales, weights.scale
