"""Which kernel shape serves a problem: a documented heuristic, plain Python.

A narrow token tile fits the tokens at hand (its whole cost is one pass over the weights); many tokens take a CTA pair
with 256 tokens. Where the tiles of a plain product leave most SMs idle, K is split over a cluster.
"""

from __future__ import annotations

from .shape import LANES, TILE_K, TOKEN_TILES, KernelShape, Output

MULTIPROCESSORS = 148
"""Of a B200."""


def _narrowest(tokens: int, widest: int) -> int:
    """The smallest token tile that holds ``tokens``, at most ``widest``."""
    return next((tile for tile in TOKEN_TILES if tile >= tokens and tile <= widest), widest)


def choose_product(
    features: int, k: int, tokens: int, groups: int = 1, output: Output = "bf16", multiprocessors: int = MULTIPROCESSORS
) -> KernelShape:
    """For ``groups`` products of [tokens, k] by [features, k]."""
    tile = _narrowest(tokens, 256)
    if tokens > 128:
        pair_tiles = -(-features // 256) * -(-tokens // 256) * groups
        return KernelShape(256 if pair_tiles >= multiprocessors // 2 else 128, pair=pair_tiles >= 16, output=output)
    tiles = -(-features // LANES) * groups
    split = 1
    while tile <= 64 and split < 8 and tiles * split * 2 <= multiprocessors and k // (split * 2) >= 2 * TILE_K:
        split *= 2
    return KernelShape(tile, split_k=split, output=output)


def choose_experts(
    features: int, k: int, pairs: int, experts: int, gated: bool, output: Output = "bf16"
) -> KernelShape:
    """For experts that share ``pairs`` token-expert pairs; the tile follows the mean, since counts stay on the GPU."""
    tile = _narrowest(-(-pairs // experts), 128 if gated else 256)
    return KernelShape(tile, pair=tile >= 128, gated=gated, grouped=True, output=output)
