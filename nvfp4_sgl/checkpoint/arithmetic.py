"""Arithmetic of rules and decoders, with torch; :func:`.values.arithmetic` imports it when values are read."""

from __future__ import annotations

import torch

from nvfp4_sgl.formats import fp8_block, mxfp4, mxfp8, ue8m0
from nvfp4_sgl.formats.checks import holds_any
from nvfp4_sgl.formats.fp8_block import Fp8BlockTensor
from nvfp4_sgl.formats.mxfp4 import MxFp4Tensor
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor

__all__ = [
    "Fp8BlockTensor",
    "MxFp4Tensor",
    "NvFp4Tensor",
    "fp8_block",
    "holds_any",
    "mxfp4",
    "mxfp8",
    "torch",
    "ue8m0",
]
