"""The order in which Blackwell's block-scaled MMA reads block scales ("128x4"). Source: DEEPSEEK_V4.md §9.4.

Scales S[M, Kb] (Kb = K/16) are padded with zeros to multiples of 128 rows and 4 columns, then cut into tiles of
128×4 = 512 bytes, tiles in row-major order. Inside a tile, row r and column c sit at (r%32)·16 + (r//32)·4 + c.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nvfp4_sgl.formats.checks import FormatError, require_dtype

TILE_ROWS, TILE_COLUMNS = 128, 4


def padded_shape(m: int, kb: int) -> tuple[int, int]:
    """(M, Kb) rounded up to whole tiles; their product is the length of the flat layout."""
    return -(-m // TILE_ROWS) * TILE_ROWS, -(-kb // TILE_COLUMNS) * TILE_COLUMNS


def swizzle_128x4(scales: Tensor) -> Tensor:
    """[..., M, Kb] → [..., padded M · padded Kb], contiguous, padding zero; uint8 or float8_e4m3fn, dtype kept."""
    require_dtype("block scales", scales, torch.uint8, torch.float8_e4m3fn)
    if scales.dim() < 2:
        raise FormatError(f"block scales: expected shape [..., M, Kb], found {tuple(scales.shape)}")
    m, kb = scales.shape[-2:]
    rows, columns = padded_shape(m, kb)
    padded = functional.pad(scales.view(torch.uint8), (0, columns - kb, 0, rows - m))
    tiles = padded.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))  # [..., M/128, 4, 32, Kb/4, 4]
    return tiles.transpose(-4, -2).flatten(-5).contiguous().view(scales.dtype)


def unswizzle_128x4(flat: Tensor, m: int, kb: int) -> Tensor:
    """Inverse of :func:`swizzle_128x4`: [..., padded M · padded Kb] → [..., m, kb]; the padding is dropped unread."""
    require_dtype("swizzled block scales", flat, torch.uint8, torch.float8_e4m3fn)
    rows, columns = padded_shape(m, kb)
    if flat.dim() < 1 or flat.shape[-1] != rows * columns:
        raise FormatError(
            f"swizzled block scales: expected a last dimension of {rows}·{columns} for M={m}, Kb={kb},"
            f" found shape {tuple(flat.shape)}"
        )
    tiles = flat.view(torch.uint8).unflatten(-1, (rows // 128, columns // 4, 32, 4, 4))
    padded = tiles.transpose(-4, -2).flatten(-2).flatten(-4, -2)
    return padded[..., :m, :kb].contiguous().view(flat.dtype)


TOKEN_TILES = (8, 16, 32, 64, 128, 256)
"""Token tiles of the block-scaled GEMMs."""


def layout_tile(token_tile: int) -> int:
    """Token rows that share a row of atoms; GEMMs of equal ``layout_tile`` read each other's layout.

    A token tile narrower than 128 rows is one TMA copy too, and a copy takes whole atoms: each narrow tile has atoms of
    its own, whose rows beyond the tile are unused.
    """
    return min(token_tile, TILE_ROWS)


def scale_bytes(rows: int, k: int, token_tile: int = TILE_ROWS) -> int:
    """Bytes of the block scales of [rows, k] activations for GEMMs of that token tile, or of a weight [rows, k]."""
    atom_rows = -(-rows // layout_tile(token_tile))
    return atom_rows * TILE_ROWS * -(-k // (16 * TILE_COLUMNS)) * TILE_COLUMNS
