"""GEMMs with block-scaled weights, as the tensor-core kernels define them (specification §9).

A GEMM with an NVFP4 weight keeps three factors apart: the exact products of codes and block scales, which the tensor
core accumulates in fp32; one fp32 ``row_scale`` per activation row; one fp32 ``alpha`` per weight shard. The epilogue
applies ``(acc * row_scale) * alpha``, so merged projections whose shards have different global scales stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.formats import mxfp8
from nvfp4_sgl.formats.nvfp4 import quantize_rows
from nvfp4_sgl.ops.modes import ActivationMode


@dataclass(frozen=True)
class PreparedWeight:
    """A weight as the reference multiplies with it.

    Attributes:
        values: fp32 [..., K, N], the transposed weight. For NVFP4: code times block scale, global scale left out
            (exact). For FP8 128x128 and plain weights: the weight itself. Contiguous in this order, with which a GEMM
            of few rows is 1.4 to 1.6 times as fast (``launch/results/tunings_h200.md``).
        alpha: fp32 [..., N], the global scale of the shard that each column belongs to; ``None`` unless NVFP4.
        is_mxfp8: whether the weight is FP8 with UE8M0 scales, which SM100 multiplies as MXFP8.
    """

    values: Tensor
    alpha: Tensor | None
    is_mxfp8: bool = False

    @property
    def is_nvfp4(self) -> bool:
        return self.alpha is not None


def activation_operand(
    x: Tensor, weight: PreparedWeight, mode: ActivationMode, row_scale: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """``(values fp32 [..., K], row_scale fp32 [...] | None)`` of the activations that meet ``weight``.

    Activations are quantised in ``w4a4`` mode only: by :func:`nvfp4_sgl.formats.nvfp4.quantize_rows` for NVFP4 weights,
    by :func:`nvfp4_sgl.formats.mxfp8.quantize_rows` for FP8 with UE8M0 scales. Other weights always see them as they
    are.
    """
    if mode is ActivationMode.W4A4 and weight.is_mxfp8:
        return mxfp8.quantize_rows(x.reshape(-1, x.shape[-1])).dequantize().view(x.shape), None
    if mode is ActivationMode.W4A16 or not weight.is_nvfp4:
        return x.float(), None
    rows = quantize_rows(x.reshape(-1, x.shape[-1]), row_scale)
    return rows.unscaled().view(x.shape), rows.global_scale.view(x.shape[:-1])


def apply_scales(acc: Tensor, row_scale: Tensor | None, alpha: Tensor | None) -> Tensor:
    """The epilogue ``(acc * row_scale) * alpha`` in fp32; factors that are ``None`` are left out."""
    if row_scale is not None:
        acc = acc * row_scale.unsqueeze(-1)
    if alpha is not None:
        acc = acc * alpha
    return acc


def linear(x: Tensor, weight: PreparedWeight, mode: ActivationMode) -> Tensor:
    """``x @ W^T``.

    Args:
        x: [T, K].
        weight: values [K, N].
        mode: what happens to ``x`` where the weight is quantised.

    Returns:
        fp32 [T, N]; the caller rounds.
    """
    values, row_scale = activation_operand(x, weight, mode)
    return apply_scales(values @ weight.values, row_scale, weight.alpha)


def grouped_linear(x: Tensor, weight: PreparedWeight, mode: ActivationMode) -> Tensor:
    """Block-diagonal GEMM of the attention output: ``z[t, g] = W[g] @ x[t, g]`` (specification §3.4).

    In ``w4a4`` mode each (token, group) is a row with a scale of its own, so the result does not depend on
    how groups are spread over ranks.

    Args:
        x: [T, G, K].
        weight: values [G, K, N].

    Returns:
        fp32 [T, G, N].
    """
    values, row_scale = activation_operand(x, weight, mode)
    acc = torch.bmm(values.transpose(0, 1), weight.values).transpose(0, 1)
    return apply_scales(acc, row_scale, weight.alpha)
