"""Two kernels launched by one CuTeDSL function, the second of them as the first one's programmatic dependent."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from tests.sm100.emulator import Compiled, compile_for

THREADS = 64


class AddThenDouble:
    """middle = source + 1, target = 2 · middle.

    Attributes:
        programmatic: the second launch has the attribute.
        waits: the second kernel waits for the first.
    """

    def __init__(self, programmatic: bool, waits: bool) -> None:
        self.programmatic, self.waits = programmatic, waits

    @cute.jit
    def __call__(self, source: cute.Tensor, middle: cute.Tensor, target: cute.Tensor, stream: object) -> None:
        blocks = cute.size(source) // THREADS
        self.add(source, middle).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)
        self.double(middle, target).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=self.programmatic
        )

    @cute.kernel
    def add(self, source: cute.Tensor, middle: cute.Tensor) -> None:
        place = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_launch_dependents()
        middle[place] = source[place] + 1

    @cute.kernel
    def double(self, middle: cute.Tensor, target: cute.Tensor) -> None:
        place = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if cutlass.const_expr(self.waits):
            cute.arch.griddepcontrol_wait()
        target[place] = middle[place] * 2


@functools.cache
def compiled_add_then_double(programmatic: bool, waits: bool, size: int) -> Compiled:
    tensor = make_fake_compact_tensor(cutlass.Int32, (size,), assumed_align=16)
    return compile_for("sm_100a", AddThenDouble(programmatic, waits), tensor, tensor, tensor, make_fake_stream())
