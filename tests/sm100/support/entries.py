"""SM100 kernels compiled for the emulator, called as the package calls them: through their C interface."""

from __future__ import annotations

from typing import Any

from nvfp4_sgl.cutedsl_kernels.sm100.arguments import Arguments
from nvfp4_sgl.cutedsl_kernels.sm100.entry import Entry
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.native import NativeKernel
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Compiled, compile_for

_COMPILED: dict[Any, Compiled] = {}


class _Native:
    """A compiled function behind its C interface; loaded when first called, which is inside the emulator."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._kernel: NativeKernel | None = None

    def __call__(self, arguments: Arguments, stream: int) -> None:
        self._kernel = self._kernel or NativeKernel.of("kernel", self._function)
        self._kernel(arguments, stream)


def compile_entry(
    shape: KernelShape, epilogue: Epilogue, architecture: str = "sm_100a", programmatic_launch: bool = False
) -> Compiled:
    """A kernel, compiled once a process; it takes a call's arguments and a stream."""
    key = shape, epilogue, architecture, programmatic_launch
    if key not in _COMPILED:
        entry = Entry(shape, epilogue, programmatic_launch)
        compiled = compile_for(architecture, entry, *Entry.example(shape))
        compiled.function = _Native(compiled.function)
        _COMPILED[key] = compiled
    return _COMPILED[key]
