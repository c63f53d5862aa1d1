"""The weight operand of the MXFP8 GEMMs: E4M3 codes and swizzled UE8M0 block scales.

value[r, k] = e4m3(codes[r, k]) · 2^(block_scale[r, k // 32] − 127), block scales in the layout of
``nvfp4_sgl.formats.scale_layout``. Constructors take plain block scales and swizzle them once, at load time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import require_contiguous, require_dimensions, require_multiple
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.scale_layout import swizzle_128x4
from nvfp4_sgl.limits import MXFP8_K_MULTIPLE

from ..common.gates import interleave_gates
from ..sm100.shape import GATE_ROWS


@dataclass(frozen=True)
class MxFp8Weights:
    """The weight of a GEMM, or a stack of weights of a grouped one.

    Attributes:
        codes: float8_e4m3fn [G, F, K], contiguous; G = 1 but for a grouped GEMM. Gated: F = 2 I rows, 16 gates, the 16
            ups of the same features, the next 16 gates and so on.
        block_scales: uint8, flat, one padded matrix after another; padding is zero.
        ones: fp32 [2], ones: row and global scales for the kernels, which have one epilogue for all operands.
    """

    codes: Tensor
    block_scales: Tensor
    ones: Tensor

    @property
    def features(self) -> int:
        """Weight rows of a matrix."""
        return self.codes.shape[1]

    @classmethod
    def of(cls, weights: MxFp8Tensor) -> MxFp8Weights:
        """Weights of a dense GEMM [F, K], or of a block-diagonal one [G, F, K]; codes are not copied.

        Raises:
            OperandValueError: a shape or stride does not fit.
        """
        if weights.codes.dim() not in (2, 3):
            raise OperandValueError(f"codes: expected shape [F, K] or [G, F, K], found {tuple(weights.codes.shape)}")
        require_multiple("codes", "K", weights.codes.shape[-1], MXFP8_K_MULTIPLE, "whole blocks")
        require_contiguous("codes", weights.codes)
        matrices = weights.codes if weights.codes.dim() == 3 else weights.codes.unsqueeze(0)
        ones = torch.ones(2, dtype=torch.float32, device=weights.codes.device)
        return cls(matrices, swizzle_128x4(weights.scale).flatten(), ones)

    @classmethod
    def gated(cls, weights: MxFp8Tensor) -> MxFp8Weights:
        """The gate and up projections [2, I, K] of one expert, the gate first; a copy.

        Raises:
            OperandValueError: a shape does not fit.
        """
        require_dimensions("codes", weights.codes, 3, "[2, I, K]")
        require_multiple("codes", "I", weights.codes.shape[1], GATE_ROWS, "gates and ups alternate by so many")
        codes = interleave_gates(weights.codes.view(torch.uint8), GATE_ROWS).view(torch.float8_e4m3fn)
        return cls.of(MxFp8Tensor(codes, interleave_gates(weights.scale, GATE_ROWS)))
