"""GEMMs of NVFP4 weights with bf16 activations on Hopper (mode ``w4a16``), and the choice by storage.

NVFP4 weights stay packed: their tiles for the tensor core are made once, on the GPU, and expanded to bf16 in registers
(exact). So do FP8 ones with UE8M0 scales (:mod:`.gemm_w8a16`). Matrices in another storage are dequantised at load
(:mod:`.gemm_bf16`), each boundary by itself. Router, index weights and LM head are bf16, as stored.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from nvfp4_sgl.cutedsl_kernels.w4a16 import operations
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from nvfp4_sgl.model.contract import (
    Context,
    Experts,
    Form,
    GroupedProjection,
    InputProjection,
    Operand,
    PassRequest,
    Projection,
)
from nvfp4_sgl.targets.fused import gemm_bf16 as bf16
from nvfp4_sgl.targets.fused import gemm_w8a16 as w8a16
from nvfp4_sgl.targets.fused.gemm_planner import GemmPlanner
from nvfp4_sgl.targets.fused.input_columns import InputColumns
from nvfp4_sgl.targets.fused.operands import in_form
from nvfp4_sgl.targets.fused.step import Step
from nvfp4_sgl.targets.fused.warm_up import warm_up_passes
from nvfp4_sgl.targets.target import HOPPER
from nvfp4_sgl.triton_kernels.attention_inputs.index_weights import padded_tokens
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
from nvfp4_sgl.triton_kernels.experts.permutation import Routes, padded_rows
from nvfp4_sgl.triton_kernels.experts.swiglu import scatter_rows
from nvfp4_sgl.weights.gemms import GemmSpec, Operands, common
from nvfp4_sgl.weights.layout import ExpertMatrices, expert_batches
from nvfp4_sgl.weights.matrix import load_matrix, merge
from nvfp4_sgl.weights.source import Shard, frozen


def _operands(context: Context, shards: Sequence[Shard]) -> Operands:
    """What a GEMM of ``shards``, merged, multiplies."""
    return common(HOPPER.operands_of(context.source.storage(shard.stem)) for shard in shards)


def load_nvfp4(context: Context, *shards: Shard, groups: int | None = None) -> NvFp4Tensor:
    """Merge NVFP4 shards and copy them to the device, packed."""
    matrix = load_matrix(context.source, shards, groups=groups)
    assert isinstance(matrix, NvFp4Tensor), shards
    return matrix.to(context.device)


def load_experts(context: Context, experts: Sequence[ExpertMatrices]) -> tuple[NvFp4Tensor, NvFp4Tensor]:
    """Gate and up [n, 2, I, K], and down [n, F, I], of NVFP4 experts, each with its global scale; on the source's
    device."""
    gate_up = load_matrix(
        context.source, [shard for expert in experts for shard in expert.gate_up], groups=2 * len(experts)
    )
    down = load_matrix(context.source, [expert.down for expert in experts], groups=len(experts))
    assert isinstance(gate_up, NvFp4Tensor) and isinstance(down, NvFp4Tensor), experts
    halves = (len(experts), 2)
    return (
        NvFp4Tensor(
            gate_up.packed.unflatten(0, halves),
            gate_up.block_scale.unflatten(0, halves),
            gate_up.global_scale[:, 0].unflatten(0, halves),
        ),
        NvFp4Tensor(down.packed, down.block_scale, down.global_scale[:, 0]),
    )


class W4A16Weights(nn.Module):
    """The weight operand of a GEMM as parameters: tiles and global scales."""

    def __init__(self, weights: TiledWeights):
        super().__init__()
        self.tiles, self.scale = frozen(weights.tiles), frozen(weights.scale)
        self.features, self.k = weights.features, weights.k

    @property
    def operand(self) -> TiledWeights:
        """As the GEMMs take it."""
        return TiledWeights(self.tiles.data, self.scale.data, self.features, self.k)


def project(context: Context, shards: Sequence[Shard]) -> Projection:
    """Matrices that read the same activation: packed if all are NVFP4, or all FP8, else dequantised."""
    return PROJECTIONS[_operands(context, shards)](context, shards)


class W4A16Projection(nn.Module):
    """Matrices that read the same activation, merged into one GEMM; each keeps its global scale, an alpha a feature."""

    takes = Form.VALUES

    def __init__(self, context: Context, shards: Sequence[Shard]):
        super().__init__()
        parts = [load_nvfp4(context, shard) for shard in shards]
        self.sizes = [part.shape[0] for part in parts]
        merged = merge(parts)
        self.weights = W4A16Weights(
            TiledWeights.dense(merged.packed, merged.block_scale, merged.global_scale, checked=True)
        )

    def product(self, x: Operand, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The columns of each shard, slices [T, rows] in ``dtype``."""
        result = operations.product(x.require_values(), self.weights.operand, dtype=dtype)
        return result.split(self.sizes, dim=1)

    def forward(self, x: Operand) -> list[Tensor]:
        """The columns of each shard in bf16."""
        return list(self.product(x, torch.bfloat16))


