"""FP8 weights in the order in which tensor cores take them from registers: plain torch, on any device, and back.

A tile is 128 rows by 128 of K, as NVFP4's (layout.py says which values a lane holds): 16,896 bytes, 16,384 of codes
and 512 of factors.

Codes are 32-bit words [warp, half of K, half of that, lane, 4]; words 2 i and 2 i + 1 hold the codes of step i of two
steps of 16, as ``fp8_twiddle.py`` says. So a lane loads twice 16 bytes for each half.

Factors are bf16 [warp, half, g, row g or g + 8]: 2^(exponent + 120), one for each row and half, that is for each 64 of
K. Parts of a matrix on several ranks begin at multiples of that, so a half never has two exponents, wherever the
checkpoint's blocks of 128 × 128 begin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats import mxfp8, ue8m0
from nvfp4_sgl.formats.checks import holds_any, require_dtype, require_multiple, require_shape
from nvfp4_sgl.limits import TILED_K_MULTIPLE

from .fp8_twiddle import (
    BYTES_LEFT,
    FIRST_BYTES,
    FIRST_LEFT,
    FIRST_REST,
    FP8_PAIR_MASK,
    SECOND_BYTES,
    SECOND_LEFT,
    SECOND_REST,
)
from .layout import (
    ROW_SHAPE,
    TILE_K,
    TILE_ROWS,
    WARPS,
    bytes_of,
    permuted,
    rotated,
    tiled,
    untiled,
    words_of,
)

HALVES = TILE_K // TILED_K_MULTIPLE
FP8_CODE_BYTES = TILE_ROWS * TILE_K
FP8_TILE_BYTES = FP8_CODE_BYTES + TILE_ROWS * HALVES * 2
FACTOR_EXPONENT = 120
"""A factor is two to the weights' exponent plus this."""
BF16_BIAS, BF16_MANTISSA = 127, 7
LEAST_EXPONENT, LARGEST_EXPONENT = -117, 127 - FACTOR_EXPONENT
"""Exponents of scales. Below the least E4M3's smallest, 2^-9, would be no normal bf16, beyond the largest a factor."""
MAGNITUDE, SIGN, NAN = 0x7F, 0x80, 0x7F
"""Bits of an E4M3 code, and the magnitude that is no number."""

# Codes of a tile by row and k: the dimensions of a view of [128, 128] as [warp, row half, g, half, half of that, step,
# k half, t, k] and their order in the fragment.
_K_SHAPE = (HALVES, 2, 2, 2, 4, 2)
_TO_FRAGMENT = (0, 3, 4, 2, 7, 5, 6, 1, 8)
"""[warp, half, half of that, g, t, step, k half, row half, k]: k half and row half number a step's four registers."""
_FROM_FRAGMENT = tuple(_TO_FRAGMENT.index(i) for i in range(len(_TO_FRAGMENT)))


