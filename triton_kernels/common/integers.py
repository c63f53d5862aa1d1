"""Integer arithmetic of launches, in plain Python.

Triton's own ``cdiv`` and ``next_power_of_2`` give the same, but serve kernels as well and take a hundred times as long
on the host, 1.8 µs a call; a layer of a pass has some hundred of them.
"""

from __future__ import annotations


def cdiv(value: int, divisor: int) -> int:
    """``value / divisor``, rounded up; ``divisor`` is positive."""
    return -(-value // divisor)


def cut(count: int, most: int) -> tuple[int, int]:
    """The fewest blocks of at most ``most`` that hold ``count``, and the size of each, of which the last may lack some.

    6 in blocks of at most 4 are two of 3.
    """
    blocks = cdiv(count, most)
    return blocks, cdiv(count, blocks)


def next_power_of_2(value: int) -> int:
    """The least power of two that is ``value`` or more; 0 for 0, as Triton has it."""
    return 1 << (value - 1).bit_length() if value > 0 else 0
