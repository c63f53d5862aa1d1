"""Random 32-bit words by position: word i of a tensor is a hash of (tensor, i), whichever part of it is asked for.

A rank makes its slice of a tensor alone, and a CPU and a GPU make the same: integer arithmetic, no state. The hash
multiplies twice with xorshifts around it; half of the tensor's key enters before, half between. A dozen short kernels a
tensor: on a GPU their launches take longer than what they do.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

MULTIPLIER = 0x45D9F3B
"""Odd and below 2^27, so that its product with a 32-bit word is exact in int64."""
WORD = 0xFFFFFFFF


def key_of(name: str, seed: int) -> tuple[int, int]:
    """64 bits that stand for a tensor, as two words."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def words(key: tuple[int, int], rows: range, columns: range, width: int, device: torch.device) -> Tensor:
    """int64 [len(rows), len(columns)], each in [0, 2^32): a rectangle of a tensor of ``width`` words a row.

    Args:
        key: of the tensor, from :func:`key_of`.
        rows, columns: with step 1. The tensor may have up to 2^32 words; beyond, they repeat.
    """
    row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device).mul_(width)
    x = row[:, None] + torch.arange(columns.start, columns.stop, dtype=torch.int64, device=device)
    x.bitwise_and_(WORD).bitwise_xor_(key[0])
    x.bitwise_xor_(x >> 16).mul_(MULTIPLIER).bitwise_and_(WORD).bitwise_xor_(key[1])
    x.bitwise_xor_(x >> 16).mul_(MULTIPLIER).bitwise_and_(WORD)
    x.bitwise_xor_(x >> 16)
    return x


def random_bytes(key: tuple[int, int], rows: range, columns: range, width: int, device: torch.device) -> Tensor:
    """uint8 [len(rows), len(columns)]: a rectangle of a tensor of ``width`` bytes a row; arguments as of :func:`words`.

    Four bytes are a word. A row begins with a new one.
    """
    first, last = columns.start // 4, -(-columns.stop // 4)
    drawn = words(key, rows, range(first, last), -(-width // 4), device).to(torch.int32).view(torch.uint8)
    return drawn[:, columns.start - 4 * first : columns.stop - 4 * first]


def normal_numbers(key: tuple[int, int], rows: range, columns: range, width: int, device: torch.device) -> Tensor:
    """fp32 [len(rows), len(columns)] of mean 0 and deviation 1, within ±3.46, close to normal: sums of four bytes."""
    drawn = words(key, rows, columns, width, device)
    total = drawn & 0xFF
    for shift in (8, 16, 24):
        total += (drawn >> shift) & 0xFF
    return (total.float() - 4 * 127.5) * ((256**2 - 1) / 3) ** -0.5
