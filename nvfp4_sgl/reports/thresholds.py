"""Thresholds of the error between two checkpoints, where values may differ.

:data:`MAX_RMS` and :data:`MAX_BLOCK` are for NVFP4. Scaled by its maximum, a block of 16 has its largest value between
5⅔ and 6⅜ steps of its scale, and codes are at most one step from the value: no error is larger than 3/17 = 0.176 of
that maximum. Measured on 2048 × 2048 random values with :func:`nvfp4_sgl.formats.nvfp4.quantize_weight`: relative RMS
error 0.095 (normal distribution), 0.102 (uniform), 0.093 (Laplace), 0.073 (Student, 2 degrees of freedom), and
a largest error in a block of 0.175 or 0.176 in all. Normally distributed matrices or rows that are mixed up have a
relative error of sqrt(2); a block scale that is half or twice what it should be changes a block by 0.5 or 1. MXFP4 has
one scale for 32: errors of 0.116 (normal) to 0.151 (Student, 3), and up to 1 in a block of 16; FP8 0.027 and 0.06.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RMS = 0.12
"""Relative RMS error of a matrix that is accepted unless told otherwise."""
MAX_BLOCK = 0.4
"""Largest error in a block, relative to its largest value, that is accepted unless told otherwise. Leaves room for
quantisers that cut off a block's maximum to serve its other values."""


@dataclass(frozen=True)
class Thresholds:
    """Bounds of accepted errors where values may differ: :data:`MAX_RMS`, :data:`MAX_BLOCK`.

    lossy: they may differ everywhere, also where the storage holds the source's values without loss.
    """

    rms: float = MAX_RMS
    block: float = MAX_BLOCK
    lossy: bool = False
