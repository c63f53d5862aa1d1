"""NVFP4 weights whose block scales are chosen by squared error instead of by the block's maximum.

The maximum's scale wastes codes where one outlier stands alone, and leaves the gap between 4 and 6 to the values below
it. Here every E4M3 scale from :data:`BELOW` codes below to :data:`ABOVE` codes above the maximum's is tried; E4M3 has
eight codes an octave, so that is from about 0.77 to 1.68 of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.formats import ue8m0
from nvfp4_sgl.formats.nvfp4 import BLOCK, NvFp4Tensor, encode_blocks, quantize_weight

BELOW, ABOVE = 3, 6
"""What is tried. Of Gaussian, Student-t and uniform weights less than 1 block in 1000 does better beyond."""
LAST_SCALE = 0x7E
"""E4M3 byte of 448, the largest."""

BETTER = 1 - 2.0**-18
"""A scale replaces the maximum's only if its error is smaller by this factor: more than what fp32 sums are off."""


def quantize_weight_least_error(w: Tensor, global_scale: Tensor) -> NvFp4Tensor:
    """Quantise a matrix [N, K] as :func:`.nvfp4.quantize_weight` does, with the best block scale nearby.

    w: bf16 or fp32 [N, K], finite, K a multiple of 16. global_scale: fp32, 0-d, within [2^-117, 2^116].

    No block's sum of squared errors is larger than with the maximum's scale. Of equal ones the scale nearer to the
    maximum's wins, the larger first. The result is the same on every device: sums are in a fixed order.
    """
    start = quantize_weight(w, global_scale)
    blocks = w.float().unflatten(-1, (-1, BLOCK))
    # Errors in units of a power of two near the global scale: squares stay normal in fp32.
    unit = ue8m0.decode_reciprocal(ue8m0.encode_ceil(global_scale))
    first = start.block_scale.view(torch.uint8)
    best, codes = first, start.packed
    bar = _squared_error(start, blocks, unit) * BETTER
    for offset in sorted((o for o in range(-BELOW, ABOVE + 1) if o), key=lambda o: (abs(o), -o)):
        scale = (first.short() + offset).clamp(1, LAST_SCALE).to(torch.uint8)
        tried = NvFp4Tensor(
            encode_blocks(blocks, scale.view(torch.float8_e4m3fn), global_scale),
            scale.view(torch.float8_e4m3fn),
            global_scale,
        )
        error = _squared_error(tried, blocks, unit)
        is_better = error < bar
        bar = torch.where(is_better, error * BETTER, bar)
        best = torch.where(is_better, scale, best)
        codes = torch.where(is_better.repeat_interleave(BLOCK // 2, dim=-1), tried.packed, codes)
    return NvFp4Tensor(codes, best.view(torch.float8_e4m3fn), start.global_scale)


def _squared_error(quantised: NvFp4Tensor, blocks: Tensor, unit: Tensor) -> Tensor:
    """fp32 [N, K/16]: the sum over each block, by halves, so that its order is the same everywhere."""
    error = ((quantised.dequantize().unflatten(-1, (-1, BLOCK)) - blocks) * unit).square()
    while error.shape[-1] > 1:
        half = error.shape[-1] // 2
        error = error[..., :half] + error[..., half:]
    return error[..., 0]
