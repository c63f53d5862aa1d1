"""Which kernel shape serves a problem: the one with the least modelled time (``cost``). Plain Python, deterministic.

What comes out: a narrow token tile fits the tokens at hand (its whole cost is one pass over the weights); where the
tiles of a plain product leave most SMs idle, K is split over a cluster; many tokens take CTA pairs with 256 tokens,
several to a cluster, so that what an SM reads from L2 keeps up with its tensor core.
Nothing here was measured on a GPU: the ranking is as good as the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from .clusters import B200_CLUSTERS, Clusters
from .cost import B200, Machine, Problem, cost
from .shape import SCALE_ATOM_ROWS, TILE_K, TOKEN_TILES, KernelShape, Output

LEAST_STAGES = 3
"""Fewer leave no stage in flight while one is multiplied and one is waited for."""
SHARING = ((1, 1), (2, 1), (1, 2), (2, 2))
"""Pairs of a cluster along features and tokens."""
WIDEST_EXPERT_TILE = 128
"""Of gated kernels, and so of both expert kernels: they share the layout of the rows."""


@lru_cache(maxsize=4096)
def choose_product(
    features: int, k: int, tokens: int, groups: int = 1, output: Output = "bf16", clusters: Clusters = B200_CLUSTERS
) -> KernelShape:
    """For ``groups`` products of [tokens, k] by [features, k] on a GPU that runs so many clusters."""
    problem = Problem(features, k, tokens, groups, output=output)
    return _best(product_shapes(k, tokens, output), problem, replace(B200, clusters=clusters))


@lru_cache(maxsize=4096)
def choose_experts(
    features: int,
    k: int,
    pairs: int,
    experts: int,
    gated: bool,
    output: Output = "bf16",
    clusters: Clusters = B200_CLUSTERS,
) -> KernelShape:
    """For experts that share ``pairs`` token-expert pairs.

    Counts stay on the GPU, so the choice goes by their mean. The token tile is a matter of pairs and experts alone:
    the gate/up and the down kernel of a layer get the same.
    """
    tile = expert_tile(pairs, experts)
    problem = Problem(features, k, pairs, experts, gated, True, output)
    return _best(expert_shapes(tile, gated, output), problem, replace(B200, clusters=clusters))


@lru_cache(maxsize=4096)
def expert_tile(pairs: int, experts: int) -> int:
    """Tokens of an expert's tile: the best for a gate/up kernel of 2048 features and K = 4096 on a B200."""
    problem = Problem(2048, 4096, pairs, experts, gated=True, grouped=True)
    shapes = (KernelShape(tile, tile >= 128, True, True) for tile in TOKEN_TILES if tile <= WIDEST_EXPERT_TILE)
    return _best(shapes, problem, B200).token_tile


def product_tiles(tokens: int) -> tuple[int, ...]:
    """Token tiles to choose from.

    Tiles below 128 tokens demand a layout of the tokens' block scales of their own. Several products read the same
    quantised tokens, so the layout must follow from their number alone: up to 64 the narrowest tile that holds them,
    beyond that tiles with the common layout.
    """
    return next(((tile,) for tile in TOKEN_TILES if tokens <= tile < SCALE_ATOM_ROWS), (128, 256))


def product_shapes(k: int, tokens: int, output: Output) -> Iterable[KernelShape]:
    """What :func:`choose_product` chooses from."""
    for tile in product_tiles(tokens):
        yield KernelShape(tile, output=output)
        yield from _pairs(KernelShape(tile, output=output))
        if tile <= 64:
            # A slice of K has two stages at least: less is all latency.
            splits = (split for split in (2, 4, 8) if k // split >= 2 * TILE_K)
            yield from (KernelShape(tile, split_k=split, output=output) for split in splits)


def expert_shapes(token_tile: int, gated: bool, output: Output) -> Iterable[KernelShape]:
    """What :func:`choose_experts` chooses from."""
    shape = KernelShape(token_tile, gated=gated, grouped=True, output=output)
    yield shape
    yield from _pairs(shape)


def _pairs(shape: KernelShape) -> Iterable[KernelShape]:
    """The shape for CTA pairs, alone and several to a cluster."""
    if shape.token_tile >= SCALE_ATOM_ROWS:
        for tokens, weights in SHARING:
            yield replace(shape, pair=True, shared_tokens=tokens, shared_weights=weights)


def _best(shapes: Iterable[KernelShape], problem: Problem, machine: Machine) -> KernelShape:
    """The least time; of equals the first, that is the narrowest and simplest."""
    fitting = [shape for shape in shapes if shape.stages >= LEAST_STAGES]
    return min(fitting, key=lambda shape: cost(shape, problem, machine).seconds)
