"""NVFP4 weights in the order in which tensor cores take them from registers: plain torch, on any device, and back.

A tile is 128 rows by 128 of K: 9,216 bytes that one copy brings, 8,192 of codes and 1,024 of block scales. Each of
the eight consumer warps owns 16 rows. In the A fragment of ``wgmma.m64nNk16`` and ``mma.m16n8k16`` lane l holds, with
g = l / 4 and t = l % 4, four registers of two values each: rows g, g + 8, g, g + 8 and k = 2 t, 2 t, 2 t + 8, 2 t + 8
(and one more).

Codes are 32-bit words [warp, half of K, lane, 4]; words 2 i and 2 i + 1 of a half hold the codes of steps 2 i and
2 i + 1 of its four steps of 16, as ``twiddle.py`` says. So a lane loads 16 bytes for each half.

Block scales are bytes [warp, g, pair of steps, step, row g or g + 8]: a lane loads 16, a word for each pair of steps.
A scale's byte is not E4M3 but has five bits of exponent and three of mantissa, without subnormals: 2^e (1 + m/8) has
the exponent field e + SCALE_BIAS. Shifted into a bf16 it needs no normalisation. A scale of 0 is stored as 0, which the
kernel takes for a power of two: the codes of its block are stored as zeros.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import holds_any, require_dtype, require_multiple, require_shape
from nvfp4_sgl.limits import TILED_K_MULTIPLE

from ..common.shape import BLOCK
from .twiddle import FIRST, FIRST_REST, JOINED, PAIR_MASK, SECOND, SECOND_REST

TILE_ROWS = 128
TILE_K = 128
WARPS = 8
"""Warps that share a tile's rows."""
CODE_BYTES = TILE_ROWS * TILE_K // 2
SCALE_BYTES = TILE_ROWS * TILE_K // BLOCK
TILE_BYTES = CODE_BYTES + SCALE_BYTES
SCALE_BIAS = 22
"""Bias of the stored exponents: 2^8, the largest of E4M3, becomes 30, and 2^-9, the smallest, 13."""
SIGNS = 0x88
"""Sign bits of the two E2M1 codes of a byte."""
WORD = 0xFFFFFFFF
"""All bits of a word of codes."""
E4M3_FINITE = 127
"""Bytes of E4M3 that are finite and not negative: 0 to 126."""


