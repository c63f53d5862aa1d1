"""SM100 kernels compiled for the emulator, called as the package calls them: through their C interface."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey, entry_of
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Compiled, compile_for
from tests.sm100.support.kernel_cache import cached

if TYPE_CHECKING:
    from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue


@functools.cache
def compile_key(key: KernelKey) -> Compiled:
    """A kernel, compiled once for all processes; it takes a call's arguments and a stream."""
    return cached(key, _compile)


def _compile(key: KernelKey) -> Compiled:
    entry = entry_of(key)
    return compile_for(key.architecture, entry, *entry.example())


def compile_entry(
    shape: KernelShape, epilogue: Epilogue, architecture: str = "sm_100a", programmatic_launch: bool = True
) -> Compiled:
    """The same by shape and epilogue."""
    key = KernelKey(architecture, shape, epilogue.limit, epilogue.weighted, programmatic_launch)
    if key.row_scale_constant != epilogue.row_scale_constant:
        raise ValueError(f"{epilogue}: expected the row scale {key.row_scale_constant} that follows from the limit")
    return compile_key(key)
