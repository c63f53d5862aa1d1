"""MXFP8 GEMMs on SM100: FP8 weights of a checkpoint times MXFP8 activations on the tensor cores.

Codes are copied to the GPU as they are; the scale of a block of 128 × 128 becomes one for each 32 in each of its rows,
swizzled there once. No value changes. Activations are bf16, and quantised in a launch of their own before each GEMM: no
other kernel writes MXFP8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nvfp4_sgl.cutedsl_kernels.mxfp8 import operations
from nvfp4_sgl.cutedsl_kernels.mxfp8.operand import MxFp8Weights
from nvfp4_sgl.formats.rows import MxFp8Rows
from nvfp4_sgl.model.contract import Activation, Context, Form
from nvfp4_sgl.targets.fused.parameters import Parameters
from nvfp4_sgl.triton_kernels.quantize.mxfp8 import quantize_mxfp8
from nvfp4_sgl.weights.matrix import load_mxfp8
from nvfp4_sgl.weights.source import Shard


def quantized(values: Tensor) -> MxFp8Rows:
    """``values``, bf16 [T, K] or [T, G, K], in MXFP8 for the GEMMs of that many tokens."""
    groups = values.shape[1] if values.dim() == 3 else None
    tile = operations.token_tile_for(values.shape[0])
    rows = MxFp8Rows.allocate(values.shape[0], values.shape[-1], tile, values.device, groups=groups)
    quantize_mxfp8(values, rows)
    return rows


class MxFp8Gemm(nn.Module):
    """A GEMM of merged matrices, or a block-diagonal one."""

    takes = Form.VALUES

    def __init__(self, context: Context, shards: Sequence[Shard], groups: int | None = None):
        super().__init__()
        matrix, self.sizes = load_mxfp8(context.source, shards, groups=groups)
        self.weights = Parameters(MxFp8Weights.of(matrix.to(context.device)))

    def forward(self, x: Activation, dtype: torch.dtype, features: int | None = None) -> Tensor:
        product: Tensor = operations.product(quantized(x.require_values()), self.weights.operand, dtype=dtype)
        return product if features is None else product[:, :features]


class MxFp8GatedGemm(nn.Module):
    """A GEMM of gate and up whose epilogue does SwiGLU."""

    def __init__(self, context: Context, shards: Sequence[Shard]):
        super().__init__()
        matrix, _ = load_mxfp8(context.source, shards, groups=2)
        self.weights = Parameters(MxFp8Weights.gated(matrix.to(context.device)))

    def forward(self, x: Tensor, limit: float) -> Tensor:
        return operations.gate_up(quantized(x), self.weights.operand, limit)


class MxFp8:
    """The backend of FP8 matrices with UE8M0 scales on SM100."""

    def load(self, context: Context, shards: Sequence[Shard], groups: int | None = None) -> MxFp8Gemm:
        return MxFp8Gemm(context, shards, groups)

    def load_gated(self, context: Context, shards: Sequence[Shard]) -> MxFp8GatedGemm:
        return MxFp8GatedGemm(context, shards)
