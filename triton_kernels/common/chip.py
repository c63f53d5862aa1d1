"""Properties of a device that tilings depend on."""

from __future__ import annotations

from functools import cache

import torch


@cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of a CUDA device; 1 for a CPU, where the interpreter runs one program after another."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
