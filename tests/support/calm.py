"""A tiny checkpoint in which errors stay as small as they are made.

In a random model whose sublayers outweigh what the streams carry, an FP4 code that rounds to the other side moves every
later layer, and after three of them log-probabilities differ as much as those of two models. Here each sublayer adds an
eighth of what it would: a rounding stays a rounding, and a mistake stands out.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from nvfp4_sgl.checkpoint.tiny import write_tiny
from tests.support.damage import load_stored, store

QUIET = (".attn.wo_b.weight_scale_2", ".w2.weight_scale_2")
"""Global scales of the last matrix of each sublayer."""
FACTOR = 0.125


def write_calm(path: Path, *, seed: int, **shapes: Any) -> Path:
    """A full-NVFP4 checkpoint as :func:`write_tiny` writes it, but for the factor; returns ``path``."""
    write_tiny(path, "nvfp4-full", seed=seed, **shapes)
    for file in path.glob("*.safetensors"):
        tensors = load_stored(file)
        for name, (dtype, shape, data) in tensors.items():
            if name.endswith(QUIET):
                (value,) = struct.unpack("<f", data)
                tensors[name] = dtype, shape, struct.pack("<f", value * FACTOR)
        store(file, tensors)
    return path
