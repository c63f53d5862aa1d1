"""Modes of the activations of quantised GEMMs. Imports no torch, so that command lines are read at once."""

from __future__ import annotations

import enum


class ActivationMode(enum.Enum):
    """The type of the activation that enters a GEMM with a quantised weight."""

    W4A16 = "w4a16"
    """Activations as they are (bf16 or fp32)."""
    W4A4 = "w4a4"
    """Activations as SM100's tensor cores take them: quantised to NVFP4 per 16, with one fp32 scale per row, where the
    weight is NVFP4; to MXFP8 per 32 where it is FP8 with UE8M0 scales."""
