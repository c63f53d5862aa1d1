"""The order of rows in weights of gated GEMMs."""

from __future__ import annotations

from torch import Tensor


def interleave_gates(plain: Tensor, rows: int) -> Tensor:
    """Let ``rows`` gates and as many ups alternate, as gated kernels take them.

    Args:
        plain: [..., 2, I, n], gates before ups, of any dtype; I is a multiple of ``rows``.
        rows: the architecture's ``GATE_ROWS``.

    Returns:
        A copy, [..., 2 I, n].
    """
    return plain.unflatten(-2, (-1, rows)).transpose(-4, -3).flatten(-4, -2)
