"""What every module of the GPU decoder is built from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.model.parallel import TensorParallel
from nvfp4_sgl.model.weights import WeightSource
from nvfp4_sgl.ops.linear import ActivationMode


@dataclass(frozen=True)
class GpuContext:
    """Weights, dimensions, place and this rank's share.

    Attributes:
        source: where tensors are read from; building a module reads its tensors.
        config: the model's dimensions.
        device: where parameters go. The CPU will do under Triton's interpreter.
        mode: what enters products with NVFP4 weights.
        parallel: this rank's share; the whole model unless given.
    """

    source: WeightSource
    config: ModelConfig
    device: torch.device
    mode: ActivationMode = ActivationMode.W4A16
    parallel: TensorParallel = field(default_factory=TensorParallel)
