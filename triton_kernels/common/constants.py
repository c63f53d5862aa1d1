"""Compile-time constants that lie in tuples of a kernel's arguments."""

from __future__ import annotations

from functools import cache

import triton.language as tl


@cache
def constant(value: int) -> tl.constexpr:
    """``value`` as a compile-time constant, the same object each time: making one takes two Python calls."""
    return tl.constexpr(value)
