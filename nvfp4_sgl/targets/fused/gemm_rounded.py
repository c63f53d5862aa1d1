"""What SM100 multiplies, on Hopper's bf16 tensor cores (mode ``w4a4``): for accuracy work ahead of Blackwell hardware.

Weights are those of ``w4a16`` (:mod:`.gemm_w4a16`, :mod:`.gemm_bf16`), merged and grouped as on SM100.
Activations are rounded to NVFP4 where the weight is NVFP4, to MXFP8 where it is FP8 with UE8M0 scales, by SM100's own
recipes, in a launch of their own before each GEMM. bf16 holds the rounded values exactly. The row scales of NVFP4 are
applied in a launch after the GEMM, to its fp32 result. Sums are in another order than on SM100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from nvfp4_sgl.cutedsl_kernels.compiled import swiglu_row_scale
from nvfp4_sgl.cutedsl_kernels.w4a16 import operations
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.model.contract import (
    Context,
    Experts,
    Form,
    GroupedProjection,
    InputProjection,
    Operand,
    Projection,
)
from nvfp4_sgl.targets.fused.gemm_bf16 import (
    Bf16GroupedProjection,
    Bf16Projection,
    Bf16SharedExpert,
    multiply,
)
from nvfp4_sgl.targets.fused.gemm_w4a16 import (
    W4A16GroupedProjection,
    W4A16Planner,
    W4A16Projection,
    W4A16Weights,
    load_experts,
)
from nvfp4_sgl.targets.fused.input_columns import InputColumns
from nvfp4_sgl.targets.fused.operands import in_form
from nvfp4_sgl.targets.fused.projections import Projections, merged, operands_of
from nvfp4_sgl.targets.fused.step import Step
from nvfp4_sgl.targets.target import HOPPER_W4A4
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.experts.rounded_swiglu import swiglu_to_nvfp4
from nvfp4_sgl.triton_kernels.experts.swiglu import scatter_rows, swiglu
from nvfp4_sgl.triton_kernels.quantize.rounded import round_to_mxfp8, round_to_nvfp4, scale_rows
from nvfp4_sgl.weights.gemms import GemmSpec, Operands
from nvfp4_sgl.weights.layout import ExpertMatrices, expert_batches
from nvfp4_sgl.weights.source import Shard, frozen


def rounded_nvfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """``values``, bf16 [..., K], rounded to NVFP4: bf16 [..., K] without the row scales, and these, fp32 [...]."""
    out = values.new_empty(values.shape)
    scale = values.new_empty(values.shape[:-1], dtype=torch.float32)
    return round_to_nvfp4(values, out, scale), scale


def rounded_mxfp8(values: Tensor) -> Tensor:
    """``values``, bf16 [..., K], rounded to MXFP8: bf16 [..., K]."""
    return round_to_mxfp8(values, values.new_empty(values.shape))


def scaled(sums: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``sums``, fp32 [..., F], times the row scales [...] in ``dtype``; overwritten if that is fp32."""
    return scale_rows(sums, scale, sums if dtype == torch.float32 else torch.empty_like(sums, dtype=dtype))


