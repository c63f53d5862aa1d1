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
from nvfp4_sgl.model.contract import Context, Form, Operand
from nvfp4_sgl.targets.fused.operands import in_form
from nvfp4_sgl.triton_kernels.quantize.mxfp8 import quantize_mxfp8
from nvfp4_sgl.weights.layout import ExpertMatrices
from nvfp4_sgl.weights.matrix import load_mxfp8, merge_mxfp8
from nvfp4_sgl.weights.source import Shard, frozen


def quantized(values: Tensor) -> MxFp8Rows:
    """``values``, bf16 [T, K] or [T, G, K], in MXFP8 for the GEMMs of that many tokens."""
    groups = values.shape[1] if values.dim() == 3 else None
    tile = operations.token_tile_for(values.shape[0])
    rows = MxFp8Rows.allocate(values.shape[0], values.shape[-1], tile, values.device, groups=groups)
    quantize_mxfp8(values, rows)
    return rows


class MxFp8Parameters(nn.Module):
    """The weight operand of a GEMM as parameters."""

    def __init__(self, weights: MxFp8Weights):
        super().__init__()
        self.codes, self.block_scales = frozen(weights.codes), frozen(weights.block_scales)
        self.ones = frozen(weights.ones)

    @property
    def operand(self) -> MxFp8Weights:
        """The weights as the GEMMs take them."""
        return MxFp8Weights(self.codes.data, self.block_scales.data, self.ones.data)


class MxFp8Projection(nn.Module):
    """Matrices that read the same activation, merged into one GEMM."""

    takes = Form.VALUES

    def __init__(self, context: Context, shards: Sequence[Shard]):
        super().__init__()
        parts = [load_mxfp8(context.source, [shard]) for shard in shards]
        self.sizes = [part.shape[0] for part in parts]
        self.weights = MxFp8Parameters(MxFp8Weights.of(merge_mxfp8(parts).to(context.device)))

    def product(self, x: Operand, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The columns of each shard, slices [T, rows] in ``dtype``."""
        result = operations.product(quantized(x.require_values()), self.weights.operand, dtype=dtype)
        return result.split(self.sizes, dim=1)

    def forward(self, x: Operand) -> list[Tensor]:
        """The columns of each shard in bf16."""
        return list(self.product(x, torch.bfloat16))


class MxFp8GroupedProjection(nn.Module):
    """The block-diagonal GEMM of the attention output (specification §3.4)."""

    takes = Form.VALUES

    def __init__(self, context: Context, shard: Shard, groups: int):
        super().__init__()
        matrix = load_mxfp8(context.source, [shard], groups=groups)
        self.weights = MxFp8Parameters(MxFp8Weights.of(matrix.to(context.device)))

    def forward(self, x: Operand, form: Form) -> Operand:
        """The result [T, G * N] in ``form``."""
        result = operations.product(quantized(x.require_values()), self.weights.operand)
        return in_form(result.flatten(1), form)


class MxFp8SharedExpert(nn.Module):
    """The shared expert by itself: a GEMM whose epilogue does SwiGLU, and one of its bf16 rows, quantised again."""

    def __init__(self, context: Context, matrices: ExpertMatrices):
        super().__init__()
        source, device, self._limit = context.source, context.device, context.config.swiglu_limit
        gate_up, down = load_mxfp8(source, matrices.gate_up, groups=2), load_mxfp8(source, [matrices.down])
        self.w13 = MxFp8Parameters(MxFp8Weights.gated(gate_up.to(device)))
        self.w2 = MxFp8Parameters(MxFp8Weights.of(down.to(device)))

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [T, d] from bf16 [T, d]."""
        hidden = operations.gate_up(quantized(x), self.w13.operand, self._limit)
        return operations.product(quantized(hidden), self.w2.operand)