PROJECTIONS: Mapping[Operands, type[W4A16Projection] | type[w8a16.W8A16Projection] | type[bf16.Bf16Projection]] = {
    "nvfp4": W4A16Projection,
    "fp8": w8a16.W8A16Projection,
    "bf16": bf16.Bf16Projection,
}


def project_input(context: Context, shards: Sequence[Shard], index_weights: Shard | None) -> InputProjection:
    """The first GEMMs of an attention layer: packed if all but the index weights are NVFP4, or all FP8, else
    dequantised, the index weights merged with them."""
    kind = _operands(context, shards)
    if kind == "bf16":
        return bf16.Bf16InputProjection(context, shards, index_weights)
    return InputColumns(context, PROJECTIONS[kind](context, shards), index_weights)


def project_groups(context: Context, shard: Shard, groups: int) -> GroupedProjection:
    """The block-diagonal GEMM of the attention output: packed if it is NVFP4 or FP8, else dequantised."""
    return GROUPED[_operands(context, [shard])](context, shard, groups)


class W4A16GroupedProjection(nn.Module):
    """The block-diagonal GEMM of the attention output (specification §3.4)."""

    takes = Form.VALUES

    def __init__(self, context: Context, shard: Shard, groups: int):
        super().__init__()
        matrix = load_nvfp4(context, shard, groups=groups)
        self.weights = W4A16Weights(
            TiledWeights.grouped(matrix.packed, matrix.block_scale, matrix.global_scale, checked=True)
        )

    def forward(self, x: Operand, form: Form) -> Operand:
        """The result [T, G * N] in ``form``."""
        result = operations.grouped_product(x.require_values(), self.weights.operand)
        return in_form(result.flatten(1), form)


GROUPED: Mapping[Operands, Callable[[Context, Shard, int], GroupedProjection]] = {
    "nvfp4": W4A16GroupedProjection,
    "fp8": w8a16.W8A16GroupedProjection,
    "bf16": bf16.Bf16GroupedProjection,
}


def experts(context: Context, matrices: Sequence[ExpertMatrices]) -> Experts:
    """Experts by their storage.

    Routed experts are packed if all of a layer are NVFP4, and the shared one with them if it is, too, else by itself in
    FP8 or bf16. If not all routed ones are NVFP4, all are dequantised, at four times the memory.
    """
    *routed, shared = matrices
    if any(_operands(context, _shards(expert)) != "nvfp4" for expert in routed):
        return bf16.Bf16Experts(context, matrices)
    kind = _operands(context, _shards(shared))
    if kind == "nvfp4":
        return W4A16Experts(context, matrices)
    make = w8a16.W8A16SharedExpert if kind == "fp8" else bf16.Bf16SharedExpert
    return W4A16Experts(context, routed, make(context, shared))


def _shards(expert: ExpertMatrices) -> Sequence[Shard]:
    return (*expert.gate_up, expert.down)


