"""NVFP4 rows that kernels write, judged bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor, quantize_rows
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.formats.scale_layout import unswizzle_128x4

POISON = 0xA5


def poisoned_rows(rows: int, k: int, device: str, token_tile: int = 128, groups: int | None = None) -> Rows:
    """Outputs of [rows, k] or [rows, groups, k] that hold what no kernel writes by chance."""
    out = Rows.allocate(rows, k, token_tile, device, groups=groups)
    out.codes.fill_(POISON)
    out.block_scales.view(torch.uint8).fill_(POISON)
    out.scale.fill_(torch.nan)
    return out


def plain_scales(out: Rows) -> Tensor:
    """uint8 [rows, blocks of all groups]: the block scales, found where a GEMM of that token tile looks for them."""
    rows, blocks = out.codes.shape[0], out.codes.flatten(1).shape[1] // 8
    return unswizzle_128x4(out.block_scales.cpu().view(torch.uint8), rows, blocks, out.token_tile)


def require_rows(out: Rows, expected: NvFp4Tensor, rows: Tensor | None = None) -> None:
    """``out``, poisoned before, is the expected matrix; if only ``rows`` were to be written, the others are poison yet.

    expected: a row for each group of each row.
    """
    count = out.codes.shape[0]
    rows = torch.arange(count) if rows is None else rows
    codes = torch.full((count, out.codes[0].numel()), POISON, dtype=torch.uint8)
    codes[rows] = expected.packed.view(len(rows), -1)
    assert torch.equal(out.codes.cpu().reshape(count, -1), codes)
    scales = torch.full((count, codes.shape[1] // 8), POISON, dtype=torch.uint8)
    scales[rows] = expected.block_scale.view(torch.uint8).reshape(len(rows), -1)
    assert torch.equal(plain_scales(out), scales)
    flat = out.block_scales.cpu().view(torch.uint8)
    written = flat.numel() - int((flat == POISON).sum())
    assert written == scales.numel() - int((scales == POISON).sum()), "scales of padding were written"
    row_scale = torch.full((count, out.scale[0].numel()), torch.nan)
    row_scale[rows] = expected.global_scale.view(len(rows), -1)
    assert torch.equal(out.scale.cpu().reshape(count, -1).nan_to_num(-1), row_scale.nan_to_num(-1))


def require_quantized(out: Rows, x: Tensor, rows: Tensor | None = None) -> None:
    """:func:`require_rows` of ``x``, [T, K] or [T, G, K]."""
    require_rows(out, quantize_rows(x.cpu().reshape(-1, x.shape[-1])), rows)
