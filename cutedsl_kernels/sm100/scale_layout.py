"""Where the block scales of weights and of token rows lie: the contract of weight loaders and activation quantisers.

The tensor core takes block scales in *atoms* of 128 rows by 4 blocks, 512 bytes: row r, block b of an atom at byte
``r % 32 * 16 + r // 32 * 4 + b``. A matrix is its atoms in row-major order; what pads it to whole atoms must be there
but is never multiplied into an output that is kept.

Weights and wide token tiles use that layout as it is. A token tile narrower than 128 is one TMA copy too, and a copy
takes whole atoms: so each narrow tile has atoms of its own, whose rows beyond the tile are unused. A token's scales
then depend on the token tile of the kernel that will read them: ask ``operations.token_tile_for`` before quantising.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .shape import BLOCK, SCALE_ATOM_BYTES, SCALE_ATOM_ROWS

ATOM_BLOCKS = 4


def layout_tile(token_tile: int) -> int:
    """Token rows that share a row of atoms; kernels of equal ``layout_tile`` read each other's layout."""
    return min(token_tile, SCALE_ATOM_ROWS)


def scale_rows(rows: int, token_tile: int) -> int:
    """Rows of block scales that ``rows`` tokens take: whole atoms, one to each narrow token tile."""
    return -(-rows // layout_tile(token_tile)) * SCALE_ATOM_ROWS


def scale_bytes(rows: int, k: int, token_tile: int = SCALE_ATOM_ROWS) -> int:
    """Size of the block scales of [rows, k]."""
    return scale_rows(rows, token_tile) * -(-k // (ATOM_BLOCKS * BLOCK)) * ATOM_BLOCKS


def scale_offset(row: int, block: int, k: int, token_tile: int = SCALE_ATOM_ROWS) -> int:
    """Byte of the scale of ``block`` of ``row`` in the block scales of [rows, k]; integer arithmetic only.

    Token rows with groups are one matrix whose k is that of all groups together.
    """
    tile = layout_tile(token_tile)
    atom = row // tile * -(-k // (ATOM_BLOCKS * BLOCK)) + block // ATOM_BLOCKS
    within = row % tile
    return atom * SCALE_ATOM_BYTES + within % 32 * 16 + within // 32 * 4 + block % ATOM_BLOCKS


def swizzle_scales(scales: Tensor, token_tile: int = SCALE_ATOM_ROWS) -> Tensor:
    """Plain block scales [..., rows, blocks] in the kernels' layout, flat for each matrix; padding is zero."""
    rows, blocks = scales.shape[-2:]
    tile = layout_tile(token_tile)
    raw = scales.view(dtype=torch.uint8)
    raw = functional.pad(raw, (0, -blocks % ATOM_BLOCKS, 0, -rows % tile)).unflatten(-2, (-1, tile))
    raw = functional.pad(raw, (0, 0, 0, SCALE_ATOM_ROWS - tile))  # [..., atom rows, 128, blocks]
    atoms = raw.unflatten(-1, (-1, ATOM_BLOCKS)).unflatten(-3, (4, 32))  # [..., atom rows, 4, 32, atom columns, 4]
    return atoms.transpose(-4, -2).flatten(-5).contiguous().view(scales.dtype)
