"""Properties of a device that tilings depend on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton

from .rounding import INTERPRETED

_assumed: int | None = None
"""Multiprocessors of the GPU that :func:`assume` stands in for."""


def processors(device: torch.device) -> int:
    """Number of multiprocessors of a CUDA device; 1 for a CPU, where the interpreter runs one program after another."""
    if _assumed is not None:
        return _assumed
    return _of_cuda(device) if device.type == "cuda" else 1


def is_before_blackwell() -> bool:
    """Whether Triton compiles for Hopper or older GPUs, or interprets, whatever device is here."""
    return INTERPRETED.value or triton.runtime.driver.active.get_current_target().arch < 100


@contextmanager
def assume(count: int) -> Iterator[None]:
    """Choose tilings for a GPU with ``count`` multiprocessors inside the block, whatever is here."""
    global _assumed
    before, _assumed = _assumed, count
    try:
        yield
    finally:
        _assumed = before


@cache
def _of_cuda(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
