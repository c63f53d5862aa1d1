"""What may enter GEMMs with NVFP4 weights. Imports no torch, so that command lines are read at once."""

from __future__ import annotations

import enum


class ActivationMode(enum.Enum):
    """What enters a product with an NVFP4 weight."""

    W4A16 = "w4a16"
    """Activations as they are (bf16 or fp32)."""
    W4A4 = "w4a4"
    """Activations quantised to NVFP4 per 16, with one fp32 scale per row."""