def pack_fp8_tiles(codes: Tensor, scale: Tensor) -> Tensor:
    """Weights as kernels read them.

    Args:
        codes: E4M3 [..., F, K], finite; K a multiple of 64.
        scale: UE8M0, uint8 [..., F, K/32]; the two of each 64 of K alike, and from 2^-117 to 2^7 where a code is not 0.

    Returns:
        uint8 [..., ceil(F/128), ceil(K/128), 16896]; zeros beyond F and K.

    Raises:
        OperandValueError: a shape, a code that is NaN, or a scale beyond the rules above (waits for the device).
    """
    require_dtype("codes", codes, torch.float8_e4m3fn)
    require_dtype("scale", scale, torch.uint8)
    rows, k = codes.shape[-2:]
    require_multiple("codes", "K", k, TILED_K_MULTIPLE, "whole halves of a tile")
    require_shape("scale", scale, (*codes.shape[:-1], k // mxfp8.BLOCK), "[..., F, K/32]")
    stored = codes.view(torch.uint8)
    exponents = _exponents(stored, scale)
    grid = (-(-rows // TILE_ROWS), -(-k // TILE_K))
    packed = stored.new_empty(*codes.shape[:-2], *grid, FP8_TILE_BYTES)
    if packed.is_meta:
        return packed
    packed[..., :FP8_CODE_BYTES] = _code_bytes(tiled(stored, TILE_K))
    packed[..., FP8_CODE_BYTES:] = _factor_bytes(tiled(exponents, HALVES))
    return packed


def unpack_fp8_tiles(packed: Tensor, rows: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes [..., rows, k] and scales [..., rows, k/32] of what :func:`pack_fp8_tiles` made, bit for bit but the scales
    of zeros: they are the nearest that a factor can hold."""
    codes = untiled(_plain_codes(packed[..., :FP8_CODE_BYTES]))[..., :rows, :k]
    factors = untiled(_plain_factors(packed[..., FP8_CODE_BYTES:]))[..., :rows, : k // TILED_K_MULTIPLE]
    scale = (factors >> BF16_MANTISSA) - FACTOR_EXPONENT
    blocks = scale.repeat_interleave(TILED_K_MULTIPLE // mxfp8.BLOCK, dim=-1).to(torch.uint8)
    return codes.contiguous().view(torch.float8_e4m3fn), blocks


def _exponents(stored: Tensor, scale: Tensor) -> Tensor:
    """uint8 [..., F, K/64]: a byte as UE8M0's for each 64 of K, checked; of zeros within the range of the others."""
    magnitudes = stored & MAGNITUDE
    if holds_any(magnitudes == NAN):
        raise OperandValueError("codes: expected finite E4M3 codes, found NaN")
    pairs = scale.unflatten(-1, (-1, TILED_K_MULTIPLE // mxfp8.BLOCK))
    if holds_any(pairs[..., :1] != pairs):
        raise OperandValueError(
            f"scale: expected one for each {TILED_K_MULTIPLE} of a row, found two; weights here are in blocks of"
            " 128 × 128"
        )
    exponents = pairs[..., 0]
    least, largest = (exponent + ue8m0.BIAS for exponent in (LEAST_EXPONENT, LARGEST_EXPONENT))
    outside = (exponents < least) | (exponents > largest)
    is_used = magnitudes.unflatten(-1, (-1, TILED_K_MULTIPLE)).amax(dim=-1) > 0
    if holds_any(outside & is_used | (exponents == ue8m0.NAN_BYTE)):
        raise OperandValueError(
            f"scale: expected 2^{LEAST_EXPONENT} to 2^{LARGEST_EXPONENT} wherever a code is not 0, found others or NaN"
        )
    return exponents.clamp(least, largest)


def _code_bytes(tiles: Tensor) -> Tensor:
    """Bytes [..., 128, 128] of codes to [..., 16384]."""
    lead = tiles.dim() - 2
    split = tiles.unflatten(-1, _K_SHAPE).unflatten(lead, ROW_SHAPE)
    codes = permuted(split, lead, _TO_FRAGMENT).flatten(-3, -2).to(torch.int32)
    # Two codes to a register's halves, where a bf16 has sign, the four low bits of the exponent, the mantissa.
    spread = (codes & MAGNITUDE) << 4 | (codes & SIGN) << 8
    pairs = spread[..., 0].to(torch.int64) | spread[..., 1].to(torch.int64) << 16
    of_first, of_second, of_bytes, rest = pairs.unbind(-1)
    of_bytes = rotated(of_bytes, 32 - BYTES_LEFT)
    first = rotated(of_first, 32 - FIRST_LEFT) | of_bytes & FIRST_BYTES | rest & FIRST_REST
    second = rotated(of_second, 32 - SECOND_LEFT) | of_bytes & SECOND_BYTES | rest & SECOND_REST
    return bytes_of(torch.stack([first, second], dim=-1)).flatten(lead)


def _plain_codes(packed: Tensor) -> Tensor:
    """Inverse of :func:`_code_bytes`; what the kernel does, but for the factors."""
    lead = packed.dim() - 1
    first, second = words_of(packed.unflatten(-1, (WARPS, HALVES, 2, 8, 4, 2, 2, 4))).unbind(-1)
    registers = (
        rotated(first, FIRST_LEFT) & FP8_PAIR_MASK,
        rotated(second, SECOND_LEFT) & FP8_PAIR_MASK,
        rotated(first & FIRST_BYTES | second & SECOND_BYTES, BYTES_LEFT),
        first & FIRST_REST | second & SECOND_REST,
    )
    pairs = torch.stack(registers, dim=-1)
    spread = torch.stack([pairs & 0xFFFF, pairs >> 16], dim=-1)
    codes = (spread >> 4 & MAGNITUDE | spread >> 8 & SIGN).to(torch.uint8)
    split = permuted(codes.unflatten(-2, (2, 2)), lead, _FROM_FRAGMENT)
    return split.reshape(*packed.shape[:-1], TILE_ROWS, TILE_K)


def _factor_bytes(tiles: Tensor) -> Tensor:
    """UE8M0 bytes [..., 128, 2], or 0 for no factor at all, to [..., 512]."""
    lead = tiles.dim() - 2
    split = permuted(tiles.unflatten(lead, ROW_SHAPE), lead, (0, 3, 2, 1)).to(torch.int64)
    field = split - ue8m0.BIAS + FACTOR_EXPONENT + BF16_BIAS
    words = torch.where(split > 0, field << BF16_MANTISSA, 0)
    return torch.stack([words & 255, words >> 8], dim=-1).to(torch.uint8).flatten(lead)


def _plain_factors(packed: Tensor) -> Tensor:
    """The bits of factors, int64 [..., 128, 2]."""
    lead = packed.dim() - 1
    wide = packed.unflatten(-1, (WARPS, HALVES, 8, 2, 2)).to(torch.int64)
    split = permuted(wide[..., 0] | wide[..., 1] << 8, lead, (0, 3, 2, 1))
    return split.reshape(*packed.shape[:-1], TILE_ROWS, HALVES)
