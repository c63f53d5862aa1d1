"""GEMMs of NVFP4 weights with bf16 activations on Hopper (mode ``w4a16``).

Weights stay packed: their tiles for the tensor core are made once, on the GPU, and expanded to bf16 in registers
(exact). Activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nvfp4_sgl.cutedsl_kernels.w4a16 import operations
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.model.contract import Activation, Context, Form
from nvfp4_sgl.targets.fused.nvfp4_matrices import expert_sizes, load_experts, load_nvfp4
from nvfp4_sgl.targets.fused.parameters import Parameters
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.experts.swiglu import scatter_rows
from nvfp4_sgl.weights.layout import ExpertMatrices
from nvfp4_sgl.weights.source import Shard


class W4A16Gemm(nn.Module):
    """A GEMM of merged matrices, or a block-diagonal one; each matrix keeps its global scale, an alpha a feature."""

    takes = Form.VALUES

    def __init__(self, context: Context, shards: Sequence[Shard], groups: int | None = None):
        super().__init__()
        matrix, self.sizes = load_nvfp4(context, shards, groups)
        make = TiledWeights.dense if groups is None else TiledWeights.grouped
        self.weights = Parameters(make(matrix.packed, matrix.block_scale, matrix.global_scale, checked=True))
        self._multiply = operations.product if groups is None else operations.grouped_product

    def forward(self, x: Activation, dtype: torch.dtype, features: int | None = None) -> Tensor:
        weights = self.weights.operand if features is None else self.weights.operand.first(features)
        return self._multiply(x.require_values(), weights, dtype=dtype)

    def send(self, x: Activation, places: Sequence[Tensor]) -> Tensor:
        """The result, stored in all of ``places``, bf16 [T, F] each; returns the first."""
        out, *copies = places
        return operations.product(x.require_values(), self.weights.operand, out=out, copies=copies)


class W4A16ExpertGemms(nn.Module):
    """Two grouped GEMMs; the epilogue of the first does SwiGLU."""

    def __init__(self, context: Context, matrices: Sequence[ExpertMatrices]):
        super().__init__()
        self.groups, self._limit = len(matrices), context.config.swiglu_limit
        features, k = expert_sizes(context)
        w13 = TiledWeights.allocate_gated_experts(self.groups, features, k, context.device)
        w2 = TiledWeights.allocate_experts(self.groups, k, features, context.device)
        for first, gate_up, down in load_experts(context, matrices):
            w13.put_gated_experts(first, gate_up.packed, gate_up.block_scale, gate_up.global_scale, checked=True)
            w2.put_experts(first, down.packed, down.block_scale, down.global_scale, checked=True)
        self.w13, self.w2 = Parameters(w13), Parameters(w2)

    def token_tile(self, rows: int) -> int:
        return operations.w4a16_expert_token_tile_for(rows, self.groups)

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        groups, w13, sources = (routes.tile, routes.offsets, routes.counts), self.w13.operand, None
        if operations.w4a16_gathers(routes.tile):
            sources = routes.source_row
        else:
            x = scatter_rows(x, routes.destination, x.new_empty(len(routes.source_row), x.shape[1]))
        hidden = operations.expert_gate_up(x, *groups, w13, self._limit, sources=sources)
        return operations.expert_down(hidden, *groups, self.w2.operand, counts_ahead=True)


class W4A16:
    """The backend of NVFP4 matrices on Hopper."""

    def load(self, context: Context, shards: Sequence[Shard], groups: int | None = None) -> W4A16Gemm:
        return W4A16Gemm(context, shards, groups)

    def load_experts(self, context: Context, matrices: Sequence[ExpertMatrices]) -> W4A16ExpertGemms:
        return W4A16ExpertGemms(context, matrices)
