"""The operations' launcher, in the emulator: calls on CPU tensors run the kernels of an SM100 GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.common.call import GemmCall
from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS, Clusters
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.plan import Pin
from tests.sm100.emulator import Compiled, Options, emulated
from tests.sm100.support.entries import compile_key


@dataclass
class EmulatedLauncher:
    """Runs each call at once; ``keys`` are the kernels that ran, in order."""

    name: str = "sm_100a"
    gpu: Clusters = B200_CLUSTERS
    options: Options = field(default_factory=Options)
    compile: Callable[[KernelKey], Compiled] = compile_key
    programmatic_launch: bool = True
    pin: Pin | None = None
    keys: list[KernelKey] = field(default_factory=list)

    def architecture(self, device: torch.device) -> str:
        return self.name

    def clusters(self, device: torch.device) -> Clusters:
        return self.gpu

    def freeze(self) -> None:
        """Tests compile when they like."""

    def launch(self, key: KernelKey, call: GemmCall, clusters: int) -> None:
        read, written = ([_span(tensor) for tensor in tensors] for tensors in call.tensors())
        with emulated(self.options, reads=read, writes=written) as emulator:
            emulator(self.compile(key), call.arguments(clusters), 0)
        self.keys.append(key)


@contextmanager
def emulated_operations(**settings: object) -> Iterator[EmulatedLauncher]:
    """Operations inside run in the emulator."""
    runner = EmulatedLauncher(**settings)  # type: ignore[arg-type]
    with launcher.use(runner):
        yield runner


def _span(tensor: Tensor) -> Tensor:
    """All memory from the first to the last element, as a flat tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))