def pack_tiles(codes: Tensor, block_scales: Tensor, *, checked: bool = False) -> Tensor:
    """Weights as kernels read them.

    Args:
        codes: uint8 [..., F, K/2], the even k in the low nibble; K a multiple of 64.
        block_scales: E4M3 [..., F, K/16], finite and not negative.
        checked: the caller guarantees that. Other scales are packed as zeros, and nothing waits for the device.

    Returns:
        uint8 [..., ceil(F/128), ceil(K/128), 9216]; zeros beyond F and K.

    Raises:
        OperandValueError: shapes, or, unless ``checked``, a scale that is negative or NaN (waits for the device).
    """
    require_dtype("codes", codes, torch.uint8)
    require_dtype("block_scales", block_scales, torch.float8_e4m3fn)
    rows, k = codes.shape[-2], codes.shape[-1] * 2
    require_multiple("codes", "K", k, TILED_K_MULTIPLE, "whole halves of a tile")
    require_shape("block_scales", block_scales, (*codes.shape[:-1], k // BLOCK), "[..., F, K/16]")
    stored = block_scales.view(torch.uint8)
    if not checked and holds_any(stored >= E4M3_FINITE):
        raise OperandValueError("block_scales: expected finite values that are not negative, found others")
    grid = (-(-rows // TILE_ROWS), -(-k // TILE_K))
    packed = codes.new_empty(*codes.shape[:-2], *grid, TILE_BYTES)
    if packed.is_meta:
        return packed
    packed[..., :CODE_BYTES] = _code_bytes(tiled(_without_zero_blocks(codes, stored), TILE_K // 2))
    packed[..., CODE_BYTES:] = _scale_bytes(tiled(stored, TILE_K // BLOCK))
    return packed


def unpack_tiles(packed: Tensor, rows: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes [..., rows, k/2] and block scales [..., rows, k/16] of what :func:`pack_tiles` made, bit for bit
    but the magnitudes of codes whose block scale is 0: they are 0, too."""
    codes = _plain_codes(packed[..., :CODE_BYTES])
    scales = _plain_scales(packed[..., CODE_BYTES:])
    return (
        untiled(codes)[..., :rows, : k // 2].contiguous(),
        untiled(scales)[..., :rows, : k // BLOCK].contiguous().view(torch.float8_e4m3fn),
    )


def first_tiles(tiles: Tensor, rows: int, count: int) -> Tensor:
    """The tiles of the first ``count`` of a matrix's rows, in place.

    Args:
        tiles: uint8 [1, ceil(rows / 128), K tiles, bytes], of weights of any kind.

    Raises:
        OperandValueError: there are several matrices, or so many rows are no whole tiles of this one.
    """
    if len(tiles) != 1 or count % TILE_ROWS or not 0 < count <= rows:
        raise OperandValueError(
            f"features: expected a multiple of {TILE_ROWS} up to {rows} of a single matrix, found {count} of"
            f" {len(tiles)}"
        )
    return tiles[:, : count // TILE_ROWS]


def _without_zero_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Zeros, their signs kept, for the codes of blocks whose scale is 0: the kernel's scales are never 0."""
    blocks = codes.unflatten(-1, (-1, BLOCK // 2))
    return torch.where((scales == 0).unsqueeze(-1), blocks & SIGNS, blocks).flatten(-2)


def tiled(plain: Tensor, width: int) -> Tensor:
    """[..., F, W] padded and cut into [..., feature tiles, K tiles, 128, width]."""
    rows, columns = plain.shape[-2:]
    padded = torch.nn.functional.pad(plain, (0, -columns % width, 0, -rows % TILE_ROWS))
    return padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, TILE_ROWS)).transpose(-3, -2)


def untiled(tiles: Tensor) -> Tensor:
    """Inverse of :func:`tiled`, but for the padding."""
    return tiles.transpose(-3, -2).flatten(-2).flatten(-3, -2)


# Codes of a tile by row and k against (warp, half, lane, pair of steps, register): the dimensions of a view of
# [128, 64 bytes] as [warp, row half, g, half, pair, step, k half, t] and their order in the fragment.
ROW_SHAPE, _K_SHAPE = (WARPS, 2, 8), (2, 2, 2, 2, 4)
_TO_FRAGMENT = (0, 3, 2, 7, 4, 5, 6, 1)
"""[warp, half, g, t, pair, step, k half, row half]: the last three number a pair's eight registers."""
_FROM_FRAGMENT = tuple(_TO_FRAGMENT.index(i) for i in range(len(_TO_FRAGMENT)))
_FRAGMENT_SHAPE = (WARPS, 2, 8, 4, 2, 2, 2, 2)


def _code_bytes(tiles: Tensor) -> Tensor:
    """Bytes [..., 128, 64] of codes to [..., 8192]."""
    lead = tiles.dim() - 2
    split = tiles.unflatten(-1, _K_SHAPE).unflatten(lead, ROW_SHAPE)
    registers = permuted(split, lead, _TO_FRAGMENT).flatten(-3).unbind(-1)
    words: Tensor | None = None
    for register, table in zip(registers, _word_tables(tiles.device), strict=True):
        bits = table[register.long()]
        words = bits if words is None else words.bitwise_or_(bits)
    assert words is not None
    return words.view(torch.uint8).flatten(lead)


def _plain_codes(packed: Tensor) -> Tensor:
    """Inverse of :func:`_code_bytes`; what the kernel does, but for the scales."""
    lead = packed.dim() - 1
    words = words_of(packed.unflatten(-1, (*_FRAGMENT_SHAPE[:5], 2, 4)))
    first, second = words[..., 0], words[..., 1]
    joined = first & FIRST_REST | second & ~FIRST_REST
    registers = [joined] * 8
    for word, taken in ((first, FIRST), (second, SECOND), (joined, JOINED)):
        for register, left in taken:
            registers[register] = rotated(word, left) & PAIR_MASK
    spread = torch.stack(registers, dim=-1)
    codes = (_gather(spread & 0xFFFF) | _gather(spread >> 16) << 4).to(torch.uint8)
    split = permuted(codes.unflatten(-1, (2, 2, 2)), lead, _FROM_FRAGMENT)
    return split.reshape(*packed.shape[:-1], TILE_ROWS, TILE_K // 2)


def _scale_bytes(tiles: Tensor) -> Tensor:
    """E4M3 bytes [..., 128, 8] to [..., 1024]."""
    lead = tiles.dim() - 2
    split = tiles.unflatten(-1, (4, 2)).unflatten(lead, ROW_SHAPE)
    ordered = permuted(split, lead, (0, 2, 3, 4, 1)).flatten(lead)
    return _table(_encode_scales(), tiles.device)[ordered.long()]


def _plain_scales(packed: Tensor) -> Tensor:
    lead = packed.dim() - 1
    split = permuted(packed.unflatten(-1, (WARPS, 8, 4, 2, 2)), lead, (0, 4, 1, 2, 3))
    bytes_ = split.reshape(*packed.shape[:-1], TILE_ROWS, TILE_K // BLOCK)
    return _table(_decode_scales(), packed.device)[bytes_.long()]


def permuted(tensor: Tensor, lead: int, order: tuple[int, ...]) -> Tensor:
    """``permute`` of all dimensions but the first ``lead``."""
    return tensor.permute(*range(lead), *(lead + i for i in order))


def _spread(codes: Tensor) -> Tensor:
    """The bits of codes where a bf16 has sign, the two low bits of the exponent, the highest of the mantissa."""
    return (codes & 7) << 6 | (codes & 8) << 12


def _gather(values: Tensor) -> Tensor:
    return values >> 6 & 7 | values >> 12 & 8


def rotated(words: Tensor, left: int) -> Tensor:
    """32-bit words, held in int64, rotated to the left."""
    return (words << left | words >> (32 - left)) & WORD


@functools.cache
def _word_tables(device: torch.device) -> tuple[Tensor, ...]:
    """Tables of the bits that each of a pair's eight registers adds to its two words.

    Each is int64 [256] by the register's byte of two codes, the first word in the low half.

    One look-up a register replaces the shifts and masks of each weight. A core packs 4096 × 4096 weights in 0.14 s,
    without tables in 0.96 s.
    """
    byte = torch.arange(256, device="cpu")
    # Two codes to a register's halves: three bits of magnitude and the sign.
    spread = _spread(byte & 15) | _spread(byte >> 4) << 16
    tables = [torch.zeros_like(byte) for _ in range(8)]
    for taken, of_first, of_second in ((FIRST, WORD, 0), (SECOND, 0, WORD), (JOINED, FIRST_REST, SECOND_REST)):
        for register, left in taken:
            # Rotated to where the kernel's rotation to the left finds it.
            word = rotated(spread, 32 - left)
            tables[register] |= word & of_first | (word & of_second) << 32
    return tuple(table.to(device) for table in tables)


def bytes_of(words: Tensor) -> Tensor:
    """Four bytes a word, the low one first, as another dimension."""
    return torch.stack([words >> shift & 255 for shift in (0, 8, 16, 24)], dim=-1).to(torch.uint8)


def words_of(bytes_: Tensor) -> Tensor:
    """Inverse of :func:`bytes_of`, in int64."""
    wide = bytes_.to(torch.int64)
    return wide[..., 0] | wide[..., 1] << 8 | wide[..., 2] << 16 | wide[..., 3] << 24


@functools.cache
def _encode_scales() -> tuple[int, ...]:
    """The stored byte of each E4M3 byte that is finite and not negative; 0 of others."""
    found = []
    for byte in range(E4M3_FINITE):
        exponent, mantissa = byte >> 3, byte & 7
        if exponent == 0 and mantissa:  # subnormal: mantissa * 2^-9
            shift = 4 - mantissa.bit_length()
            exponent, mantissa = 1 - shift, mantissa << shift & 7
        found.append((exponent - 7 + SCALE_BIAS) << 3 | mantissa if byte else 0)
    return (*found, *[0] * (256 - E4M3_FINITE))


@functools.cache
def _decode_scales() -> tuple[int, ...]:
    """The E4M3 byte of each stored byte."""
    found = [0] * 256
    for byte, stored in enumerate(_encode_scales()[:E4M3_FINITE]):
        found[stored] = byte
    return tuple(found)


@functools.cache
def _table(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8, device=device)
