"""Which kernel runs a product whose activations are already quantised for some token tile.

``sm100/choose.py`` says what is fast; the layout of the activations' block scales, and for experts the alignment of
their offsets, say what is possible. Plans are remembered, since choosing costs more than a launch.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from .compiled import KernelKey
from .sm100.choose import (
    LEAST_STAGES,
    WIDEST_EXPERT_TILE,
    choose_experts,
    choose_product,
    expert_shapes,
    expert_tile,
    product_shapes,
    product_tiles,
)
from .sm100.clusters import Clusters
from .sm100.scale_layout import layout_tile
from .sm100.shape import TOKEN_TILES, KernelShape, Output

REMEMBERED = 4096
"""Plans: a few for each projection of a model and each number of tokens."""


@functools.lru_cache(REMEMBERED)
def plan_product(
    features: int, k: int, rows: int, groups: int, token_tile: int, output: Output, clusters: Clusters
) -> KernelShape:
    """For a dense product, or ``groups`` of them, of rows quantised for ``token_tile``.

    Args:
        clusters: what the GPU runs at a time.
    """
    chosen = choose_product(features, k, rows, groups, output, clusters)
    if layout_tile(chosen.token_tile) == layout_tile(token_tile):
        return chosen
    return _with_tile(chosen, layout_tile(token_tile))


@functools.lru_cache(REMEMBERED)
def plan_experts(
    features: int, k: int, experts: int, gated: bool, token_tile: int, output: Output, clusters: Clusters
) -> KernelShape:
    """For experts whose offsets are multiples of ``token_tile``.

    How many tokens they have is known to the device alone; whoever picked the tile picked it to fit.
    """
    chosen = choose_experts(features, k, token_tile * experts, experts, gated, output, clusters)
    if layout_tile(chosen.token_tile) == layout_tile(token_tile):
        return chosen
    return _with_tile(chosen, layout_tile(token_tile))


@functools.lru_cache(REMEMBERED)
def plan_gated(features: int, k: int, rows: int, token_tile: int, output: Output, clusters: Clusters) -> KernelShape:
    """For one expert that all rows visit: the same kernel without offsets."""
    chosen = replace(choose_experts(features, k, rows, 1, True, output, clusters), grouped=False)
    if layout_tile(chosen.token_tile) == layout_tile(token_tile):
        return chosen
    return _with_tile(chosen, layout_tile(token_tile))


def _with_tile(chosen: KernelShape, token_tile: int) -> KernelShape:
    """The nearest kernel with a token tile of at most 128."""
    return KernelShape(
        token_tile,
        pair=chosen.pair and token_tile == 128,
        gated=chosen.gated,
        grouped=chosen.grouped,
        split_k=chosen.split_k if token_tile <= 64 else 1,
        output=chosen.output,
    )


def token_tile_for(tokens: int) -> int:
    """The token tile to quantise this many rows for, before any product or grouped product of them."""
    return layout_tile(product_tiles(max(tokens, 1))[0])


def expert_token_tile_for(pairs: int, experts: int) -> int:
    """The token tile to quantise for, and to align offsets to, where ``experts`` share ``pairs`` token-expert pairs."""
    return expert_tile(max(pairs, 1), experts)


def every_key(architecture: str, limit: float, outputs: tuple[Output, ...] = ("bf16",)) -> list[KernelKey]:
    """All kernels that plans can ask for, whatever the sizes: NVFP4 between the expert kernels, ``outputs`` elsewhere.

    Routed experts' down kernels come with row weights and without, all others without.
    """
    keys = []
    expert_tiles = [tile for tile in TOKEN_TILES if tile <= WIDEST_EXPERT_TILE]
    for output in outputs:
        # Any K that splits as far as K ever does.
        products = [shape for tokens in TOKEN_TILES for shape in product_shapes(1 << 20, tokens, output)]
        keys += [KernelKey(architecture, shape) for shape in products]
        down = [shape for tile in expert_tiles for shape in expert_shapes(tile, False, output)]
        keys += [KernelKey(architecture, shape, weighted=weighted) for shape in down for weighted in (False, True)]
    gated = [shape for tile in expert_tiles for shape in expert_shapes(tile, True, "nvfp4")]
    gated += [replace(shape, grouped=False) for shape in gated]
    keys += [KernelKey(architecture, shape, limit) for shape in gated]
    return list(dict.fromkeys(key for key in keys if key.shape.stages >= LEAST_STAGES))
