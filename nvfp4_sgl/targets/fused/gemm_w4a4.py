"""NVFP4 GEMMs on SM100: NVFP4 weights times NVFP4 activations on the tensor cores (mode ``w4a4``).

Weights stay packed from the checkpoint to the tensor core. Codes are copied to the GPU as they are, block scales are
swizzled there once, and global scales become the epilogue's alphas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nvfp4_sgl.cutedsl_kernels.w4a4 import operations
from nvfp4_sgl.cutedsl_kernels.w4a4.operand import Weights
from nvfp4_sgl.formats.nvfp4 import swiglu_row_scale
from nvfp4_sgl.formats.rows import ExpertRows
from nvfp4_sgl.model.contract import Activation, Context, Form
from nvfp4_sgl.targets.fused.nvfp4_matrices import expert_sizes, load_experts, load_nvfp4
from nvfp4_sgl.targets.fused.parameters import Parameters
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.quantize.scatter import quantize_scattered
from nvfp4_sgl.weights.layout import ExpertMatrices
from nvfp4_sgl.weights.source import Shard


class W4A4Gemm(nn.Module):
    """A GEMM of merged matrices, or a block-diagonal one. Each matrix keeps its global scale, an alpha a feature; each
    token, or token and group, has a row scale."""

    takes = Form.NVFP4

    def __init__(self, context: Context, shards: Sequence[Shard], groups: int | None = None):
        super().__init__()
        matrix, self.sizes = load_nvfp4(context, shards, groups)
        make = Weights.dense if groups is None else Weights.grouped
        self.weights = Parameters(make(matrix.packed, matrix.block_scale, matrix.global_scale))
        self._multiply = operations.product if groups is None else operations.grouped_product

    def forward(self, x: Activation, dtype: torch.dtype, features: int | None = None) -> Tensor:
        product: Tensor = self._multiply(x.require_rows(), self.weights.operand, dtype=dtype)
        return product if features is None else product[:, :features]


class W4A4ExpertGemms(nn.Module):
    """Two grouped GEMMs; the epilogue of the first does SwiGLU and quantises."""

    def __init__(self, context: Context, matrices: Sequence[ExpertMatrices]):
        super().__init__()
        self.groups, self._limit = len(matrices), context.config.swiglu_limit
        features, k = expert_sizes(context)
        w13 = Weights.allocate_gated_experts(self.groups, features, k, context.device)
        w2 = Weights.allocate_experts(self.groups, k, features, context.device)
        for first, gate_up, down in load_experts(context, matrices):
            for index in range(len(down.packed)):
                place = first + index
                w13.put_gated_expert(
                    place, gate_up.packed[index], gate_up.block_scale[index], gate_up.global_scale[index]
                )
                w2.put_expert(place, down.packed[index], down.block_scale[index], down.global_scale[index])
        self.w13, self.w2 = Parameters(w13), Parameters(w2)
        scale = swiglu_row_scale(self._limit)
        self._hidden_scale = torch.full((1,), scale, dtype=torch.float32, device=context.device)

    def token_tile(self, rows: int) -> int:
        return operations.expert_token_tile_for(rows, self.groups)

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        """A token is quantised once and stored wherever its experts read it.

        Both GEMMs read counts ahead: the routing wrote them, and the quantisation between has waited for it.
        """
        groups = (routes.tile, routes.offsets, routes.counts)
        rows = ExpertRows.of_experts(len(routes.source_row), x.shape[1], *groups)
        quantize_scattered(x, routes.destination, rows)
        w13, w2 = self.w13.operand, self.w2.operand
        hidden = ExpertRows.of_experts(len(routes.source_row), w2.k, *groups, scale=self._hidden_scale)
        operations.expert_gate_up_quantized(rows, w13, self._limit, out=hidden, counts_ahead=True)
        return operations.expert_down(hidden, w2, counts_ahead=True)


class W4A4:
    """The backend of NVFP4 matrices on SM100."""

    def load(self, context: Context, shards: Sequence[Shard], groups: int | None = None) -> W4A4Gemm:
        return W4A4Gemm(context, shards, groups)

    def load_experts(self, context: Context, matrices: Sequence[ExpertMatrices]) -> W4A4ExpertGemms:
        return W4A4ExpertGemms(context, matrices)
