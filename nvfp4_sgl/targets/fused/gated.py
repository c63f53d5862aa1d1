"""Gate and up of one expert where no GEMM has SwiGLU in its epilogue."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvfp4_sgl.model.contract import Activation
from nvfp4_sgl.targets.fused.gemm_backend import Gemm
from nvfp4_sgl.triton_kernels.experts.swiglu import swiglu


class SwiGluGemm(nn.Module):
    """A GEMM of gate and up, and SwiGLU in a launch of its own.

    Args:
        gemm: of the gate's rows, then the up's.
        dtype: what stands between the two launches.
    """

    def __init__(self, gemm: Gemm, dtype: torch.dtype):
        super().__init__()
        self.gemm: Gemm = gemm
        self._dtype = dtype

    def forward(self, x: Tensor, limit: float) -> Tensor:
        gate_up = self.gemm(Activation(x), self._dtype)
        return swiglu(gate_up, limit, x.new_empty(x.shape[0], gate_up.shape[1] // 2))
