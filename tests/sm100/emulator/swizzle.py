"""Shared-memory swizzles: 16-byte units of a row exchanged by an exclusive-or with the row's number.

Source: PTX ISA, tensor swizzling modes, wgmma and tcgen05 matrix descriptors. They act on absolute shared addresses:
bits 4…6 are exchanged by bits 7…9 (128 B), bits 4…5 by 7…8 (64 B), bit 4 by bit 7 (32 B).
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.errors import UnsupportedError

UNIT_MASKS = {0: 0, 32: 1, 64: 3, 128: 7}
"""Mask of the units that a swizzle exchanges, by bytes of its span; 0 is none."""


def swizzle(offsets: np.ndarray, span: int, base: int = 0) -> np.ndarray:
    """Physical offsets of logical ones.

    Args:
        offsets: shared addresses or offsets that agree with them in their low ten bits.
        span: bytes of the swizzle span.
        base: the number, of 0 to 7, of the 128-byte row where the pattern begins: a wgmma descriptor may give one.

    Raises:
        UnsupportedError: a span other than 0, 32, 64, 128.
    """
    if span not in UNIT_MASKS:
        raise UnsupportedError(f"swizzle of {span} B")
    return offsets ^ (((offsets >> 7) - base & UNIT_MASKS[span]) << 4)
