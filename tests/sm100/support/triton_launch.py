"""Triton kernels launched on CPU tensors run as an SM100 GPU runs them: compiled for sm_100a, their PTX emulated.

Nothing is said twice: Triton specialises, compiles and caches each kernel as for a GPU, by itself. It only finds a
driver here that names the target, and where it would hand a compiled kernel to the GPU its PTX goes to the emulator,
with the CPU tensors' memory as global memory::

    with emulated_triton() as emulator:
        rms_norm(x, weight, 1e-6, out)  # any op of triton_kernels
    emulator.launches  # what ran

The process must import the kernels without Triton's interpreter: several are written differently for it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from triton.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources

from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.common.rounding import INTERPRETED
from tests.sm100.emulator import Options, UnsupportedError
from tests.sm100.emulator.launch import Launch
from tests.sm100.emulator.memory import SHARED_CAPACITY, GlobalMemory, Range
from tests.sm100.emulator.ptx import Kernel, parse
from tests.sm100.emulator.statistics import Statistics
from tests.sm100.emulator.stream import Stream
from tests.sm100.emulator.tensor_memory import TENSOR_COLUMNS

MULTIPROCESSORS = 148
"""Multiprocessors of a B200."""
FORMATS = {
    "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
"""How scalars are packed, by Triton's names of their types."""


@dataclass(frozen=True)
class TritonLaunch:
    """A launch that ran."""

    name: str
    grid: tuple[int, int, int]
    warps: int
    statistics: Statistics = field(repr=False)
    seconds: float


@dataclass
class EmulatedTriton:
    """Runs each launch at once, or with ``Options.overlap`` when its stream does; see ``emulator.stream``.

    With ``overlap`` nothing but launches may touch the tensors until the stream has been synchronised.
    """

    options: Options
    launches: list[TritonLaunch] = field(default_factory=list)
    stream: Stream = field(init=False)
    mapped: list[Any] = field(default_factory=list)
    """Tensors that launches may touch by addresses alone."""
    _held: list[Any] = field(default_factory=list)
    """Arguments of launches that may still run: their memory must not be given to others."""

    def __post_init__(self) -> None:
        self.stream = Stream(self.options)

    def run(self, compiled: CompiledKernel, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        """Execute a launch.

        Args:
            arguments: values of all of the kernel's parameters, those that are compiled in included.

        Raises:
            EmulatorError: what the kernel did wrong, or what is not modelled.
            OutOfResources: no SM100 could load the kernel.
        """
        if min(grid) <= 0:
            return
        metadata = compiled.metadata
        for what, needed, most in (
            ("shared memory", metadata.shared, SHARED_CAPACITY),
            ("tensor memory", metadata.tmem_size or 0, TENSOR_COLUMNS),
        ):
            if needed > most:
                raise OutOfResources(needed, most, what)
        if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.global_scratch_size:
            raise UnsupportedError(f"{metadata.name}: clusters, a cooperative grid or scratch memory")
        kernel = parsed(compiled)
        values, ranges = parameters(list(compiled.src.signature.values()), list(arguments))
        ranges += [_range(tensor, f"mapped {number}") for number, tensor in enumerate(self.mapped)]
        # Scratch for all programs and for profiling, which are last: neither is there.
        values += [bytes(8)] * 2
        if [len(value) for value in values] != [parameter.size for parameter in kernel.parameters]:
            raise UnsupportedError(f"{metadata.name}: parameters {kernel.parameters} for values {values}")
        threads = kernel.required_threads or (32 * metadata.num_warps, 1, 1)
        memory = self.stream.memory(GlobalMemory(ranges))
        launch = Launch(kernel, grid, threads, (1, 1, 1), metadata.shared, values, memory, self.options)
        if not self.stream.running:
            self._held.clear()
        self._held.append(arguments)
        started = time.perf_counter()
        self.stream.submit(launch, bool(metadata.launch_pdl))
        seconds = time.perf_counter() - started
        self.launches.append(TritonLaunch(metadata.name, grid, threads[0] // 32, launch.statistics, seconds))


_kernels: dict[str, Kernel] = {}


def parsed(compiled: CompiledKernel) -> Kernel:
    """The PTX of a kernel, read once a process."""
    if compiled.hash not in _kernels:
        _kernels[compiled.hash] = parse(compiled.asm["ptx"]).kernels[compiled.metadata.name]
    return _kernels[compiled.hash]


def parameters(types: list[Any], arguments: list[Any], name: str = "argument") -> tuple[list[bytes], list[Range]]:
    """The bytes of a kernel's parameters in order, and the memory that those which are tensors may touch.

    Args:
        types: of all parameters, as Triton specialised them: a tuple for a tuple, "constexpr" for what is compiled in.
        arguments: their values; of a tensor the memory from its first to its last element may be touched.
    """
    values: list[bytes] = []
    ranges: list[Range] = []
    for number, (kind, argument) in enumerate(zip(types, arguments, strict=True)):
        place = f"{name} {number}"
        if isinstance(kind, tuple):
            inner = parameters(list(kind), list(argument), place)
            values, ranges = values + inner[0], ranges + inner[1]
        elif kind.startswith("*"):
            values.append(struct.pack("Q", argument.data_ptr()))
            ranges.append(_range(argument, place))
        elif kind != "constexpr":
            if kind not in FORMATS:
                raise UnsupportedError(f"{place}: type {kind}")
            values.append(struct.pack(FORMATS[kind], argument))
    return values, ranges


def _range(tensor: Any, name: str) -> Range:
    start = tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + (last + 1) * tensor.element_size() if tensor.numel() else start
    return Range(start, end, True, f"{name}, {tensor.dtype} {list(tensor.shape)}")


@contextmanager
def emulated_triton(options: Options | None = None, multiprocessors: int = MULTIPROCESSORS) -> Iterator[EmulatedTriton]:
    """Triton launches inside run in the emulator, on a chip of so many multiprocessors.

    ``equal_writes`` and ``init_fence`` of the options are set as Triton's kernels need it.
    """
    if INTERPRETED.value:
        raise UnsupportedError("kernels imported with TRITON_INTERPRET set: they are written for the interpreter")
    emulator = EmulatedTriton(replace(options or Options(), equal_writes=True, init_fence=False))

    def launcher(compiled: CompiledKernel) -> Any:
        # What Triton hands a launcher: the grid, six things for the driver and hooks, the arguments.
        return lambda x, y, z, stream, function, packed, launch, enter, leave, *arguments: emulator.run(
            compiled, (x, y, z), arguments
        )

    _current.append(emulator)
    try:
        with (
            mock.patch.object(CompiledKernel, "run", property(launcher)),
            mock.patch.object(CompiledKernel, "launch_metadata", lambda *arguments: None),
            ahead.targeting(100, multiprocessors),
        ):
            yield emulator
            emulator.stream.synchronize()
    finally:
        _current.pop()


_current: list[EmulatedTriton] = []


def current_emulator() -> EmulatedTriton | None:
    """The one that launches run in now, if any."""
    return _current[-1] if _current else None
