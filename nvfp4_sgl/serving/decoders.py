"""Which decoder and which attention backend serve a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.model.context import ModelContext
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.model.parallel import TensorParallel
from nvfp4_sgl.ops.dispatch import Target, reference_ops
from nvfp4_sgl.ops.linear import ActivationMode

if TYPE_CHECKING:
    from nvfp4_sgl.gpu.decoder import GpuDecoder

    AnyDecoder = Decoder | GpuDecoder


def build_decoder(
    target: Target, reader: CheckpointReader, config: ModelConfig, mode: ActivationMode, parallel: TensorParallel
) -> AnyDecoder:
    """The decoder of ``target`` with its weights loaded; on a GPU, this process's current device."""
    if target is Target.CPU:
        return Decoder(ModelContext(reader, config, reference_ops(), mode, parallel))
    from nvfp4_sgl.gpu.context import GpuContext
    from nvfp4_sgl.gpu.decoder import GpuDecoder

    device = torch.device("cuda", torch.cuda.current_device())
    return GpuDecoder(GpuContext(reader, config, device, mode, parallel))


def build_backend(runner: Any) -> Any:
    """The attention backend of the target that ``runner``'s model runs on."""
    if runner.model.target is Target.CPU:
        from nvfp4_sgl.serving.backend import Nvfp4AttentionBackend

        return Nvfp4AttentionBackend(runner)
    from nvfp4_sgl.serving.gpu_backend import GpuAttentionBackend

    return GpuAttentionBackend(runner)
