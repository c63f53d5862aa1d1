"""Numbers of tokens as plans are made for: few, so that all numbers up to a limit ask for few kernels."""

from __future__ import annotations

from .shape import TOKEN_TILES

WIDE_TOKENS = 128
"""From here on numbers of tokens are planned as whole tiles of so many."""
PAIR_BITS = 3
"""Significant bits of the numbers of token-expert pairs that plans are made for."""


def planned_tokens(tokens: int) -> int:
    """What ``tokens`` are planned as: all that the narrowest tile holds, or whole tiles of 128."""
    narrow = next((tile for tile in TOKEN_TILES if tokens <= tile < WIDE_TOKENS), None)
    return narrow or -(-tokens // WIDE_TOKENS) * WIDE_TOKENS


def planned_pairs(pairs: int) -> int:
    """What ``pairs`` of tokens and experts are planned as: rounded up to ``PAIR_BITS`` significant bits."""
    step = 1 << max(0, pairs.bit_length() - PAIR_BITS)
    return -(-pairs // step) * step
