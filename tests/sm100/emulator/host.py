"""Glue to CuTeDSL: its compiled host code launches into the emulator instead of a driver.

``compile_for`` compiles for a GPU that need not be there, linked with a C stand-in for CuTeDSL's runtime
(host_runtime.c, built with gcc on first use). Inside ``emulated(…)`` a call of what it returns runs every launch in
the emulator. Host code, argument passing, tensor-map construction and grid computation are CuTeDSL's own.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.sm100.emulator.engines import Options
from tests.sm100.emulator.errors import EmulatorError, UnsupportedError
from tests.sm100.emulator.launch import Launch
from tests.sm100.emulator.memory import GlobalMemory, Range
from tests.sm100.emulator.ptx import Kernel, parse
from tests.sm100.emulator.statistics import Statistics
from tests.sm100.emulator.stream import Stream

COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_LAUNCH = 2, 4, 6
"""Launch attributes (CUDA runtime API, cudaLaunchAttributeID). A cooperative launch would need all CTAs at once."""
FAILED = 999


class _Extent(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", _Extent),
        ("block", _Extent),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_Config), ctypes.POINTER(ctypes.c_void_p))


@functools.cache
def _runtime() -> tuple[ctypes.CDLL, Path]:
    """The stand-in, compiled into a folder that lives as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="emulator-"))
    library = folder / "libemulator_runtime.so"
    source = Path(__file__).with_name("host_runtime.c")
    command = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    # Before any other runtime: code that was compiled ahead finds its functions in the first one.
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL), library


def runtime_library() -> Path:
    """The stand-in's file, for code that was compiled ahead of time and needs a runtime."""
    return _runtime()[1]


@contextmanager
def _stand_in(architecture: str | None = None) -> Iterator[None]:
    """CuTeDSL with the stand-in for its runtime, and one device (of an architecture, if CuTeDSL is to compile)."""
    from cutlass.base_dsl.compiler import CompileCallable  # noqa: F401  imports the DSL whole
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    environment = CuTeDSL._get_dsl().envar
    with (
        patch.object(environment, "shared_libs", str(_runtime()[1])),
        # CuTeDSL makes code callable only for the architecture that it takes the machine to have.
        patch.object(environment, "arch", architecture or environment.arch),
        patch.object(CudaDialectJitCompiledFunction, "num_devices", property(lambda self: 1)),
    ):
        yield


@dataclass
class Compiled:
    """A function compiled for a GPU, with its kernels parsed. ``patched`` replaces the PTX (mutation tests)."""

    function: Any
    ptx: str
    kernels: dict[str, Kernel] = field(init=False)

    def __post_init__(self) -> None:
        self.kernels = parse(self.ptx).kernels

    def patched(self, old: str, new: str, count: int = 1) -> Compiled:
        """The same host code with ``old`` replaced in the PTX.

        Raises:
            ValueError: ``old`` does not occur exactly ``count`` times.
        """
        if self.ptx.count(old) != count:
            raise ValueError(f"{old!r} occurs {self.ptx.count(old)} times, expected {count}")
        return Compiled(self.function, self.ptx.replace(old, new))


def compile_for(architecture: str, function: Any, *arguments: Any, options: str = "") -> Compiled:
    """``cute.compile`` for e.g. "sm_100a", keeping the PTX.

    Args:
        architecture: as ``--gpu-arch`` takes it.
        function: a ``@cute.jit`` function or method.
        arguments: fake tensors and literals; see CuTeDSL.
        options: further compile options.
    """
    import cutlass.cute as cute

    with _stand_in(architecture), tempfile.TemporaryDirectory() as folder:
        flags = f"--gpu-arch {architecture} --keep-ptx --dump-dir {folder} {options}"
        compiled = cute.compile(function, *arguments, options=flags)
        return Compiled(compiled, str(compiled.__ptx__))


@dataclass
class Emulator:
    """Runs launches; ``statistics`` has one entry for each.

    With ``Options.overlap`` results are complete after ``stream.synchronize`` or the end of ``emulated`` only.
    """

    options: Options
    memory: GlobalMemory
    statistics: list[Statistics] = field(default_factory=list)
    stream: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = Stream(self.options)

    def __call__(self, compiled: Compiled, *arguments: Any, **keywords: Any) -> None:
        """Call a compiled function.

        Raises:
            EmulatorError: what a kernel did wrong, or what is not modelled.
        """
        failures: list[BaseException] = []

        def launch(name: bytes, config: Any, parameters: Any) -> int:
            try:
                self._launch(compiled.kernels[name.decode()], config.contents, parameters)
            except BaseException as error:
                failures.append(error)
                return FAILED
            return 0

        callback = _Callback(launch)
        _runtime()[0].emulator_on_launch(callback)
        try:
            with _stand_in():
                compiled.function(*arguments, **keywords)
        except Exception as error:
            if not failures:
                raise EmulatorError(f"the host code failed: {error}") from error
        finally:
            _runtime()[0].emulator_on_launch(_Callback())
            module = getattr(compiled.function, "jit_module", None)
            if module is not None:
                # The stand-in's handles: where there is a driver, CuTeDSL would have it unload them.
                module.cuda_library.clear()
        if failures:
            raise failures[0]

    def _launch(self, kernel: Kernel, config: _Config, parameters: Any) -> None:
        cluster, programmatic = (1, 1, 1), False
        for attribute in config.attributes[: config.count]:
            if attribute.id == CLUSTER_DIMENSION:
                cluster = tuple(attribute.value[:3])
            elif attribute.id == PROGRAMMATIC_LAUNCH:
                programmatic = bool(attribute.value[0])
            elif attribute.id != COOPERATIVE or attribute.value[0]:
                raise UnsupportedError(f"launch attribute {attribute.id} = {list(attribute.value[:4])}")
        values = [ctypes.string_at(parameters[i], known.size) for i, known in enumerate(kernel.parameters)]
        grid, block = ((extent.x, extent.y, extent.z) for extent in (config.grid, config.block))
        memory = self.stream.memory(self.memory)
        launch = Launch(kernel, grid, block, cluster, config.shared_bytes, values, memory, self.options)
        self.statistics.append(launch.statistics)
        self.stream.submit(launch, programmatic)


def _range(buffer: Any, writable: bool, name: str) -> Range:
    """The bytes of a contiguous NumPy array or PyTorch tensor."""
    if isinstance(buffer, np.ndarray):
        return Range(buffer.ctypes.data, buffer.ctypes.data + buffer.nbytes, writable, name)
    return Range(buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.element_size(), writable, name)


@contextmanager
def emulated(
    options: Options | None = None, *, reads: Sequence[Any] = (), writes: Sequence[Any] = ()
) -> Iterator[Emulator]:
    """An emulator whose kernels may read ``reads`` and ``writes``, and write ``writes`` only.

    ``with emulated(Options(mode="random", seed=3), reads=[a], writes=[b]) as emulator: emulator(compiled, a, b)``
    """
    ranges = [_range(buffer, False, f"reads[{i}]") for i, buffer in enumerate(reads)]
    ranges += [_range(buffer, True, f"writes[{i}]") for i, buffer in enumerate(writes)]
    emulator = Emulator(options or Options(), GlobalMemory(ranges))
    yield emulator
    emulator.stream.synchronize()
