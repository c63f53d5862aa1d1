"""Elements of a matrix that share a scale, by format. Imports no torch: headers are checked by these numbers alone."""

from __future__ import annotations

from typing import NamedTuple


class ScaleBlock(NamedTuple):
    """Neighbouring rows, and columns of each, that share a scale."""

    rows: int
    columns: int


NVFP4 = ScaleBlock(1, 16)
"""Source: specification §9.1."""
MXFP4 = ScaleBlock(1, 32)
"""Source: specification §8.1."""
MXFP8 = ScaleBlock(1, 32)
"""Source: OCP MX 1.0."""
FP8 = ScaleBlock(128, 128)
"""Blocks of weights; activations have one scale for each 128 of a row. Source: specification §8.1."""