class W4A16Experts(nn.Module):
    """Experts as two grouped GEMMs; the epilogue of the first does SwiGLU.

    Args:
        matrices: of the groups: routed experts, then the shared one unless it is apart.
        shared: the shared expert that runs apart.
    """

    takes = Form.VALUES

    def __init__(
        self,
        context: Context,
        matrices: Sequence[ExpertMatrices],
        shared: w8a16.W8A16SharedExpert | bf16.Bf16SharedExpert | None = None,
    ):
        super().__init__()
        self._config, self._device, self._groups = context.config, context.device, len(matrices)
        self.shared, self.has_shared_group = shared, shared is None
        w13: TiledWeights | None = None
        w2: TiledWeights | None = None
        # A few experts at a time, so that the host never holds a whole layer.
        for first, batch in expert_batches(context.source, matrices):
            gate_up, down = load_experts(context, batch)
            if w13 is None or w2 is None:
                _, _, features, k = gate_up.shape
                w13 = TiledWeights.allocate_gated_experts(len(matrices), features, k, context.device)
                w2 = TiledWeights.allocate_experts(len(matrices), k, features, context.device)
            w13.put_gated_experts(first, gate_up.packed, gate_up.block_scale, gate_up.global_scale, checked=True)
            w2.put_experts(first, down.packed, down.block_scale, down.global_scale, checked=True)
        assert w13 is not None and w2 is not None
        self.w13, self.w2 = W4A16Weights(w13), W4A16Weights(w2)

    def new_routes(self, tokens: int) -> Routes:
        """Routes whose groups begin at multiples of the GEMMs' token tile."""
        visits = self._config.num_experts_per_tok + self.has_shared_group
        tile = operations.w4a16_expert_token_tile_for(tokens * visits, self._groups)
        return Routes.allocate(tokens, visits, self._groups, tile, self._device)

    def forward(self, x: Operand, routes: Routes, step: Step) -> Tensor:
        """The weighted sum of experts, bf16 [T, d]; weights multiply the bf16 rows of the last GEMM, sums are fp32.

        A shared expert that runs apart is added last.
        """
        values = x.require_values()
        groups, limit = (routes.tile, routes.offsets, routes.counts), self._config.swiglu_limit
        if operations.w4a16_gathers(routes.tile):
            hidden = operations.expert_gate_up(values, *groups, self.w13.operand, limit, sources=routes.source_row)
        else:
            rows = values.new_empty(routes.source_row.shape[0], values.shape[1])
            scatter_rows(values, routes.destination, rows)
            hidden = operations.expert_gate_up(rows, *groups, self.w13.operand, limit)
        output = operations.expert_down(hidden, *groups, self.w2.operand)
        shared = None if self.shared is None else self.shared(values)
        return finalize(output, routes.destination, routes.weights, torch.empty_like(values), shared=shared)


class W4A16Planner(GemmPlanner):
    """Knows what kernels are compiled for by the number of tokens."""

    def warm_up_passes(self, tokens: int) -> Iterator[PassRequest]:
        """Passes of every kind: routing kernels are compiled for the token tile of the experts' GEMMs and for whether
        the number of padded rows is a multiple of 16, and the kernel that prepares attention for the number of tokens
        whose index weights it computes."""
        sizes = {
            (product.experts_per_token, product.groups) for product in self.products() if product.experts_per_token
        }

        def kind(count: int) -> Hashable:
            found = []
            for visits, groups in sorted(sizes):
                tile = operations.w4a16_expert_token_tile_for(count * visits, groups)
                found.append((tile, padded_rows(count * visits, groups, tile) % 16 == 0))
            return tuple(found)

        return warm_up_passes(self.slots, tokens, self.context.parallel, kind, padded_tokens)

    def products(self) -> Sequence[GemmSpec]:
        """The GEMMs of the model's layers on this rank, by the storages of its matrices."""
        context = self.context
        return list(dict.fromkeys(HOPPER.gemms(context.config, context.parallel.size, context.source.storage)))
