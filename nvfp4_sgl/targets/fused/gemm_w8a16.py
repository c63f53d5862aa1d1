"""GEMMs of FP8 weights with bf16 activations on Hopper: the checkpoint's FP8 matrices with UE8M0 scales.

They stay packed, a byte a weight: their tiles for the tensor core are made once, on the GPU, and expanded to bf16 in
registers (exact). Activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nvfp4_sgl.cutedsl_kernels.w8a16 import operations
from nvfp4_sgl.cutedsl_kernels.w8a16.operand import Fp8TiledWeights
from nvfp4_sgl.errors import CheckpointError, OperandValueError
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.model.contract import Context, Form, Operand
from nvfp4_sgl.targets.fused.operands import in_form
from nvfp4_sgl.triton_kernels.experts.swiglu import swiglu
from nvfp4_sgl.weights.layout import ExpertMatrices
from nvfp4_sgl.weights.matrix import load_mxfp8, merge_mxfp8
from nvfp4_sgl.weights.source import Shard, frozen


class W8A16Weights(nn.Module):
    """The weight operand of a GEMM as parameters.

    Args:
        matrix: [F, K], or [G, F, K] of a block-diagonal GEMM; made of ``shards``.

    Raises:
        CheckpointError: a code or a scale that the GEMMs do not take; names the shards.
    """

    def __init__(self, context: Context, shards: Sequence[Shard], matrix: MxFp8Tensor):
        super().__init__()
        try:
            weights = Fp8TiledWeights.of(matrix.to(context.device))
        except OperandValueError as error:
            names = ", ".join(f"'{shard.stem}.weight'" for shard in shards)
            raise CheckpointError(
                f"{names}: not for Hopper's FP8 GEMMs: {error}; make NVFP4 of such matrices with 'nvfp4-sgl convert',"
                " or serve the checkpoint on a CPU"
            ) from None
        self.tiles, self.ones = frozen(weights.tiles), frozen(weights.ones)
        self.features, self.k = weights.features, weights.k

    @property
    def operand(self) -> Fp8TiledWeights:
        """As the GEMMs take it."""
        return Fp8TiledWeights(self.tiles.data, self.ones.data, self.features, self.k)


class W8A16Projection(nn.Module):
    """Matrices that read the same activation, merged into one GEMM."""

    takes = Form.VALUES

    def __init__(self, context: Context, shards: Sequence[Shard]):
        super().__init__()
        parts = [load_mxfp8(context.source, [shard]) for shard in shards]
        self.sizes = [part.shape[0] for part in parts]
        self.weights = W8A16Weights(context, shards, merge_mxfp8(parts))

    def product(self, x: Operand, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The columns of each shard, slices [T, rows] in ``dtype``."""
        return operations.product(x.require_values(), self.weights.operand, dtype=dtype).split(self.sizes, dim=1)

    def forward(self, x: Operand) -> list[Tensor]:
        """The columns of each shard in bf16."""
        return list(self.product(x, torch.bfloat16))


class W8A16GroupedProjection(nn.Module):
    """The block-diagonal GEMM of the attention output (specification §3.4)."""

    takes = Form.VALUES

    def __init__(self, context: Context, shard: Shard, groups: int):
        super().__init__()
        matrix = load_mxfp8(context.source, [shard], groups=groups)
        self.weights = W8A16Weights(context, [shard], matrix)

    def forward(self, x: Operand, form: Form) -> Operand:
        """The result [T, G * N] in ``form``."""
        return in_form(operations.product(x.require_values(), self.weights.operand).flatten(1), form)


class W8A16SharedExpert(nn.Module):
    """The shared expert by itself: two GEMMs with SwiGLU between them."""

    def __init__(self, context: Context, matrices: ExpertMatrices):
        super().__init__()
        self._limit = context.config.swiglu_limit
        gate_up, down = matrices.gate_up, [matrices.down]
        self.w13 = W8A16Weights(context, gate_up, load_mxfp8(context.source, gate_up))
        self.w2 = W8A16Weights(context, down, load_mxfp8(context.source, down))

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [T, d]; the rows between the GEMMs are bf16."""
        gate_up = operations.product(x, self.w13.operand)
        hidden = swiglu(gate_up, self._limit, x.new_empty(x.shape[0], gate_up.shape[1] // 2))
        return operations.product(hidden, self.w2.operand)
