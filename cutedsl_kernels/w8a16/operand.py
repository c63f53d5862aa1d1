"""The weight operand of the w8a16 GEMMs: tiles in the order in which wgmma's register operand takes them.

value[r, k] = e4m3(code[r, k]) · 2^(scale[r, k // 32] − 127). ``sm90/fp8_layout.py`` describes a tile. Tiles are made
once, on the GPU, right after the weights arrive there; nothing else of them is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor

from ..sm90.fp8_layout import pack_fp8_tiles
from ..sm90.layout import first_tiles


@dataclass(frozen=True)
class Fp8TiledWeights:
    """The weight of a GEMM [1, F, K], or the weights of a block-diagonal one [G, F, K].

    Attributes:
        tiles: uint8 [matrices, ceil(features / 128), ceil(K / 128), 16896].
        ones: fp32 [1], a one: the global scale for the kernels, which have one epilogue for all weights.
        features: rows of each matrix.
        k: K.
    """

    tiles: Tensor
    ones: Tensor
    features: int
    k: int

    @classmethod
    def of(cls, weights: MxFp8Tensor) -> Fp8TiledWeights:
        """Weights of a dense GEMM [F, K], or of a block-diagonal one [G, F, K].

        Args:
            weights: finite codes; K a multiple of 64; the scales of each 64 of K alike, as in blocks of 128 × 128, and
                from 2^-117 to 2^7 where a code is not 0.

        Raises:
            OperandValueError: a shape, a code or a scale does not fit.
        """
        if weights.codes.dim() not in (2, 3):
            raise OperandValueError(f"codes: expected shape [F, K] or [G, F, K], found {tuple(weights.codes.shape)}")
        codes, scale = weights.codes, weights.scale
        if codes.dim() == 2:
            codes, scale = codes.unsqueeze(0), scale.unsqueeze(0)
        ones = torch.ones(1, dtype=torch.float32, device=codes.device)
        return cls(pack_fp8_tiles(codes, scale), ones, codes.shape[1], codes.shape[2])

    def first(self, features: int) -> Fp8TiledWeights:
        """The weight of the first ``features`` rows of a dense GEMM, in place; errors as of ``first_tiles``."""
        tiles = first_tiles(self.tiles, self.features, features)
        return replace(self, tiles=tiles, features=features)
