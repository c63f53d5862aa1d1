"""GEMMs of FP8 weights with bf16 activations on Hopper's tensor cores: the operations that callers use.

Each writes into ``out``, which it allocates unless given. Weights are expanded to bf16, which is exact; sums are fp32;
then one rounding to the output dtype.

Programmatic dependent launch: a GEMM loads its weights before the kernel before it has ended. So neither that kernel
nor one from which such GEMMs alone separate it may write them: nothing may rely on how these wait
(``launcher.CudaLauncher``).

Limits: K a multiple of 64; the address of every operand, every stride, and a row of outputs a multiple of 16 bytes
(features in multiples of 8 for bf16, 4 for fp32).

The GEMMs raise OperandTypeError if a dtype does not fit; OperandValueError if a shape, stride, alignment or device does
not; ArchitectureError on other devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import custom_ops  # noqa: F401  registers torch.ops.nvfp4_sgl
from .operand import Fp8TiledWeights

__all__ = ["product"]


def product(
    tokens: Tensor, weights: Fp8TiledWeights, *, out: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute the dense GEMM ``tokens @ weights.T``, or the block-diagonal one,
    ``out[t, g] = weights[g] @ tokens[t, g]``.

    Args:
        tokens: bf16 [T, K], the last dimension contiguous; or [T, G, K], rows and groups with any stride of a multiple
            of 16 bytes.
        weights: ``Fp8TiledWeights.of`` [F, K] or [G, F, K].
        out: bf16 or fp32 [T, F] or [T, G, F], the last dimension contiguous; allocated unless given.
        dtype: dtype of the result if ``out`` is not given.

    Returns:
        ``out``.
    """
    if out is None:
        out = tokens.new_empty((*tokens.shape[:-1], weights.features), dtype=dtype)
    torch.ops.nvfp4_sgl.w8a16_product(tokens, weights.tiles, weights.ones, out)
    return out
