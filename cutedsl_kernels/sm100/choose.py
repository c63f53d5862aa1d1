"""Chooses the kernel shape of a problem: the one with the least modelled time (``cost``). Plain Python, deterministic.

Few tokens get the narrow token tile that fits them: its whole cost is one pass over the weights. Where tiles leave most
SMs idle, K is split over a cluster. Many tokens get CTA pairs with 256 tokens, which share the tiles of a last wave if
it leaves most pairs idle. Several pairs to a cluster share operands where L2 would not keep up with the tensor core.
Nothing here was measured on a GPU: the ranking is as good as the model.

A choice depends on few sizes: numbers of tokens are rounded first (``..common.planned``). So all numbers up to a limit
need few kernels, which can be compiled beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from ..common.clusters import B200_CLUSTERS, Clusters
from ..common.planned import planned_pairs, planned_tokens
from ..common.shape import TOKEN_TILES, Output
from .cost import B200, Machine, Problem, cost, whole_waves
from .shape import SCALE_ATOM_ROWS, STREAM_K_TILE, BlockScaledKind, KernelShape

MIN_STAGES = 3
"""Fewer leave no stage in flight while one is multiplied and one is waited for."""
SHARING = ((1, 1), (2, 1), (1, 2), (2, 2))
"""Pairs of a cluster along features and tokens."""
MAX_EXPERT_TILE = 128
"""Offsets of experts are multiples of the tile: a wider one would pad more than it saves."""
MAX_SPLIT_TILE = 64
"""Tokens of a kernel that splits K."""
SPLITS = (2, 4, 8)
MIN_SLICE_STAGES = 2
"""Stages that a CTA of a split-K cluster has at least: a single one is all latency."""
NEARLY = 1.01
"""Shapes within this factor of the least time count as equal: the model is no more precise."""


def choose_gemm(
    features: int,
    k: int,
    tokens: int,
    groups: int = 1,
    output: Output = "bf16",
    clusters: Clusters = B200_CLUSTERS,
    token_tile: int | None = None,
    kind: BlockScaledKind = "nvfp4",
) -> KernelShape:
    """Choose the kernel for ``groups`` GEMMs of [tokens, k] by [features, k].

    Args:
        clusters: what the GPU runs at a time.
        token_tile: what the tokens are quantised for; that of their number if not given.
        kind: of operands.
    """
    tiles = gemm_tiles(tokens if token_tile is None else token_tile)
    return _choose_gemm(features, k, planned_tokens(tokens), groups, output, clusters, tiles, kind)


@lru_cache(maxsize=4096)
def _choose_gemm(
    features: int,
    k: int,
    tokens: int,
    groups: int,
    output: Output,
    clusters: Clusters,
    tiles: tuple[int, ...],
    kind: BlockScaledKind,
) -> KernelShape:
    problem = Problem(features, k, tokens, groups, output=output, kind=kind)
    return _best(gemm_shapes(k, tiles, output, kind), problem, replace(B200, clusters=clusters))[1]


def choose_experts(
    features: int,
    k: int,
    pairs: int,
    experts: int,
    gated: bool,
    output: Output = "bf16",
    clusters: Clusters = B200_CLUSTERS,
    token_tile: int | None = None,
) -> KernelShape:
    """Choose the kernel for experts that share ``pairs`` token-expert pairs.

    Counts stay on the GPU, so the choice uses their mean.

    Args:
        clusters: what the GPU runs at a time.
        token_tile: what the tokens are quantised for, and their experts' offsets multiples of; :func:`expert_tile`
            if not given.
    """
    tile = expert_tile(pairs, experts) if token_tile is None else min(token_tile, MAX_EXPERT_TILE)
    problem = Problem(features, k, planned_pairs(pairs), experts, gated, True, output)
    return _choose_experts(problem, clusters, tile)


def choose_gated(
    features: int,
    k: int,
    tokens: int,
    output: Output,
    clusters: Clusters,
    token_tile: int,
    kind: BlockScaledKind = "nvfp4",
) -> KernelShape:
    """Choose the kernel for one expert's gate and up projections of all tokens, without offsets."""
    problem = Problem(features, k, planned_tokens(tokens), gated=True, output=output, kind=kind)
    return _choose_experts(problem, clusters, min(token_tile, MAX_EXPERT_TILE))


