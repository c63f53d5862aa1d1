"""Types of options that several benchmarks have: what cannot be measured or kept is refused before the GPU is asked."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.flash import LAYERS as FLASH_LAYERS
from nvfp4_sgl.arguments import whole_number

LAYERS = whole_number(FLASH_LAYERS)
"""The first layers of Flash."""
RANKS = (1, 2, 4, 8)
"""Numbers of ranks that Flash is split over."""
AT_ONCE = whole_number(1 << 16)
"""Requests of a step."""


def output_file(text: str) -> Path:
    """A file that can be written when the figures are there."""
    file = Path(text)
    if not text or file.is_dir() or not file.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, found '{text}'")
    return file
