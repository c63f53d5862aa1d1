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
from nvfp4_sgl.model.contract import Activation, Context, Form
from nvfp4_sgl.targets.fused.gated import SwiGluGemm
from nvfp4_sgl.targets.fused.parameters import Parameters
from nvfp4_sgl.weights.matrix import load_mxfp8
from nvfp4_sgl.weights.source import Shard


def tiled(matrix: MxFp8Tensor, shards: Sequence[Shard]) -> Fp8TiledWeights:
    """The weight operand of a GEMM.

    Args:
        matrix: [F, K], or [G, F, K] of a block-diagonal GEMM; made of ``shards``.

    Raises:
        CheckpointError: a code or a scale that the GEMMs do not take; names the shards.
    """
    try:
        return Fp8TiledWeights.of(matrix)
    except OperandValueError as error:
        names = ", ".join(f"'{shard.stem}.weight'" for shard in shards)
        raise CheckpointError(
            f"{names}: Hopper's FP8 GEMMs do not take it: {error}; convert the matrix to NVFP4 with 'nvfp4-sgl"
            " convert', or serve the checkpoint on a CPU"
        ) from None


class W8A16Gemm(nn.Module):
    """A GEMM of merged matrices, or a block-diagonal one."""

    takes = Form.VALUES

    def __init__(self, context: Context, shards: Sequence[Shard], groups: int | None = None):
        super().__init__()
        matrix, self.sizes = load_mxfp8(context.source, shards, groups=groups)
        self.weights = Parameters(tiled(matrix.to(context.device), shards))

    def forward(self, x: Activation, dtype: torch.dtype, features: int | None = None) -> Tensor:
        weights = self.weights.operand if features is None else self.weights.operand.first(features)
        return operations.product(x.require_values(), weights, dtype=dtype)


class W8A16:
    """The backend of FP8 matrices with UE8M0 scales on Hopper."""

    def load(self, context: Context, shards: Sequence[Shard], groups: int | None = None) -> W8A16Gemm:
        return W8A16Gemm(context, shards, groups)

    def load_gated(self, context: Context, shards: Sequence[Shard]) -> SwiGluGemm:
        return SwiGluGemm(self.load(context, shards), torch.bfloat16)