@lru_cache(maxsize=4096)
def _choose_experts(problem: Problem, clusters: Clusters, tile: int) -> KernelShape:
    p = problem
    shapes = expert_shapes(p.k, tile, p.gated, p.grouped, p.output, p.kind)
    return _best(shapes, problem, replace(B200, clusters=clusters))[1]


def expert_tile(pairs: int, experts: int) -> int:
    """Tokens of an expert's tile: the best for gate/up and down kernels of 2048 by 4096 together, on a B200.

    Depends on pairs and experts alone, so that both kernels of a layer read the same rows.
    """
    return _expert_tile(planned_pairs(pairs), experts)


@lru_cache(maxsize=4096)
def _expert_tile(pairs: int, experts: int) -> int:
    gate_up = Problem(2048, 4096, pairs, experts, gated=True, grouped=True, output="nvfp4")
    down = Problem(4096, 2048, pairs, experts, grouped=True)

    def seconds(tile: int) -> float:
        first, _ = _best(expert_shapes(gate_up.k, tile, True, True, "nvfp4"), gate_up, B200)
        second, _ = _best(expert_shapes(down.k, tile, False, True, "bf16"), down, B200)
        return first + second

    return min((tile for tile in TOKEN_TILES if tile <= MAX_EXPERT_TILE), key=seconds)


def gemm_tiles(tokens: int) -> tuple[int, ...]:
    """Token tiles to choose from.

    A tile below 128 tokens has its own layout of the tokens' block scales. Several GEMMs read the same quantised
    tokens, so the layout must follow from their number alone. Up to 64 tokens it is that of the narrowest tile that
    holds them; beyond, tiles share one layout.
    """
    return next(((tile,) for tile in TOKEN_TILES if tokens <= tile < SCALE_ATOM_ROWS), (128, 256))


def gemm_shapes(k: int, tiles: Iterable[int], output: Output, kind: BlockScaledKind = "nvfp4") -> Iterator[KernelShape]:
    """The shapes that :func:`choose_gemm` chooses from."""
    for tile in tiles:
        yield from _variants(k, KernelShape(tile, output=output, operands=kind))


def expert_shapes(
    k: int, token_tile: int, gated: bool, grouped: bool, output: Output, kind: BlockScaledKind = "nvfp4"
) -> Iterator[KernelShape]:
    """The shapes that :func:`choose_experts` and :func:`choose_gated` choose from."""
    return _variants(k, KernelShape(token_tile, gated=gated, grouped=grouped, output=output, operands=kind))


def longest_split(k: int, most: int, shape: KernelShape) -> int:
    """``most``, halved until every CTA that shares K has ``MIN_SLICE_STAGES`` stages of it."""
    while most > 1 and k // most < MIN_SLICE_STAGES * shape.tile_k:
        most //= 2
    return most


def _variants(k: int, shape: KernelShape) -> Iterator[KernelShape]:
    """The shape, then for CTA pairs, alone, several to a cluster, and alone with shared tiles, or with K split."""
    yield shape
    if shape.token_tile >= SCALE_ATOM_ROWS:
        for tokens, weights in SHARING:
            yield replace(shape, pair=True, shared_tokens=tokens, shared_weights=weights)
    if shape.token_tile == STREAM_K_TILE and not shape.gated and not shape.grouped:
        yield replace(shape, pair=True, stream_k=True)
    if shape.token_tile <= MAX_SPLIT_TILE:
        for split in SPLITS:
            if longest_split(k, split, shape) == split:
                yield replace(shape, split_k=split)


def _best(shapes: Iterable[KernelShape], problem: Problem, machine: Machine) -> tuple[float, KernelShape]:
    """The time and the shape that takes least; of those that take nearly as little the first, which is the simplest."""
    possible = [shape for shape in shapes if shape.stages >= MIN_STAGES]
    # Shared tiles are for the time of a whole one, in which their sums travel.
    possible = [shape for shape in possible if not shape.stream_k or whole_waves(shape, problem, machine) > 0]
    fitting = [(cost(shape, problem, machine).seconds, shape) for shape in possible]
    least = min(seconds for seconds, _ in fitting)
    return next(found for found in fitting if found[0] <= least * NEARLY)
