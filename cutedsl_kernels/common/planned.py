"""Rounds numbers of tokens before planning, so that all numbers up to a limit need few kernels."""

from __future__ import annotations

from .shape import TOKEN_TILES

WIDE_TOKENS = 128
"""Numbers of tokens from here on are rounded up to multiples of this."""
PAIR_BITS = 3
"""Significant bits of the numbers of token-expert pairs that plans are made for."""


def planned_tokens(tokens: int) -> int:
    """Round ``tokens`` up to what the narrowest tile holds, or to whole tiles of 128."""
    narrow = next((tile for tile in TOKEN_TILES if tokens <= tile < WIDE_TOKENS), None)
    return narrow or -(-tokens // WIDE_TOKENS) * WIDE_TOKENS


def planned_pairs(pairs: int) -> int:
    """Round ``pairs`` of tokens and experts up to ``PAIR_BITS`` significant bits."""
    step = 1 << max(0, pairs.bit_length() - PAIR_BITS)
    return -(-pairs // step) * step
