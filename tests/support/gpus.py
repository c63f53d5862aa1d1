"""Which GPUs this process may use, by the names that ``CUDA_VISIBLE_DEVICES`` gives them."""

from __future__ import annotations

import os

import pytest
import torch


def visible() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def one_gpu() -> str:
    """The last one: whoever chooses none takes the first."""
    return visible()[-1]


TWO_GPUS, FOUR_GPUS = (
    pytest.mark.skipif(len(visible()) < count, reason=f"needs {count} GPUs, this process sees {len(visible())}")
    for count in (2, 4)
)
