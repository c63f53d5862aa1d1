"""SM100's GEMMs on Hopper's bf16 tensor cores (mode ``w4a4``): for accuracy work ahead of Blackwell hardware.

Weights are those of another backend, merged and grouped as on SM100. Activations are rounded to NVFP4 where the weight
is NVFP4, to MXFP8 where it is FP8 with UE8M0 scales, by SM100's own recipes, in a launch of their own before each GEMM.
bf16 holds the rounded values exactly. The row scales of NVFP4 are applied in a launch after the GEMM, to its fp32
result. Sums are in another order than on SM100.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from nvfp4_sgl.cutedsl_kernels.w4a16 import operations
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.formats.nvfp4 import swiglu_row_scale
from nvfp4_sgl.model.contract import Activation, Context, Form
from nvfp4_sgl.targets.fused.gated import SwiGluGemm
from nvfp4_sgl.targets.fused.gemm_backend import Gemm, GemmBackend
from nvfp4_sgl.targets.fused.nvfp4_matrices import expert_sizes, load_experts
from nvfp4_sgl.targets.fused.parameters import Parameters
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.experts.rounded_swiglu import swiglu_to_nvfp4
from nvfp4_sgl.triton_kernels.experts.swiglu import scatter_rows
from nvfp4_sgl.triton_kernels.quantize.rounded import round_to_mxfp8, round_to_nvfp4, scale_rows
from nvfp4_sgl.weights.layout import ExpertMatrices
from nvfp4_sgl.weights.source import Shard, frozen

Rounding = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""bf16 [..., K] to its rounded values without their row scales, bf16 [..., K], and these, fp32 [...], if it has any."""


def rounded_nvfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """``values``, bf16 [..., K], rounded to NVFP4: bf16 [..., K] without the row scales, and these, fp32 [...]."""
    out = values.new_empty(values.shape)
    scale = values.new_empty(values.shape[:-1], dtype=torch.float32)
    return round_to_nvfp4(values, out, scale), scale


def rounded_mxfp8(values: Tensor) -> tuple[Tensor, None]:
    """``values``, bf16 [..., K], rounded to MXFP8: bf16 [..., K]."""
    return round_to_mxfp8(values, values.new_empty(values.shape)), None


def scaled(sums: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``sums``, fp32 [..., F], times the row scales [...] in ``dtype``; overwritten if that is fp32."""
    return scale_rows(sums, scale, sums if dtype == torch.float32 else torch.empty_like(sums, dtype=dtype))


class RoundedGemm(nn.Module):
    """A GEMM of rounded activations: with row scales ((sum · alpha) · row scale), rounded once."""

    takes = Form.VALUES

    def __init__(self, gemm: Gemm, rounding: Rounding):
        super().__init__()
        self.gemm: Gemm = gemm
        self.sizes, self._round = gemm.sizes, rounding

    def forward(self, x: Activation, dtype: torch.dtype, features: int | None = None) -> Tensor:
        values, scale = self._round(x.require_values())
        if scale is None:
            return self.gemm(Activation(values), dtype, features)
        return scaled(self.gemm(Activation(values), torch.float32, features), scale, dtype)


class RoundedExpertGemms(nn.Module):
    """Two grouped GEMMs of Hopper's NVFP4 weights with SwiGLU between them.

    The first GEMM's alphas are ones: gate and up, which it has in one matrix, have alphas of their own. SwiGLU
    multiplies by them. The second one's have the constant row scale of what SwiGLU gives.
    """

    def __init__(self, context: Context, matrices: Sequence[ExpertMatrices]):
        super().__init__()
        self.groups, self._limit, device = len(matrices), context.config.swiglu_limit, context.device
        self._hidden_scale = swiglu_row_scale(self._limit)
        features, k = expert_sizes(context)
        alpha = torch.empty(self.groups, 2, dtype=torch.float32, device=device)
        w13 = TiledWeights.allocate_experts(self.groups, 2 * features, k, device)
        w2 = TiledWeights.allocate_experts(self.groups, k, features, device)
        for first, gate_up, down in load_experts(context, matrices):
            count = len(down.packed)
            codes, block_scales = gate_up.packed.flatten(1, 2), gate_up.block_scale.flatten(1, 2)
            w13.put_experts(first, codes, block_scales, alpha.new_ones(count), checked=True)
            alpha[first : first + count].copy_(gate_up.global_scale)
            w2.put_experts(first, down.packed, down.block_scale, down.global_scale * self._hidden_scale, checked=True)
        self.w13, self.w2, self.alpha = Parameters(w13), Parameters(w2), frozen(alpha)

    def token_tile(self, rows: int) -> int:
        return operations.w4a16_expert_token_tile_for(rows, self.groups)

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        values, scale = rounded_nvfp4(x)
        groups, w13, w2 = (routes.tile, routes.offsets, routes.counts), self.w13.operand, self.w2.operand
        rows = scatter_rows(values, routes.destination, x.new_empty(len(routes.source_row), x.shape[1]))
        sums = rows.new_empty(len(rows), w13.features, dtype=torch.float32)
        operations.expert_down(rows, *groups, w13, out=sums, counts_ahead=True)
        hidden = rows.new_empty(len(rows), w2.k)
        swiglu_to_nvfp4(sums, scale, self.alpha.data, routes, self._limit, self._hidden_scale, hidden)
        return operations.expert_down(hidden, *groups, w2, counts_ahead=True)


class Rounded:
    """``backend``, whose GEMMs read bf16, with activations rounded before each of them."""

    def __init__(self, backend: GemmBackend, rounding: Rounding):
        self.backend, self.rounding = backend, rounding

    def load(self, context: Context, shards: Sequence[Shard], groups: int | None = None) -> RoundedGemm:
        return RoundedGemm(self.backend.load(context, shards, groups), self.rounding)

    def load_gated(self, context: Context, shards: Sequence[Shard]) -> SwiGluGemm:
        """SwiGLU reads fp32, as it does in SM100's epilogue."""
        return SwiGluGemm(self.load(context, shards), torch.float32)


class RoundedNvFp4Experts:
    """The backend of NVFP4 experts."""

    def load_experts(self, context: Context, matrices: Sequence[ExpertMatrices]) -> RoundedExpertGemms:
        return RoundedExpertGemms(context, matrices)
