"""Chooses the Hopper kernel of a problem: the one with the least modelled time (``cost``). Plain Python, deterministic.

A choice depends on few sizes: numbers of tokens are rounded first (``..common.planned``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from ..common.clusters import Clusters
from ..common.planned import planned_pairs, planned_tokens
from ..common.shape import TOKEN_TILES, Output
from .cost import Problem, microseconds
from .layout import TILE_K
from .shape import (
    GEMM_TOKEN_TILES,
    HOPPER_SPLITS,
    MIN_STAGES,
    KernelShape,
    WeightKind,
    max_split,
)

MIN_SLICE = 2 * TILE_K
"""Least K of a CTA of a split-K cluster: a single stage is all latency."""
NEARLY = 1.01
"""Shapes within this factor of the least time count as equal: the model is no more precise."""
H200_CLUSTERS = Clusters(132, 66, 39, 30, 15)
"""What an H200 runs at a time, as its driver says (2026-11-24)."""


def choose_gemm(
    features: int, k: int, tokens: int, groups: int, output: Output, clusters: Clusters, kind: WeightKind = "nvfp4"
) -> KernelShape:
    """Choose the kernel for ``groups`` GEMMs of [tokens, k] by [features, k]."""
    return _choose_gemm(features, k, planned_tokens(tokens), groups, output, clusters, kind)


@lru_cache(maxsize=4096)
def _choose_gemm(
    features: int, k: int, tokens: int, groups: int, output: Output, clusters: Clusters, kind: WeightKind
) -> KernelShape:
    problem = Problem(features, k, tokens, groups)
    return _best(gemm_shapes(k, tokens, output, kind), problem, clusters)


def choose_experts(
    features: int, k: int, pairs: int, experts: int, gated: bool, token_tile: int, output: Output, clusters: Clusters
) -> KernelShape:
    """Choose the kernel for experts that share ``pairs`` token-expert pairs and write ``features``, of twice as many
    rows if gated.

    Counts stay on the GPU, so the choice uses their mean.
    """
    return _choose_experts(features, k, planned_pairs(pairs), experts, gated, token_tile, output, clusters)


@lru_cache(maxsize=4096)
def _choose_experts(
    features: int, k: int, pairs: int, experts: int, gated: bool, token_tile: int, output: Output, clusters: Clusters
) -> KernelShape:
    problem = Problem(features * (2 if gated else 1), k, pairs, experts, is_routed=True)
    return _best(expert_shapes(k, token_tile, gated, output), problem, clusters)


NARROW_MEAN = 6
"""The largest mean of tokens of an expert that takes tiles of 8. With more, many experts would need two of them, each
of which expands the weights; a tile of 16 costs little more where it is multiplied 8 wide (``KernelShape.widths``).
At a mean of 7 tiles of 16 take 0.93 of the time of tiles of 8 on an H200
(``launch/results/hopper_step_h200.md``)."""


def expert_tile(pairs: int, experts: int) -> int:
    """Tokens of an expert's tile: the narrowest that holds the mean of the experts that are visited, and above
    :data:`NARROW_MEAN` no tile of 8."""
    problem = Problem(1, 1, planned_pairs(pairs), experts, is_routed=True)
    mean = problem.rows / problem.visited
    narrowest, *wider = TOKEN_TILES
    if mean <= NARROW_MEAN:
        return narrowest
    return next((tile for tile in wider if mean <= tile), TOKEN_TILES[-1])


def gemm_shapes(k: int, tokens: int, output: Output, kind: WeightKind = "nvfp4") -> Iterator[KernelShape]:
    """The shapes that :func:`choose_gemm` chooses from: no tile more than twice as wide as the tokens."""
    tiles = GEMM_TOKEN_TILES[kind]
    widest = next((tile for tile in tiles if tokens <= tile), tiles[-1])
    for tile in tiles:
        if tile <= widest:
            yield from _splits(k, KernelShape(tile, output=output, weights=kind))


def expert_shapes(k: int, token_tile: int, gated: bool, output: Output) -> Iterator[KernelShape]:
    """The shapes that :func:`choose_experts` chooses from."""
    yield from _splits(k, KernelShape(token_tile, output=output, gated=gated, grouped=True))


def _splits(k: int, shape: KernelShape) -> Iterator[KernelShape]:
    """Yield the shape with K whole, then split; each with as many CTAs on an SM as fit, then with fewer."""
    for split in HOPPER_SPLITS:
        if split == 1 or (split <= max_split(shape.token_tile) and k // split >= MIN_SLICE):
            each = replace(shape, split_k=split)
            yield each
            for count in range(each.fitting_ctas - 1, 0, -1):
                yield replace(each, max_ctas=count)


def _best(shapes: Iterable[KernelShape], problem: Problem, clusters: Clusters) -> KernelShape:
    """Return the fastest shape; among nearly equal ones the first, which is the simplest."""
    fitting = [(microseconds(shape, problem, clusters), shape) for shape in shapes if shape.stages >= MIN_STAGES]
    least = min(time for time, _ in fitting)
    return next(shape for time, shape in fitting if time <= least * NEARLY)
