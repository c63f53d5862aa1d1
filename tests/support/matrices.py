"""Values of matrices, whatever they arrive as."""

from __future__ import annotations

from torch import Tensor

from nvfp4_sgl.checkpoint.decoders import Matrix


def values_of(matrix: Matrix) -> Tensor:
    """fp32 [..., N, K]."""
    return matrix.float() if isinstance(matrix, Tensor) else matrix.dequantize()
