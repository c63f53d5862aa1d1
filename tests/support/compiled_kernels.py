"""Kernels that tests compile ahead: launches without tensors, and compilation in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton
from triton.compiler import CompiledKernel

from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from nvfp4_sgl.targets.fused import compile_ahead, compile_worker
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.ahead import Variant
from nvfp4_sgl.triton_kernels.hyper_connection.streams import rms_norm
from tests.sm100.emulator.host import runtime_library

META = torch.device("meta")
SMALLEST_KERNEL = KernelKey("sm_90a", KernelShape(8))


def run_here(job: compile_ahead.Job, processes: int) -> None:
    """In place of ``compile_ahead._run``: no process is started, which would take longer to import than to compile."""
    runtime_library()  # whose functions an object file resolves
    with ahead.targeting(job.capability, compile_worker.PROCESSORS):
        compile_ahead.work(job)


def normalise(rows: int = 4, width: int = 1024) -> None:
    """A launch on tensors without storage."""
    x = torch.empty(rows, width, dtype=torch.bfloat16, device=META)
    rms_norm(x, torch.empty(width, dtype=torch.bfloat16, device=META), 1e-6, out=torch.empty_like(x))


def noted(launch: Callable[[], None]) -> list[Variant]:
    with ahead.targeting(90, 132), ahead.recording() as variants:
        launch()
    return list(variants)


@contextmanager
def loading() -> Iterator[None]:
    """Launches load their kernels, and run nothing."""
    with (
        ahead.targeting(90, 132),
        mock.patch.object(CompiledKernel, "run", property(lambda self: lambda *arguments: None)),
        mock.patch.object(CompiledKernel, "launch_metadata", lambda *arguments: None),
    ):
        yield


def hits(launch: Callable[[], None]) -> list[bool]:
    """For each kernel that a launch loads whether Triton found it on disk."""
    found: list[bool] = []

    def listen(*args: Any, cache_hit: bool, **more: Any) -> None:
        found.append(cache_hit)

    with loading(), mock.patch.object(triton.knobs.compilation, "listener", listen):
        launch()
    return found
