"""NVFP4 GEMMs on SM100: NVFP4 weights times NVFP4 activations on the tensor cores (mode ``w4a4``).

Weights stay packed from the checkpoint to the tensor core. Codes are copied to the GPU as they are, block scales are
swizzled there once, and global scales become the epilogue's alphas. Router, index weights and LM head are bf16, as
stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nvfp4_sgl.cutedsl_kernels.compiled import swiglu_row_scale
from nvfp4_sgl.cutedsl_kernels.w4a4 import operations
from nvfp4_sgl.cutedsl_kernels.w4a4.operand import Weights
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from nvfp4_sgl.formats.rows import ExpertRows
from nvfp4_sgl.model.contract import Context, Form, Operand
from nvfp4_sgl.targets.fused.operands import in_form
from nvfp4_sgl.targets.fused.step import Step
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.quantize.scatter import quantize_scattered
from nvfp4_sgl.weights.layout import ExpertMatrices, expert_batches
from nvfp4_sgl.weights.matrix import load_matrix, merge
from nvfp4_sgl.weights.source import Shard, frozen


def _load(context: Context, *shards: Shard, groups: int | None = None) -> NvFp4Tensor:
    """Merge NVFP4 shards and copy them to the device, packed.

    Raises:
        CheckpointError: the shards are not NVFP4; names the first.
    """
    matrix = load_matrix(context.source, shards, groups=groups)
    if isinstance(matrix, Tensor):
        stem = shards[0].stem
        raise CheckpointError(
            f"tensor '{stem}.weight': expected NVFP4, found {context.source.storage(stem).value}: SM100 has no other"
            " GEMMs for it; quantise this matrix too"
        )
    return matrix.to(context.device)


class NvFp4Weights(nn.Module):
    """The weight operand of a GEMM as parameters: codes as in the checkpoint, swizzled block scales, alphas."""

    def __init__(self, weights: Weights):
        super().__init__()
        self.codes, self.scale = frozen(weights.codes), frozen(weights.scale)
        self.block_scales = frozen(weights.block_scales)

    @property
    def operand(self) -> Weights:
        """The weights as the GEMMs take them."""
        return Weights(self.codes.data, self.block_scales.data, self.scale.data)


class NvFp4Projection(nn.Module):
    """Matrices that read the same activation, merged into one GEMM; each keeps its global scale, an alpha a feature."""

    takes = Form.NVFP4

    def __init__(self, context: Context, shards: Sequence[Shard]):
        super().__init__()
        parts = [_load(context, shard) for shard in shards]
        self.sizes = [part.shape[0] for part in parts]
        merged = merge(parts)
        self.weights = NvFp4Weights(Weights.dense(merged.packed, merged.block_scale, merged.global_scale))

    def product(self, x: Operand, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The columns of each shard, slices [T, rows] in ``dtype``."""
        result = operations.product(x.require_rows(), self.weights.operand, dtype=dtype)
        return result.split(self.sizes, dim=1)

    def forward(self, x: Operand) -> list[Tensor]:
        """The columns of each shard in bf16."""
        return list(self.product(x, torch.bfloat16))


class NvFp4GroupedProjection(nn.Module):
    """The block-diagonal GEMM of the attention output (specification §3.4); each token and group has a row scale."""

    takes = Form.NVFP4

    def __init__(self, context: Context, shard: Shard, groups: int):
        super().__init__()
        matrix = _load(context, shard, groups=groups)
        self.weights = NvFp4Weights(Weights.grouped(matrix.packed, matrix.block_scale, matrix.global_scale))

    def forward(self, x: Operand, form: Form) -> Operand:
        """The result [T, G * N] in ``form``; NVFP4 takes a launch of its own, because a row's maximum spans CTAs."""
        result = operations.grouped_product(x.require_rows(), self.weights.operand)
        return in_form(result.flatten(1), form)


class NvFp4Experts(nn.Module):
    """Experts as two grouped GEMMs; the epilogue of the first does SwiGLU and quantises.

    Args:
        matrices: of the groups: routed experts, then the shared one unless it is apart.
        shared: the shared expert that runs apart, bf16 [T, d] to bf16 [T, d].
    """

    takes = Form.VALUES
    """``quantize_scattered`` reads values: it quantises a token once and stores it wherever its experts read it."""

    def __init__(self, context: Context, matrices: Sequence[ExpertMatrices], shared: nn.Module | None = None):
        super().__init__()
        self._config, self._device, self._groups = context.config, context.device, len(matrices)
        self.shared, self.has_shared_group = shared, shared is None
        w13: Weights | None = None
        w2: Weights | None = None
        # One expert at a time, so that the host never holds a whole layer.
        for first, batch in expert_batches(context.source, matrices):
            for index, expert in enumerate(batch, first):
                gate_up, down = _load(context, *expert.gate_up, groups=2), _load(context, expert.down)
                if w13 is None or w2 is None:
                    _, features, k = gate_up.shape
                    w13 = Weights.allocate_gated_experts(len(matrices), features, k, context.device)
                    w2 = Weights.allocate_experts(len(matrices), k, features, context.device)
                w13.put_gated_expert(index, gate_up.packed, gate_up.block_scale, gate_up.global_scale[:, 0])
                w2.put_expert(index, down.packed, down.block_scale, down.global_scale)
        assert w13 is not None and w2 is not None
        self.w13, self.w2 = NvFp4Weights(w13), NvFp4Weights(w2)
        limit = context.config.swiglu_limit
        self._hidden_scale = torch.full((1,), swiglu_row_scale(limit), dtype=torch.float32, device=context.device)

    def new_routes(self, tokens: int) -> Routes:
        """Routes whose groups begin at multiples of the GEMMs' token tile."""
        visits = self._config.num_experts_per_tok + self.has_shared_group
        tile = operations.expert_token_tile_for(tokens * visits, self._groups)
        return Routes.allocate(tokens, visits, self._groups, tile, self._device)

    def forward(self, x: Operand, routes: Routes, step: Step) -> Tensor:
        """The weighted sum of experts, bf16 [T, d]; weights multiply the bf16 rows of the last GEMM, sums are fp32.

        A shared expert that runs apart is added last.
        """
        values, limit = x.require_values(), self._config.swiglu_limit
        groups = (routes.tile, routes.offsets, routes.counts)
        rows = ExpertRows.of_experts(len(routes.source_row), values.shape[1], *groups)
        quantize_scattered(values, routes.destination, rows)
        inner_width = self.w2.codes.shape[-1] * 2
        hidden = ExpertRows.of_experts(len(routes.source_row), inner_width, *groups, scale=self._hidden_scale)
        operations.expert_gate_up_quantized(rows, self.w13.operand, limit, out=hidden)
        output = operations.expert_down(hidden, self.w2.operand)
        shared = None if self.shared is None else self.shared(values)
        return finalize(output, routes.destination, routes.weights, torch.empty_like(values), shared=shared)
