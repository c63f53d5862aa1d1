"""RoPE frequencies of the two kinds of layers (specification §3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.config import ModelConfig, RopeTable
from nvfp4_sgl.ops.rope import inverse_frequencies


def frequencies(config: ModelConfig, table: RopeTable) -> Tensor:
    """fp32 [rope_dim / 2] on the CPU, radians per position.

    Computed on the CPU for every target: a GPU's powers differ in the last place, and SGLang loads models with the GPU
    as torch's default device.
    """
    base, yarn = (
        (config.compress_rope_theta, config.yarn) if table is RopeTable.COMPRESSED else (config.rope_theta, None)
    )
    with torch.device("cpu"):
        return inverse_frequencies(config.qk_rope_head_dim, base, yarn)
