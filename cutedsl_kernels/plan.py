"""Which kernel runs a product whose activations are already quantised for some token tile.

``sm100/choose.py`` says what is fast; the layout of the activations' block scales, and for experts the alignment of
their offsets, say what is possible. A plan follows from sizes alone: the same call always runs the same kernel.

Another number of tokens may run another kernel, which adds the parts of K in another order: a token's result then
depends on how many others there are. Plans that are pinned (:func:`pin`) do not: results are the same for any batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.scale_layout import layout_tile

from .compiled import KernelKey
from .sm100.choose import (
    MAX_EXPERT_TILE,
    MIN_SLICE,
    MIN_STAGES,
    choose_experts,
    choose_gated,
    choose_product,
    expert_shapes,
    expert_tile,
    product_shapes,
    product_tiles,
)
from .sm100.clusters import Clusters
from .sm100.shape import TOKEN_TILES, KernelShape, Output


@dataclass(frozen=True)
class Pin:
    """What all plans have in common, whatever the number of tokens.

    Attributes:
        token_tile: of every kernel, experts' too; at most 128.
        split_k: CTAs that share K. Their sums are added in the order of K, so this and K alone say in which order a
            result is summed. Where K is too short for so many, as many as it is long enough for.
        pair: CTAs work in pairs; for a token tile of 128.

    Raises:
        OperandValueError: no kernels are like that.
    """

    token_tile: int = 64
    split_k: int = 1
    pair: bool = False

    def __post_init__(self) -> None:
        if self.token_tile > MAX_EXPERT_TILE:
            raise OperandValueError(f"token_tile: expected at most {MAX_EXPERT_TILE}, found {self.token_tile}")
        try:
            KernelShape(self.token_tile, pair=self.pair, split_k=self.split_k)
        except ValueError as error:
            raise OperandValueError(f"pin: {error}") from None

    def shape(self, k: int, token_tile: int, output: Output, gated: bool, grouped: bool) -> KernelShape:
        """For rows of K quantised for ``token_tile``."""
        if layout_tile(token_tile) != self.token_tile:
            raise OperandValueError(
                f"token_tile: expected {self.token_tile}, to which plans are pinned, found {token_tile}"
            )
        split = self.split_k
        while split > 1 and k // split < MIN_SLICE:
            split //= 2
        return KernelShape(self.token_tile, self.pair, gated, grouped, split, output)


_pin: Pin | None = None


def pin(wanted: Pin | None) -> None:
    """From now on plan by ``wanted``, in all threads; None plans for speed again. Before kernels are warmed up."""
    global _pin
    _pin = wanted


@contextmanager
def pinned(wanted: Pin | None) -> Iterator[None]:
    """Plan by ``wanted`` inside the block."""
    before = _pin
    pin(wanted)
    try:
        yield
    finally:
        pin(before)


def plan_product(
    features: int, k: int, rows: int, groups: int, token_tile: int, output: Output, clusters: Clusters
) -> KernelShape:
    """For a dense product, or ``groups`` of them, of rows quantised for ``token_tile``.

    Args:
        clusters: what the GPU runs at a time.
    """
    if _pin is not None:
        return _pin.shape(k, token_tile, output, gated=False, grouped=False)
    return choose_product(features, k, rows, groups, output, clusters, token_tile)


def plan_experts(
    features: int, k: int, rows: int, experts: int, gated: bool, token_tile: int, output: Output, clusters: Clusters
) -> KernelShape:
    """For experts whose offsets are multiples of ``token_tile``.

    How many tokens each has is known to the device alone; how many there may be in all follows from ``rows``.
    """
    if _pin is not None:
        return _pin.shape(k, token_tile, output, gated, grouped=True)
    pairs = pairs_in(rows, experts, token_tile)
    return choose_experts(features, k, pairs, experts, gated, output, clusters, token_tile)


def plan_gated(features: int, k: int, rows: int, token_tile: int, output: Output, clusters: Clusters) -> KernelShape:
    """For one expert that all rows visit: the same kernel without offsets."""
    if _pin is not None:
        return _pin.shape(k, token_tile, output, gated=True, grouped=False)
    return choose_gated(features, k, rows, output, clusters, token_tile)


def rows_of(pairs: int, experts: int, token_tile: int) -> int:
    """Rows that hold ``pairs`` of tokens and experts however they fall, each expert's rounded up to whole tiles."""
    return (pairs + min(pairs, experts) * (token_tile - 1)) // token_tile * token_tile


def pairs_in(rows: int, experts: int, token_tile: int) -> int:
    """The least number of pairs that :func:`rows_of` makes ``rows`` for."""
    tiles = max(1, rows // token_tile)
    return tiles if tiles <= experts else rows - experts * (token_tile - 1)


def token_tile_for(tokens: int) -> int:
    """The token tile to quantise this many rows for, before any product or grouped product of them."""
    return _pin.token_tile if _pin is not None else layout_tile(product_tiles(max(tokens, 1))[0])


def expert_token_tile_for(pairs: int, experts: int) -> int:
    """The token tile to quantise for, and to align offsets to, where ``experts`` share ``pairs`` token-expert pairs."""
    return _pin.token_tile if _pin is not None else expert_tile(max(pairs, 1), experts)


def every_key(architecture: str, limit: float, outputs: tuple[Output, ...] = ("bf16",)) -> list[KernelKey]:
    """All kernels that plans can ask for, whatever the sizes: NVFP4 between the expert kernels, ``outputs`` elsewhere.

    Routed experts' down kernels come with row weights and without, all others without.
    """
    keys = []
    expert_tiles = [tile for tile in TOKEN_TILES if tile <= MAX_EXPERT_TILE]
    k = 1 << 20  # any that splits as far as K ever does
    for output in outputs:
        keys += [KernelKey(architecture, shape) for shape in product_shapes(k, TOKEN_TILES, output)]
        down = [shape for tile in expert_tiles for shape in expert_shapes(k, tile, False, True, output)]
        keys += [KernelKey(architecture, shape, weighted=weighted) for shape in down for weighted in (False, True)]
    for grouped in (True, False):
        gated = [shape for tile in expert_tiles for shape in expert_shapes(k, tile, True, grouped, "nvfp4")]
        keys += [KernelKey(architecture, shape, limit) for shape in gated]
    return list(dict.fromkeys(key for key in keys if key.shape.stages >= MIN_STAGES))
