"""Bounds of pools as kernels take them: the last place, not the number of places.

Triton compiles a kernel once more where an integer is a multiple of 16. The number of a pool's pages, and with it that
of its slots, follows from the memory that is free; kernels that depended on it could not be compiled beforehand. Pages
hold an even number of slots, and states have a multiple of 4 rows, so the last of either is odd.
"""

from __future__ import annotations

from torch import Tensor


def last_slot(pages: Tensor, page_size: int) -> int:
    """Return the last slot of a pool of ``pages`` [pages, ...] with ``page_size`` slots each; −1 if it has none."""
    return pages.shape[0] * page_size - 1


def last_row(state: Tensor) -> int:
    """Return the last row of compressor state [rows, ...]; −1 if it has none."""
    return state.shape[0] - 1
