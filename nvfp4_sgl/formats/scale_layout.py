"""The order in which Blackwell's block-scaled MMA reads block scales ("128x4"). Source: specification §9.4.

The tensor core takes block scales in *atoms* of 128 rows by 4 blocks, 512 bytes: row r, block b of an atom at byte
``r % 32 * 16 + r // 32 * 4 + b``. A matrix is its atoms in row-major order; what pads it to whole atoms must be there
but is never multiplied into an output that is kept.

Weights and wide token tiles use that layout as it is. A token tile narrower than 128 is one TMA copy too, and a copy
takes whole atoms: each narrow tile has atoms of its own, whose rows beyond the tile are unused. So where a token's
scales lie depends on the token tile of the GEMM that reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.blocks import NVFP4
from nvfp4_sgl.formats.checks import require_dtype, require_shape

BLOCK = NVFP4.columns
"""Elements that share a scale in NVFP4, which functions here assume unless told."""
ATOM_ROWS, ATOM_BLOCKS = 128, 4
ATOM_BYTES = ATOM_ROWS * ATOM_BLOCKS
TOKEN_TILES = (8, 16, 32, 64, 128, 256)
"""Token tiles of the block-scaled GEMMs."""


def layout_tile(token_tile: int) -> int:
    """Token rows that share a row of atoms; GEMMs of equal ``layout_tile`` read each other's layout."""
    return min(token_tile, ATOM_ROWS)


def scale_rows(rows: int, token_tile: int = ATOM_ROWS) -> int:
    """Rows of block scales that ``rows`` rows take: whole atoms, one to each narrow token tile."""
    return -(-rows // layout_tile(token_tile)) * ATOM_ROWS


def scale_bytes(rows: int, k: int, token_tile: int = ATOM_ROWS, block: int = BLOCK, groups: int = 1) -> int:
    """Bytes of the block scales of [rows, k] activations for GEMMs of that token tile, or of a weight [rows, k].

    Args:
        block: elements that share a scale.
        groups: of activations [rows, groups, k]; each has whole atoms.
    """
    return scale_rows(rows, token_tile) * groups * -(-k // (ATOM_BLOCKS * block)) * ATOM_BLOCKS


def scale_offset(row: int, block: int, k: int, token_tile: int = ATOM_ROWS) -> int:
    """Byte of the scale of ``block`` of ``row`` in the block scales of [rows, k]; integer arithmetic only.

    Token rows with groups are one matrix whose k is that of all groups together.
    """
    tile = layout_tile(token_tile)
    atom = row // tile * -(-k // (ATOM_BLOCKS * BLOCK)) + block // ATOM_BLOCKS
    within = row % tile
    return atom * ATOM_BYTES + within % 32 * 16 + within // 32 * 4 + block % ATOM_BLOCKS


def swizzle_128x4(scales: Tensor, token_tile: int = ATOM_ROWS) -> Tensor:
    """Plain block scales [..., M, Kb] in the layout, flat for each matrix, contiguous; padding is zero.

    uint8 or float8_e4m3fn, dtype kept; Kb = K/16 for NVFP4, K/32 for MXFP8.
    """
    require_dtype("block scales", scales, torch.uint8, torch.float8_e4m3fn)
    if scales.dim() < 2:
        raise OperandValueError(f"block scales: expected shape [..., M, Kb], found {tuple(scales.shape)}")
    rows, blocks = scales.shape[-2:]
    tile = layout_tile(token_tile)
    padded = functional.pad(scales.view(torch.uint8), (0, -blocks % ATOM_BLOCKS, 0, -rows % tile))
    tiles = functional.pad(padded.unflatten(-2, (-1, tile)), (0, 0, 0, ATOM_ROWS - tile))  # [..., M/tile, 128, Kb]
    atoms = tiles.unflatten(-1, (-1, ATOM_BLOCKS)).unflatten(-3, (4, 32))  # [..., M/tile, 4, 32, Kb/4, 4]
    return atoms.transpose(-4, -2).flatten(-5).contiguous().view(scales.dtype)


def unswizzle_128x4(flat: Tensor, m: int, kb: int, token_tile: int = ATOM_ROWS) -> Tensor:
    """Inverse of :func:`swizzle_128x4`: [..., bytes] → [..., m, kb]; the padding is dropped unread."""
    require_dtype("swizzled block scales", flat, torch.uint8, torch.float8_e4m3fn)
    size = scale_bytes(m, kb * BLOCK, token_tile)
    require_shape("swizzled block scales", flat, (*flat.shape[:-1], size), f"[..., bytes of M={m}, Kb={kb}]")
    atoms = flat.view(torch.uint8).unflatten(-1, (-1, -(-kb // ATOM_BLOCKS), 32, 4, ATOM_BLOCKS))
    tiles = atoms.transpose(-4, -2).flatten(-2).flatten(-3, -2)  # [..., M/tile, 128, Kb]
    rows = tiles[..., : layout_tile(token_tile), :].flatten(-3, -2)
    return rows[..., :m, :kb].contiguous().view(flat.dtype)
