"""Running a case: in the emulator on a CPU, or on the GPU of this machine.

One process should do one or the other: the emulator stands in for CuTeDSL's runtime library.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.sm100.emulator import Compiled, Options, compile_for, emulated
from tests.sm100.hardware.case import Case

HOPPER = "sm_90a"


def _arguments(tensors: list[torch.Tensor]) -> list[Any]:
    from cutlass.cute.runtime import from_dlpack

    return [from_dlpack(tensor, assumed_align=16) for tensor in tensors]


def compile_case(case: Case, architecture: str = HOPPER) -> Compiled:
    """Compile for the emulator."""
    return compile_for(architecture, case.function, *_arguments([*case.inputs.values(), *case.outputs.values()]))


def emulated_outputs(case: Case, compiled: Compiled, options: Options | None = None) -> dict[str, torch.Tensor]:
    """What a compiled case leaves in the emulator."""
    inputs = list(case.inputs.values())
    outputs = {name: tensor.clone() for name, tensor in case.outputs.items()}
    with emulated(options, reads=inputs, writes=list(outputs.values())) as emulator:
        emulator(compiled, *_arguments([*inputs, *outputs.values()]))
    return outputs


def gpu_outputs(case: Case, options: str = "") -> dict[str, torch.Tensor]:
    """Compile for the GPU that is there, run, and wait for it; ``options`` are the compiler's."""
    import cutlass.cute as cute

    inputs = [tensor.cuda() for tensor in case.inputs.values()]
    outputs = {name: tensor.cuda() for name, tensor in case.outputs.items()}
    arguments = _arguments([*inputs, *outputs.values()])
    compiled = cute.compile(case.function, *arguments, **({"options": options} if options else {}))
    torch.cuda.synchronize()
    compiled(*arguments)
    torch.cuda.synchronize()
    return {name: tensor.cpu() for name, tensor in outputs.items()}


def emulate(case: Case, compiled: Compiled, options: Options | None = None) -> dict[str, bytes]:
    """Results of a compiled case in the emulator."""
    return case.results(emulated_outputs(case, compiled, options))


def run_on_gpu(case: Case) -> dict[str, bytes]:
    """Results of a case on the GPU that is there."""
    return case.results(gpu_outputs(case))