class W4A4Projection(W4A16Projection):
    """Matrices in NVFP4 that read the same activation, merged into one GEMM."""

    def product(self, x: Operand, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The columns of each shard, slices [T, rows] in ``dtype``: ((sum · alpha) · row scale), rounded once."""
        values, scale = rounded_nvfp4(x.require_values())
        sums = operations.product(values, self.weights.operand, dtype=torch.float32)
        return scaled(sums, scale, dtype).split(self.sizes, dim=1)


class W4A4GroupedProjection(W4A16GroupedProjection):
    """The block-diagonal GEMM of the attention output in NVFP4; each token and group has a row scale."""

    def forward(self, x: Operand, form: Form) -> Operand:
        """The result [T, G * N] in ``form``."""
        values, scale = rounded_nvfp4(x.require_values())
        sums = operations.grouped_product(values, self.weights.operand, dtype=torch.float32)
        return in_form(scaled(sums, scale, torch.bfloat16).flatten(1), form)


class W4A4Experts(nn.Module):
    """Experts as two grouped GEMMs with SwiGLU between them.

    The first GEMM's alphas are ones: gate and up, which it has in one matrix, have alphas of their own. SwiGLU
    multiplies by them. The second one's have the constant row scale of what SwiGLU gives.

    Args:
        matrices: of the groups: routed experts, then the shared one unless it is apart.
        shared: the shared expert that runs apart, bf16 [T, d] to bf16 [T, d].
    """

    takes = Form.VALUES

    def __init__(self, context: Context, matrices: Sequence[ExpertMatrices], shared: nn.Module | None = None):
        super().__init__()
        self._config, self._device, self._groups = context.config, context.device, len(matrices)
        self.shared, self.has_shared_group = shared, shared is None
        self._hidden_scale = swiglu_row_scale(context.config.swiglu_limit)
        alpha = torch.empty(len(matrices), 2, dtype=torch.float32, device=context.device)
        w13: TiledWeights | None = None
        w2: TiledWeights | None = None
        # A few experts at a time, so that the host never holds a whole layer.
        for first, batch in expert_batches(context.source, matrices):
            gate_up, down = load_experts(context, batch)
            if w13 is None or w2 is None:
                _, _, features, k = gate_up.shape
                w13 = TiledWeights.allocate_experts(len(matrices), 2 * features, k, context.device)
                w2 = TiledWeights.allocate_experts(len(matrices), k, features, context.device)
            codes, block_scales = gate_up.packed.flatten(1, 2), gate_up.block_scale.flatten(1, 2)
            w13.put_experts(first, codes, block_scales, alpha.new_ones(len(batch)), checked=True)
            alpha[first : first + len(batch)].copy_(gate_up.global_scale)
            w2.put_experts(first, down.packed, down.block_scale, down.global_scale * self._hidden_scale, checked=True)
        assert w13 is not None and w2 is not None
        self.w13, self.w2, self.alpha = W4A16Weights(w13), W4A16Weights(w2), frozen(alpha)

    def new_routes(self, tokens: int) -> Routes:
        """Routes whose groups begin at multiples of the GEMMs' token tile."""
        visits = self._config.num_experts_per_tok + self.has_shared_group
        tile = operations.w4a16_expert_token_tile_for(tokens * visits, self._groups)
        return Routes.allocate(tokens, visits, self._groups, tile, self._device)

    def forward(self, x: Operand, routes: Routes, step: Step) -> Tensor:
        """The weighted sum of experts, bf16 [T, d]; weights multiply the bf16 rows of the last GEMM, sums are fp32.

        A shared expert that runs apart is added last.
        """
        given = x.require_values()
        values, scale = rounded_nvfp4(given)
        groups = (routes.tile, routes.offsets, routes.counts)
        rows = values.new_empty(routes.source_row.shape[0], values.shape[1])
        scatter_rows(values, routes.destination, rows)
        sums = rows.new_empty(len(rows), self.w13.features, dtype=torch.float32)
        operations.expert_down(rows, *groups, self.w13.operand, out=sums)
        hidden = rows.new_empty(len(rows), self.w2.k)
        limit = self._config.swiglu_limit
        swiglu_to_nvfp4(sums, scale, self.alpha.data, routes, limit, self._hidden_scale, hidden)
        output = operations.expert_down(hidden, *groups, self.w2.operand)
        shared = None if self.shared is None else self.shared(given)
        return finalize(output, routes.destination, routes.weights, torch.empty_like(given), shared=shared)


class RoundedBf16Projection(Bf16Projection):
    """Matrices in FP8 with UE8M0 scales that read the same activation, merged into one GEMM."""

    def product(self, x: Operand, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The columns of each shard, slices [T, rows] in ``dtype``."""
        return super().product(Operand(rounded_mxfp8(x.require_values())), dtype)


class RoundedBf16GroupedProjection(Bf16GroupedProjection):
    """The block-diagonal GEMM of the attention output in FP8 with UE8M0 scales."""

    def forward(self, x: Operand, form: Form) -> Operand:
        """The result [T, G * N] in ``form``."""
        return super().forward(Operand(rounded_mxfp8(x.require_values())), form)


class RoundedBf16SharedExpert(Bf16SharedExpert):
    """The shared expert by itself, in FP8 with UE8M0 scales: two GEMMs with SwiGLU between them."""

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [T, d]; gate and up are fp32, what SwiGLU gives is rounded to bf16, then to MXFP8."""
        gate_up = multiply(rounded_mxfp8(x), self.w13, torch.float32)
        hidden = swiglu(gate_up, self._limit, x.new_empty(x.shape[0], gate_up.shape[1] // 2))
        return multiply(rounded_mxfp8(hidden), self.w2, torch.bfloat16)


PROJECTIONS: Projections = {"nvfp4": W4A4Projection, "mxfp8": RoundedBf16Projection, "bf16": Bf16Projection}
GROUPED: Mapping[Operands, Callable[[Context, Shard, int], GroupedProjection]] = {
    "nvfp4": W4A4GroupedProjection,
    "mxfp8": RoundedBf16GroupedProjection,
    "bf16": Bf16GroupedProjection,
}


def project(context: Context, shards: Sequence[Shard]) -> Projection:
    """Matrices that read the same activation: a GEMM for each kind that there is."""
    return merged(context, shards, PROJECTIONS)


def project_input(context: Context, shards: Sequence[Shard], index_weights: Shard | None) -> InputProjection:
    """The first GEMMs of an attention layer."""
    return InputColumns(context, merged(context, shards, PROJECTIONS), index_weights)


def project_groups(context: Context, shard: Shard, groups: int) -> GroupedProjection:
    """The block-diagonal GEMM of the attention output."""
    return GROUPED[operands_of(context, shard)](context, shard, groups)


def experts(context: Context, matrices: Sequence[ExpertMatrices]) -> Experts:
    """Routed experts, and the shared one as one more of their groups if it is NVFP4, else by itself."""
    *routed, shared = matrices
    kind = operands_of(context, shared.down)
    if kind == "nvfp4":
        return W4A4Experts(context, matrices)
    make = RoundedBf16SharedExpert if kind == "mxfp8" else Bf16SharedExpert
    return W4A4Experts(context, routed, make(context, shared))


class W4A4Planner(W4A16Planner):
    """Knows what kernels are compiled for by the number of tokens: as in ``w4a16``, with other GEMMs."""

    def products(self) -> Sequence[GemmSpec]:
        """The GEMMs of the model's layers on this rank, by the storages of its matrices."""
        context = self.context
        found = dict.fromkeys(HOPPER_W4A4.gemms(context.config, context.parallel.size, context.source.storage))
        return [_as_launched(gemm) for gemm in found]


def _as_launched(product: GemmSpec) -> GemmSpec:
    """SM100's GEMM as Hopper's kernels compute it: gate and up in one matrix, and fp32 where scales are to follow."""
    if product.gated:
        return replace(product, features=2 * product.features, gated=False, output="fp32")
    return product if product.experts_per_token else replace(product, output="fp32")
