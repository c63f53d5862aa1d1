"""Put on PYTHONPATH, with TRITON_INTERPRET=1, to serve as on a GPU, but with the kernels interpreted on the CPU.

Nothing else of a server changes: SGLang and this package take the machine for one without a GPU, so pools and batches
are those of ``--device cpu``, and the model and its backend are the GPU's.
"""

import importlib.machinery
import sys
from typing import Any


def _take_the_gpu_classes(decoders):
    def build_decoder(target, reader, config, mode, parallel):
        import torch

        from nvfp4_sgl.gpu.context import GpuContext
        from nvfp4_sgl.gpu.decoder import GpuDecoder

        return GpuDecoder(GpuContext(reader, config, torch.device("cpu"), mode, parallel))

    def build_backend(runner):
        from nvfp4_sgl.serving.gpu_backend import GpuAttentionBackend

        return GpuAttentionBackend(runner)

    decoders.build_decoder, decoders.build_backend = build_decoder, build_backend


def _warm_up_with_one_size(warm_up):
    """Nothing is compiled, so more sizes would show nothing more, and each takes seconds."""
    warm_up.sizes = lambda limit: [min(limit, 2)]


PATCHES = {"nvfp4_sgl.serving.decoders": _take_the_gpu_classes, "nvfp4_sgl.gpu.warm_up": _warm_up_with_one_size}
"""What is done to a module as soon as it has been imported."""


class _Patcher:
    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_patch(module):
            execute(module)
            PATCHES[name](module)

        loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, _Patcher())
