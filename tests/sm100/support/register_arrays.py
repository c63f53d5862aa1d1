"""A kernel whose register array is indexed by values known at run time only, so that it lies in local memory."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from tests.sm100.emulator import Compiled, compile_for

THREADS, SIZE = 64, 8


@cute.kernel
def _permute(source: cute.Tensor, places: cute.Tensor, target: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor(SIZE, cutlass.Float32)
    for i in range(SIZE):
        values[places[thread * SIZE + i]] = source[thread * SIZE + i]
    for i in range(SIZE):
        target[thread * SIZE + i] = values[i]


@cute.jit
def _launch(source: cute.Tensor, places: cute.Tensor, target: cute.Tensor, stream: object) -> None:
    _permute(source, places, target).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@functools.cache
def compiled_permute() -> Compiled:
    """target[t, places[t, i]] = source[t, i] for 64 threads of 8 elements each, by way of a register array."""
    floats, integers = (
        make_fake_compact_tensor(kind, (THREADS * SIZE,), assumed_align=16) for kind in (cutlass.Float32, cutlass.Int32)
    )
    return compile_for("sm_100a", _launch, floats, integers, floats, make_fake_stream())
