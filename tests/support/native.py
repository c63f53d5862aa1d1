"""Which targets the GPU decoder's tests run on, and what runs their GEMMs there.

On a GPU it is the GPU's own target with nothing replaced. Without one every GPU target is run, its Triton kernels
interpreted and its GEMMs computed in torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.choose import detect_target
from nvfp4_sgl.targets.target import modes
from tests.support.calm import write_calm
from tests.support.interpreted import ON_GPU
from tests.support.reference_gemms import reference_gemms

GPU_TARGETS = ("sm_90a", "sm_100a")
MODES = {target: modes(target)[0] for target in GPU_TARGETS}
"""A target's own activation mode, in which the CPU reference is its yardstick."""


class Run(NamedTuple):
    """A target in one of its activation modes."""

    target: str
    mode: ActivationMode

    def __str__(self) -> str:
        return f"{self.target}-{self.mode.value}"


def targets(on_gpu: bool = ON_GPU) -> tuple[str, ...]:
    """This GPU's, or without one both.

    Raises:
        UnsupportedError: this GPU is neither Hopper nor Blackwell.
    """
    return (detect_target(),) if on_gpu else GPU_TARGETS


def runs(on_gpu: bool = ON_GPU) -> tuple[Run, ...]:
    """:func:`targets` in each of their modes."""
    return tuple(Run(target, mode) for target in targets(on_gpu) for mode in modes(target))


@contextmanager
def gemms(target: str, on_gpu: bool = ON_GPU) -> Iterator[None]:
    """GEMMs inside the block are the target's own on its GPU; elsewhere they are computed in torch."""
    if on_gpu:
        yield
        return
    with reference_gemms(target):
        yield


def write_checkpoint(target: str, path: Path, *, seed: int, mode: ActivationMode | None = None, **shapes: Any) -> Path:
    """A full-NVFP4 checkpoint on which whole models can be compared; returns ``path``.

    FP4 activations amplify every rounding, so that in ``w4a4`` a mistake shows in a calm model only.
    """
    if (mode or MODES[target]) is ActivationMode.W4A4:
        return write_calm(path, seed=seed, **shapes)
    write_tiny(path, "nvfp4-full", seed=seed, **shapes)
    return path
