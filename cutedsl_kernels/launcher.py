"""The interface between operations and devices: compiles kernels and runs calls.

Operations ask the current launcher for a device's architecture and for how many clusters it runs at a time, and pass it
checked calls. The default launcher runs on CUDA; tests replace it by an emulator with :func:`use`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from .common.call import GemmCall
from .common.clusters import Clusters
from .compiled import KernelCache, KernelKey
from .errors import ArchitectureError
from .occupancy import active_clusters
from .plan import Pin

ARCHITECTURE_OF = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Architectures by compute capability."""


class Target(NamedTuple):
    """The target of plans: a device's architecture, how many clusters it runs at a time, and the pin if any."""

    architecture: str
    clusters: Clusters
    pin: Pin | None = None


class Launcher(Protocol):
    """Compiles kernels and runs calls. While it is installed, a device's architecture and clusters stay the same."""

    programmatic_launch: bool
    """What the kernels' keys have: see :class:`.compiled.KernelKey`."""
    pin: Pin | None
    """What all plans have in common; None plans for speed. Rows, the warm-up and calls must be made with the same."""

    def architecture(self, device: torch.device) -> str:
        """The device's architecture, one of ``compiled.ARCHITECTURES``.

        Raises:
            ArchitectureError: the device has another.
        """

    def clusters(self, device: torch.device) -> Clusters:
        """The number of clusters that the device runs at a time, for plans and launches. Cheap after the first call."""

    def launch(self, key: KernelKey, call: GemmCall, clusters: int) -> None:
        """Run a checked call on the current stream of its tensors' device, with a grid of ``clusters`` clusters."""

    def freeze(self) -> None:
        """Compile nothing from now on; a kernel that is not ready is an error."""


class CudaLauncher:
    """Launches on CUDA devices, from a cache of kernels.

    Args:
        kernels: the cache that kernels come from.
        programmatic_launch: let kernels start while their predecessor is ending. Until it has ended they write nothing
            and read nothing but weights; a GEMM over experts reads not even those, which follow from its counts, unless
            it is told that offsets and counts are ready (``counts_ahead``). So between a launch that writes weights, or
            such offsets and counts, and the GEMM that reads them there must be an ordinary launch, or a kernel that
            waits before it triggers the next (PDL): Triton's kernels, GEMMs over experts and Hopper's dense GEMMs do,
            SM100's dense GEMMs do not.
        pin: what all plans have in common; None plans for speed.
    """

    def __init__(
        self, kernels: KernelCache | None = None, programmatic_launch: bool = True, pin: Pin | None = None
    ) -> None:
        self.kernels = kernels or KernelCache()
        self.programmatic_launch, self.pin = programmatic_launch, pin

    def architecture(self, device: torch.device) -> str:
        if device.type != "cuda":
            raise ArchitectureError(
                f"device {device}: these kernels are CUDA code for {', '.join(ARCHITECTURE_OF.values())}; move the"
                " tensors to such a GPU, or use the torch reference"
            )
        capability, name = _describe(_index(device))
        if capability not in ARCHITECTURE_OF:
            raise ArchitectureError(
                f"device {device}: expected {' or '.join(ARCHITECTURE_OF.values())}, found sm_{capability[0]}"
                f"{capability[1]} ({name}), which no kernel is made for; use the torch reference"
            )
        return ARCHITECTURE_OF[capability]

    def clusters(self, device: torch.device) -> Clusters:
        return active_clusters(_index(device))

    def freeze(self) -> None:
        self.kernels.freeze()

    def launch(self, key: KernelKey, call: GemmCall, clusters: int) -> None:
        device, arguments = call.out.device, call.arguments(clusters)
        index = _index(device)
        # What torch.cuda has for this makes a dozen Python calls.
        if index == torch._C._cuda_getDevice():
            self.kernels.get(key)(arguments, torch._C._cuda_getCurrentRawStream(index))
            return
        # A kernel of a library is loaded into the current device.
        with torch.cuda.device(device):
            self.kernels.get(key)(arguments, torch._C._cuda_getCurrentRawStream(index))


def _index(device: torch.device) -> int:
    """The number of a CUDA device; "cuda" alone is the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _describe(index: int) -> tuple[tuple[int, int], str]:
    return torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)


_current: Launcher = CudaLauncher()
installed = 0
"""Launchers installed so far: what is kept of plans belongs to one of them."""


def current() -> Launcher:
    """The launcher that operations use."""
    return _current


def target(device: torch.device, architectures: Sequence[str], what: str) -> Target:
    """The target of plans for ``device``, whose architecture is one of ``architectures``.

    Args:
        what: the operations that have kernels for ``architectures``, for the error.

    Raises:
        ArchitectureError: the device has another.
    """
    found = _current.architecture(device)
    if found not in architectures:
        raise ArchitectureError(
            f"device {device}: expected {' or '.join(architectures)} for {what}, found {found}; use the operations made"
            " for it, or the torch reference"
        )
    return Target(found, _current.clusters(device), _current.pin)


def install(launcher: Launcher) -> None:
    """Use ``launcher`` from now on, in all threads."""
    global _current, installed
    _current = launcher
    installed += 1


@contextmanager
def use(launcher: Launcher) -> Iterator[None]:
    """Use ``launcher`` inside the block."""
    before = current()
    install(launcher)
    try:
        yield
    finally:
        install(before)
