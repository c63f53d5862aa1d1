"""What kernels ask of the device they are laid out for."""

from __future__ import annotations

from functools import cache

import torch


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 for a CPU, where the interpreter runs one program after another."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
