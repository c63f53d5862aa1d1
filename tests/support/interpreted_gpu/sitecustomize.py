"""Put on PYTHONPATH, with TRITON_INTERPRET=1, to serve as on a GPU, but with the kernels interpreted on the CPU.

Nothing else of a server changes: SGLang and this package take the machine for one without a GPU, so pools and batches
are those of ``--device cpu``, and the model and its backend are the GPU's.
"""

import dataclasses
import importlib.machinery
import sys
from typing import Any


def _choose_hopper(choose):
    """The CPU's options with Hopper's boundaries."""
    cpu, hopper = choose._cpu, choose._sm90

    def interpreted():
        return dataclasses.replace(cpu(), boundaries=hopper().boundaries)

    choose._CHOICES[choose.Target.CPU] = interpreted


def _warm_up_with_one_size(warm_up):
    """Nothing is compiled, so more sizes would show nothing more, and each takes seconds."""
    warm_up.sizes = lambda limit: [min(limit, 2)]


PATCHES = {
    "nvfp4_sgl.targets.choose": _choose_hopper,
    "nvfp4_sgl.targets.fused.warm_up": _warm_up_with_one_size,
}
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
