"""A tiny checkpoint in which errors stay as small as they are made.

In a random model whose sublayers outweigh what the streams carry, an FP4 code that rounds to the other side moves every
later layer, and after three of them log-probabilities differ as much as those of two models. Here each sublayer adds an
eighth of what it would: a rounding stays a rounding, and a mistake stands out.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.support.damage import load_stored, store

QUIET = (".attn.wo_b.weight_scale_2", ".w2.weight_scale_2")
"""Global scales of the last matrix of each sublayer."""
QUIET_BLOCKS = (".attn.wo_b.scale", ".w2.scale")
"""UE8M0 scales of the same matrices where they are FP8."""
FACTOR, EXPONENT = 0.125, -3


def write_calm(path: Path, *, seed: int, format: str = "nvfp4-full", **shapes: Any) -> Path:
    """A checkpoint as :func:`write_tiny` writes it but for the factor; its path.

    Args:
        format: one in which the last matrix of each sublayer is NVFP4, MXFP4 or FP8 with UE8M0 scales.
    """
    write_tiny(path, format, seed=seed, **shapes)
    for file in path.glob("*.safetensors"):
        tensors = load_stored(file)
        for name, (dtype, shape, data) in tensors.items():
            if name.endswith(QUIET):
                (value,) = struct.unpack("<f", data)
                tensors[name] = dtype, shape, struct.pack("<f", value * FACTOR)
            elif name.endswith(QUIET_BLOCKS):
                assert dtype == "F8_E8M0", (name, dtype)
                tensors[name] = dtype, shape, bytes(byte + EXPONENT for byte in data)
        store(file, tensors)
    return path
