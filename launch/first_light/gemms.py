"""The step ``gemms``: every GEMM kernel that the model asks for, on random operands, against fp64.

``python -m first_light.gemms [--emulated]``
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from benchmarks.sm100.cases import CHECKPOINTS, MODELS, Case, cases, released
from benchmarks.sm100.measure import Workload

from first_light.journal import Journal
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.common.call import GemmCall
from nvfp4_sgl.cutedsl_kernels.common.clusters import Clusters
from nvfp4_sgl.cutedsl_kernels.common.native import NativeKernel
from nvfp4_sgl.cutedsl_kernels.compiled import KernelCache, KernelKey, compile_kernel
from nvfp4_sgl.cutedsl_kernels.launcher import CudaLauncher, Launcher
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config
from nvfp4_sgl.weights.gemms import distinct_gemms, step_gemms
from tests.sm100.support.launcher import EmulatedLauncher

RANKS = [1, 8]
TOKENS = [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 1024, 4096, 8192]
"""Both sides of every threshold between kernels, and up to the largest prefill."""
EMULATED_TOKENS = 9
"""More than a token tile of 8, so that the second is ragged."""
EMULATED_IN_MXFP8 = ("wo_a", "shared_experts.w1 + w3")
"""A grouped GEMM, and one with SwiGLU."""


class KeptKernels:
    """Compiles kernels, and leaves their code in the step's folder."""

    def __init__(self, journal: Journal):
        self._journal = journal

    def kernel(self, key: KernelKey) -> NativeKernel:
        return NativeKernel.of(key.name, compile_kernel(key, self._journal.keep_code(key.name)))


class JournalledLauncher:
    """Notes each kernel before another launcher runs it."""

    def __init__(self, journal: Journal, runner: Launcher):
        self._journal, self._runner = journal, runner
        self.programmatic_launch, self.pin = runner.programmatic_launch, runner.pin

    def architecture(self, device: torch.device) -> str:
        return self._runner.architecture(device)

    def clusters(self, device: torch.device) -> Clusters:
        return self._runner.clusters(device)

    def freeze(self) -> None:
        self._runner.freeze()

    def launch(self, key: KernelKey, call: GemmCall, clusters: int) -> None:
        self._journal.launch(key.name, repr(key))
        self._runner.launch(key, call, clusters)


def of_the_models() -> list[Case]:
    """One case for every kernel of Flash and Pro, all in NVFP4 and as released, the simplest kernels first."""
    found: dict[KernelKey, Case] = {}
    for checkpoint in CHECKPOINTS:
        for case in cases(list(MODELS), RANKS, TOKENS, checkpoint):
            found.setdefault(case.key, case)

    def complexity(case: Case) -> tuple[bool, int, bool, bool, int, int]:
        shape = case.shape
        return shape.pair, shape.cluster, shape.grouped, shape.gated, shape.token_tile, case.product.k

    return sorted(found.values(), key=complexity)


def of_a_tiny_model() -> list[Case]:
    """The GEMMs of a model that a CPU can emulate in seconds, one of each kind, and some of it as released."""
    config = ModelConfig.from_dict(tiny_config(TinyFormat.NVFP4_FULL, {}))
    of_release = step_gemms(config, 1, released)
    products = [*distinct_gemms(config, 1), *(one for one in of_release if one.name in EMULATED_IN_MXFP8)]
    return [Case("tiny", 1, product, EMULATED_TOKENS, config.swiglu_limit) for product in products]


def check(found: list[Case], device: torch.device, journal: Journal) -> None:
    """Each case in turn.

    Raises:
        Departure: of the first whose output is further from fp64 than rounding explains.
    """
    for case in found:
        product = case.product.name if case.kind == "nvfp4" else f"{case.product.name} in MXFP8"
        name = f"{case.model}, TP {case.ranks}, {product}, {case.tokens} tokens"
        print(name, flush=True)
        with journal.item(name):
            Workload.make(case, device).check()


@contextmanager
def launching(runner: Launcher, journal: Journal) -> Iterator[None]:
    with launcher.use(JournalledLauncher(journal, runner)):
        yield


def main(arguments: list[str]) -> int:
    journal = Journal.of_this_process()
    emulated = "--emulated" in arguments
    runner: Launcher = EmulatedLauncher() if emulated else CudaLauncher(KernelCache(KeptKernels(journal)))
    found, device = (of_a_tiny_model(), "cpu") if emulated else (of_the_models(), "cuda:0")
    try:
        with launching(runner, journal):
            check(found, torch.device(device), journal)
    except Exception as error:
        print(f"DEPARTS: {type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
