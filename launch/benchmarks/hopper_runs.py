"""Parts that benchmarks of Hopper's GEMMs share: timing over rotated weights, kernels compiled ahead, those that fail
alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.kernels import microseconds
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.compiled import KernelCache, KernelKey
from nvfp4_sgl.cutedsl_kernels.library import Library
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from nvfp4_sgl.targets.fused.compile_ahead import compile_missing, library_folder

ROTATED_BYTES = 4 * 60 * 2**20
"""Weights that a graph reads before it reads any again: four times an H200's L2."""
LEAST_RUNS = 8


def rotating(runs: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one of ``runs``, in a graph that holds each, some several times."""
    many = list(runs) * -(-LEAST_RUNS // len(runs))
    return microseconds(lambda: [run() for run in many]) / len(many)


def compile_all(
    shapes: Sequence[KernelShape], limit: float | None, programmatic_launch: Sequence[bool] = (True,)
) -> None:
    """Compile the shapes' kernels in parallel, and take them from a library from here on.

    Args:
        limit: the SwiGLU clamp of those that are gated.
        programmatic_launch: kernels that may begin while the one in front is ending, kernels that may not, or both.
    """
    runner = launcher.current()
    assert isinstance(runner, launcher.CudaLauncher)
    keys = [
        KernelKey("sm_90a", shape, limit if shape.gated else None, programmatic_launch=programmatic)
        for shape in dict.fromkeys(shapes)
        for programmatic in programmatic_launch
    ]
    folder = library_folder(keys)
    compile_missing(keys, [], folder, 90)
    runner.kernels = KernelCache(Library(folder))


class Parts:
    """Parts of a benchmark that fail alone: what failed is printed, and the next goes on."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.failed.append(name)
            print(f"FAILED: {name}:\n{traceback.format_exc()}", flush=True)
