"""Kernels by key, compiled once a process or loaded from a library built ahead of time.

A key holds everything that a kernel's code depends on. Sizes, strides and addresses are arguments, so other sizes never
compile anything.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.nvfp4 import swiglu_row_scale

from .common.native import NativeKernel
from .errors import LibraryError
from .sm90.shape import KernelShape as HopperShape
from .sm100.shape import KernelShape

if TYPE_CHECKING:
    from .common.entry import Entry

SHAPES: dict[str, type[HopperShape] | type[KernelShape]] = {
    "sm_90a": HopperShape,
    "sm_100a": KernelShape,
    "sm_103a": KernelShape,
}
"""The kernel shapes of each architecture that kernels are compiled for."""
ARCHITECTURES = tuple(SHAPES)


@dataclass(frozen=True)
class KernelKey:
    """Everything that a kernel's code depends on.

    Attributes:
        architecture: one of ARCHITECTURES.
        shape: the kernel's tile, cluster, split of K and output.
        limit: the SwiGLU clamp of a gated kernel, else None.
        weighted: whether each row has a weight.
        programmatic_launch: whether the kernel may start while its predecessor in the stream is ending (PDL).

    Raises:
        OperandValueError: the architecture is unknown or has no kernels of that shape, a limit is given for a kernel
            that is not gated (or the reverse), or rows have weights on an architecture whose kernels take none.
    """

    architecture: str
    shape: HopperShape | KernelShape
    limit: float | None = None
    weighted: bool = False
    programmatic_launch: bool = True

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise OperandValueError(f"architecture: expected one of {ARCHITECTURES}, found {self.architecture!r}")
        if not isinstance(self.shape, SHAPES[self.architecture]):
            raise OperandValueError(f"shape: expected one of {self.architecture}, found {self.shape}")
        if self.weighted and isinstance(self.shape, HopperShape):
            raise OperandValueError(f"weighted: expected False for {self.architecture}, found True")
        if self.shape.gated != (self.limit is not None):
            raise OperandValueError(f"limit: expected one for gated kernels only, found {self.limit} for {self.shape}")

    @property
    def row_scale_constant(self) -> float | None:
        """The constant row scale of NVFP4 output; None for other outputs."""
        return swiglu_row_scale(self.limit) if self.limit is not None and self.shape.output == "nvfp4" else None

    @property
    def name(self) -> str:
        """A C identifier, unique to the key."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        operands = self.shape.operands if isinstance(self.shape, KernelShape) else self.shape.weights
        return f"{operands}_{self.architecture}_t{self.shape.token_tile}_{self.shape.output}_{digest}"


def entry_of(key: KernelKey) -> Entry:
    """The function that ``cute.compile`` compiles for a key: ``cute.compile(entry, *entry.example())``."""
    from . import entries

    return entries.entry_of(key)


def compile_kernel(key: KernelKey, options: str = "") -> Any:
    """Compile the kernel of a key with ``cute.compile``; needs no GPU. ``options`` are added to the compiler's."""
    from . import entries

    return entries.compile_entry(entries.entry_of(key), f"--gpu-arch {key.architecture} {options}".rstrip())


class KernelSource(Protocol):
    """A source of compiled kernels: a library built ahead of time (:class:`.library.Library`)."""

    def kernel(self, key: KernelKey) -> NativeKernel | None:
        """The kernel, or None if the library does not have it."""


class KernelCache:
    """Kernels ready to launch; safe to use from several threads.

    Args:
        library: searched before anything is compiled.
        compile_missing: whether to compile kernels that the library lacks (about a second each), or to refuse.
    """

    def __init__(self, library: KernelSource | None = None, compile_missing: bool = True) -> None:
        self._libraries, self._compile_missing = [] if library is None else [library], compile_missing
        self._kernels: dict[KernelKey, NativeKernel] = {}
        self._lock = threading.Lock()

    def get(self, key: KernelKey) -> NativeKernel:
        """The kernel of a key.

        Raises:
            LibraryError: the kernel would have to be compiled, and compiling is switched off.
        """
        kernel = self._kernels.get(key)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(key) or self._make(key)
                self._kernels[key] = kernel
        return kernel

    def add(self, library: KernelSource) -> None:
        """Search ``library``, too, and compile what is missing until frozen again: a draft follows its target."""
        self._libraries.append(library)
        self._compile_missing = True

    def freeze(self) -> None:
        """Compile nothing from now on."""
        self._compile_missing = False

    def _make(self, key: KernelKey) -> NativeKernel:
        for library in self._libraries:
            found = library.kernel(key)
            if found is not None:
                return found
        if not self._compile_missing:
            raise LibraryError(
                f"{key}: not in the library of compiled kernels, and compiling is switched off; rebuild the library"
                " for this model and this many tokens, or allow compiling"
            )
        return NativeKernel.of(key.name, compile_kernel(key))
