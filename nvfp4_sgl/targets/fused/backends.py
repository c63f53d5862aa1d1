"""SM100's GEMMs by the storage of their matrices: NVFP4 (:mod:`.gemm_w4a4`), FP8 as MXFP8 (:mod:`.gemm_mxfp8`)
or bf16 (:mod:`.gemm_bf16`).

Matrices that read the same activation are merged with those of their kind. Routed experts are NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from nvfp4_sgl.cutedsl_kernels.w4a4 import operations
from nvfp4_sgl.model.contract import (
    Context,
    Experts,
    GroupedProjection,
    InputProjection,
    PassRequest,
    Projection,
)
from nvfp4_sgl.targets.fused.gemm_bf16 import Bf16GroupedProjection, Bf16Projection, Bf16SharedExpert
from nvfp4_sgl.targets.fused.gemm_mxfp8 import MxFp8GroupedProjection, MxFp8Projection, MxFp8SharedExpert
from nvfp4_sgl.targets.fused.gemm_planner import GemmPlanner
from nvfp4_sgl.targets.fused.gemm_w4a4 import NvFp4Experts, NvFp4GroupedProjection, NvFp4Projection
from nvfp4_sgl.targets.fused.input_columns import InputColumns
from nvfp4_sgl.targets.fused.projections import Projections, merged, operands_of
from nvfp4_sgl.targets.fused.warm_up import warm_up_passes
from nvfp4_sgl.targets.target import SM100
from nvfp4_sgl.triton_kernels.attention_inputs.index_weights import padded_tokens
from nvfp4_sgl.triton_kernels.experts.permutation import padded_rows
from nvfp4_sgl.weights.gemms import GemmSpec, Operands
from nvfp4_sgl.weights.layout import ExpertMatrices
from nvfp4_sgl.weights.source import Shard

PROJECTIONS: Projections = {
    "nvfp4": NvFp4Projection,
    "mxfp8": MxFp8Projection,
    "bf16": Bf16Projection,
}
GROUPED: Mapping[Operands, Callable[[Context, Shard, int], GroupedProjection]] = {
    "nvfp4": NvFp4GroupedProjection,
    "mxfp8": MxFp8GroupedProjection,
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
        return NvFp4Experts(context, matrices)
    make = MxFp8SharedExpert if kind == "mxfp8" else Bf16SharedExpert
    return NvFp4Experts(context, routed, make(context, shared))


class Sm100Planner(GemmPlanner):
    """Knows what kernels are compiled for by the number of tokens."""

    def warm_up_passes(self, tokens: int) -> Iterator[PassRequest]:
        """Passes of every kind: quantising kernels are compiled for the token tile of the GEMMs, routing kernels for
        that of the experts' GEMMs and for whether the number of padded rows is a multiple of 16, and the kernel that
        prepares attention for the number of tokens whose index weights it computes."""
        sizes = {
            (product.experts_per_token, product.groups) for product in self.products() if product.experts_per_token
        }

        def kind(count: int) -> Hashable:
            found: list[Hashable] = [operations.token_tile_for(count)]
            for visits, groups in sorted(sizes):
                tile = operations.expert_token_tile_for(count * visits, groups)
                found.append((tile, padded_rows(count * visits, groups, tile) % 16 == 0))
            return tuple(found)

        def tile(count: int) -> tuple[int, int]:
            return operations.token_tile_for(count), padded_tokens(count)

        return warm_up_passes(self.slots, tokens, self.context.parallel, kind, tile)

    def products(self) -> Sequence[GemmSpec]:
        """The GEMMs of the model's layers on this rank, by the storages of its matrices."""
        context = self.context
        return list(dict.fromkeys(SM100.gemms(context.config, context.parallel.size, context.source.storage)))
