"""Values that pass between boundaries, made plain: targets hold the same thing in containers of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.formats import e2m1
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.formats.scale_layout import BLOCK, unswizzle_128x4
from nvfp4_sgl.model.contract import Activation

SET_COLUMNS = 32
"""Random signs by which a set of entries is told from another."""
HASH = 0x9E3779B97F4A7C15 - 2**64
"""2^64 / golden ratio, odd, as int64: its multiples scatter over all bits."""
SHIFT = 31
FIRST_BIT = 62
"""Signs come from this bit of a hashed number and from those below it."""


def operand_values(x: Activation) -> Tensor:
    """Values [T, ...] of an activation; what its codes stand for where that is all there is."""
    return x.values if x.values is not None else row_values(x.require_rows())


def row_values(rows: Rows) -> Tensor:
    """fp32 [T, K] or [T, G, K]: e2m1 · block scale · row scale."""
    tokens, groups = rows.codes.shape[0], rows.codes.shape[1] if rows.codes.dim() == 3 else 1
    scales = unswizzle_128x4(rows.block_scales, tokens, groups * rows.k // BLOCK, rows.token_tile).float()
    codes = e2m1.decode_packed(rows.codes).reshape(tokens, groups, -1, BLOCK)
    values = (codes * scales.view(tokens, groups, -1, 1)).flatten(2) * rows.scale.view(-1, groups, 1)
    return values.view(rows.shape)


def route_weights(routes: Any, experts: int) -> Tensor:
    """Weights fp32 [T, experts] of what a router gave; pairs without a row, and a shared expert's group, left out."""
    chosen, weights = routes.experts.long(), routes.weights.float()
    dense = weights.new_zeros(len(chosen), experts + 1)
    outside = (chosen < 0) | (chosen >= experts)
    dense.scatter_add_(1, chosen.masked_fill(outside, experts), weights)
    return dense[:, :experts]


def selected_set(entries: Any) -> Tensor:
    """fp32 [T, SET_COLUMNS] of the entries chosen for each query, in any order.

    Each entry adds a random sign to each column. So the squared difference of two sets, by that of one, is about the
    share of the entries in which they differ, both ways.

    Args:
        entries: slots int [T, K] padded with -1, or a pair of slots and their numbers [T].
    """
    slots, lengths = entries if isinstance(entries, tuple) else (entries, None)
    slots = slots.long()
    present = slots >= 0
    if lengths is not None:
        present &= torch.arange(slots.shape[1], device=slots.device) < lengths[:, None]
    bits = hashed(slots)
    # One column at a time: all of them would take SET_COLUMNS times the room.
    return torch.stack([(sign(bits, column) * present).sum(dim=1) for column in range(SET_COLUMNS)], dim=-1)


def hashed(numbers: Tensor) -> Tensor:
    """int64 [...] of int64 [...]: bits that look random, the upper ones most."""
    mixed = (numbers + 1) * HASH
    return (mixed ^ (mixed >> SHIFT)) * HASH


def sign(bits: Tensor, column: int) -> Tensor:
    """fp32 [...], +1 or -1, of one of 32 bits of :func:`hashed` numbers."""
    return ((bits >> (FIRST_BIT - column)) & 1).float() * 2 - 1
