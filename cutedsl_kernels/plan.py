"""Plans: choose the kernel of a GEMM whose activations are already quantised for some token tile.

``sm100/choose.py`` knows what is fast. The layout of the activations' block scales, and for experts the alignment of
their offsets, limit what is possible. A plan follows from sizes alone: the same call always runs the same kernel.

Another number of tokens may run another kernel, which adds the splits of K in another order. So a token's result
depends on how many other tokens there are. With pinned plans (:class:`Pin`) it does not: results are the same for any
batch. Planners take the pin as an argument; operations take that of the current launcher.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.scale_layout import layout_tile

from .common.clusters import Clusters
from .common.shape import TOKEN_TILES, Output
from .compiled import KernelKey
from .sm90 import choose as hopper
from .sm90.shape import GATHER_MAX_TILE, GEMM_TOKEN_TILES, WeightKind, max_split
from .sm90.shape import KernelShape as HopperShape
from .sm100.choose import (
    MAX_EXPERT_TILE,
    MIN_STAGES,
    choose_experts,
    choose_gated,
    choose_gemm,
    expert_shapes,
    expert_tile,
    gemm_shapes,
    gemm_tiles,
    longest_split,
)
from .sm100.shape import BlockScaledKind, KernelShape


@dataclass(frozen=True)
class Pin:
    """The properties that all pinned plans share, whatever the number of tokens.

    Attributes:
        token_tile: the token tile of every kernel, those of experts included; at most 128.
        split_k: CTAs that share K. Their sums are added in the order of K, so this and K alone determine the order in
            which a result is summed. If K is too short for so many, as many as it is long enough for.
        pair: whether CTAs work in pairs; for a token tile of 128, on SM100.

    Raises:
        OperandValueError: there are no such kernels.
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

    def shape(
        self, k: int, token_tile: int, output: Output, *, gated: bool, grouped: bool, kind: BlockScaledKind = "nvfp4"
    ) -> KernelShape:
        """The kernel for rows of ``k`` elements that are quantised for ``token_tile``.

        Raises:
            OperandValueError: their token tile is not the pinned one.
        """
        if layout_tile(token_tile) != self.token_tile:
            raise OperandValueError(
                f"token_tile: expected {self.token_tile}, to which plans are pinned, found {token_tile}"
            )
        shape = KernelShape(self.token_tile, pair=self.pair, gated=gated, grouped=grouped, output=output, operands=kind)
        return replace(shape, split_k=longest_split(k, self.split_k, shape))


def plan_gemm(
    features: int,
    k: int,
    rows: int,
    groups: int,
    token_tile: int,
    output: Output,
    clusters: Clusters,
    kind: BlockScaledKind = "nvfp4",
    *,
    pin: Pin | None = None,
) -> KernelShape:
    """The kernel for a dense GEMM, or for ``groups`` of them, of rows that are quantised for ``token_tile``.

    Args:
        features, k, rows: sizes of one GEMM.
        groups: GEMMs of a block-diagonal one, else 1.
        token_tile: of the rows' block scales.
        output: what is written.
        clusters: how many clusters the GPU runs at a time.
        kind: of operands.
        pin: what all plans have in common; by default they are for speed.
    """
    if pin is not None:
        return pin.shape(k, token_tile, output, gated=False, grouped=False, kind=kind)
    return choose_gemm(features, k, rows, groups, output, clusters, token_tile, kind)


def plan_experts(
    features: int,
    k: int,
    rows: int,
    experts: int,
    gated: bool,
    token_tile: int,
    output: Output,
    clusters: Clusters,
    counts_ahead: bool = False,
    *,
    pin: Pin | None = None,
) -> KernelShape:
    """The kernel for a grouped GEMM of experts whose offsets are multiples of ``token_tile``.

    The tokens of each expert are known on the device alone; how many pairs there may be in all follows from ``rows``.

    Args:
        counts_ahead: whether it reads offsets and counts before the previous kernel has ended.
    """
    if pin is not None:
        return replace(pin.shape(k, token_tile, output, gated=gated, grouped=True), counts_ahead=counts_ahead)
    pairs = pairs_in(rows, experts, token_tile)
    shape = choose_experts(features, k, pairs, experts, gated, output, clusters, token_tile)
    return replace(shape, counts_ahead=counts_ahead)


def plan_gated(
    features: int,
    k: int,
    rows: int,
    token_tile: int,
    output: Output,
    clusters: Clusters,
    kind: BlockScaledKind = "nvfp4",
    *,
    pin: Pin | None = None,
) -> KernelShape:
    """The kernel for the gated GEMM of one expert that all rows visit: an expert kernel without offsets."""
    if pin is not None:
        return pin.shape(k, token_tile, output, gated=True, grouped=False, kind=kind)
    return choose_gated(features, k, rows, output, clusters, token_tile, kind)


def plan_w4a16(
    features: int,
    k: int,
    rows: int,
    groups: int,
    output: Output,
    clusters: Clusters,
    kind: WeightKind = "nvfp4",
    *,
    copies: int = 0,
    pin: Pin | None = None,
) -> HopperShape:
    """The kernel for a dense GEMM, or for ``groups`` of them, of bf16 rows.

    Args:
        features, k, rows: sizes of one GEMM.
        groups: GEMMs of a block-diagonal one, else 1.
        output: what is written.
        clusters: how many clusters the GPU runs at a time.
        kind: of weights.
        copies: tensors beside ``out`` that get the result. The choice does not depend on them.

    Raises:
        OperandValueError: plans are pinned to pairs, or to a split of K that Hopper has not.
    """
    if pin is not None:
        shape = _pinned_hopper(pin, k, output, gated=False, grouped=False, kind=kind)
    else:
        shape = hopper.choose_gemm(features, k, rows, groups, output, clusters, kind)
    return replace(shape, copies=copies) if copies else shape


def plan_w4a16_experts(
    features: int,
    k: int,
    rows: int,
    experts: int,
    gated: bool,
    token_tile: int,
    output: Output,
    clusters: Clusters,
    gathers: bool = False,
    counts_ahead: bool = False,
    *,
    pin: Pin | None = None,
) -> HopperShape:
    """The kernel for a grouped GEMM of experts over bf16 rows, whose offsets are multiples of ``token_tile``.

    Args:
        gathers: whether it takes its tokens from the rows of an unsorted matrix.
        counts_ahead: whether it reads offsets and counts before the previous kernel has ended.

    Raises:
        OperandValueError: plans are pinned to another token tile, or to a split of K that Hopper has not.
    """
    if pin is not None:
        if token_tile != pin.token_tile:
            raise OperandValueError(
                f"token_tile: expected {pin.token_tile}, to which plans are pinned, found {token_tile}"
            )
        shape = _pinned_hopper(pin, k, output, gated, grouped=True)
        return replace(shape, gathers=gathers, counts_ahead=counts_ahead)
    pairs = pairs_in(rows, experts, token_tile)
    shape = hopper.choose_experts(features, k, pairs, experts, gated, token_tile, output, clusters)
    return replace(shape, gathers=gathers, counts_ahead=counts_ahead)


def w4a16_gathers(token_tile: int) -> bool:
    """Whether the gated kernels of experts take their tokens from the rows of an unsorted matrix."""
    return token_tile <= GATHER_MAX_TILE


def _pinned_hopper(
    pin: Pin, k: int, output: Output, gated: bool, grouped: bool, kind: WeightKind = "nvfp4"
) -> HopperShape:
    if pin.pair or pin.split_k > max_split(pin.token_tile):
        raise OperandValueError(
            f"pin: expected no pairs and split_k at most {max_split(pin.token_tile)} on Hopper, found {pin}"
        )
    split = pin.split_k
    while split > 1 and k // split < hopper.MIN_SLICE:
        split //= 2
    return HopperShape(pin.token_tile, split, output, gated=gated, grouped=grouped, weights=kind)


def rows_of(pairs: int, experts: int, token_tile: int) -> int:
    """Rows that suffice for any distribution of ``pairs`` over experts, each expert's rounded up to whole tiles."""
    return (pairs + min(pairs, experts) * (token_tile - 1)) // token_tile * token_tile


def pairs_in(rows: int, experts: int, token_tile: int) -> int:
    """The least number of pairs that :func:`rows_of` makes ``rows`` for."""
    tiles = max(1, rows // token_tile)
    return tiles if tiles <= experts else rows - experts * (token_tile - 1)


def token_tile_for(tokens: int, pin: Pin | None = None) -> int:
    """The token tile to quantise this many rows for, before any dense or block-diagonal GEMM of them."""
    return pin.token_tile if pin is not None else layout_tile(gemm_tiles(max(tokens, 1))[0])


def expert_token_tile_for(pairs: int, experts: int, pin: Pin | None = None) -> int:
    """The token tile to quantise for, and to align offsets to, if ``experts`` share ``pairs`` token-expert pairs."""
    return pin.token_tile if pin is not None else expert_tile(max(pairs, 1), experts)


def w4a16_expert_token_tile_for(pairs: int, experts: int, pin: Pin | None = None) -> int:
    """The token tile to align offsets to, if ``experts`` share ``pairs`` token-expert pairs of bf16 rows."""
    return pin.token_tile if pin is not None else hopper.expert_tile(max(pairs, 1), experts)


def every_w4a16_key(limit: float, outputs: tuple[Output, ...] = ("bf16",)) -> list[KernelKey]:
    """All kernels that plans can need on Hopper, whatever the sizes: ``outputs``, but bf16 of gated kernels.

    Those of FP8 weights are among them. Kernels that write copies are not: they would be three more of every dense one,
    and only ranks that share a layer need those of their number. Their plans name them (:func:`.warm_up.keys_for`).
    """
    k = 1 << 20  # long enough for every split of K
    keys = [
        KernelKey("sm_90a", shape)
        for weights in GEMM_TOKEN_TILES
        for output in outputs
        for shape in hopper.gemm_shapes(k, k, output, weights)
    ]
    for tile in TOKEN_TILES:
        gated = list(hopper.expert_shapes(k, tile, True, "bf16"))
        gated += [replace(shape, gathers=True) for shape in gated if w4a16_gathers(tile)]
        keys += [KernelKey("sm_90a", shape, limit) for shape in gated]
        for output in outputs:
            down = hopper.expert_shapes(k, tile, False, output)
            keys += [
                KernelKey("sm_90a", replace(shape, counts_ahead=ahead)) for shape in down for ahead in (False, True)
            ]
    return list(dict.fromkeys(key for key in keys if key.shape.stages >= hopper.MIN_STAGES))


def every_key(architecture: str, limit: float, outputs: tuple[Output, ...] = ("bf16",)) -> list[KernelKey]:
    """All kernels that plans can need, whatever the sizes: NVFP4 between the expert kernels, ``outputs`` elsewhere.

    Those of MXFP8, whose gated kernels write bf16, are among them.

    Down kernels of routed experts are included with and without row weights, all others without; kernels of routed
    experts with counts that are ready and with counts that are waited for.
    """
    if architecture == "sm_90a":
        return every_w4a16_key(limit, outputs)
    keys = []
    expert_tiles = [tile for tile in TOKEN_TILES if tile <= MAX_EXPERT_TILE]
    k = 1 << 20  # long enough for every split of K
    for output in outputs:
        keys += [KernelKey(architecture, shape) for shape in gemm_shapes(k, TOKEN_TILES, output)]
        down = [shape for tile in expert_tiles for shape in _either_way(expert_shapes(k, tile, False, True, output))]
        keys += [KernelKey(architecture, shape, weighted=weighted) for shape in down for weighted in (False, True)]
    for grouped in (True, False):
        gated = [shape for tile in expert_tiles for shape in expert_shapes(k, tile, True, grouped, "nvfp4")]
        gated = _either_way(gated) if grouped else gated
        keys += [KernelKey(architecture, shape, limit) for shape in gated]
    for output in outputs:
        keys += [KernelKey(architecture, shape) for shape in gemm_shapes(k, TOKEN_TILES, output, "mxfp8")]
    gated = [shape for tile in expert_tiles for shape in expert_shapes(k, tile, True, False, "bf16", "mxfp8")]
    keys += [KernelKey(architecture, shape, limit) for shape in gated]
    return list(dict.fromkeys(key for key in keys if key.shape.stages >= MIN_STAGES))


def _either_way(shapes: Iterable[KernelShape]) -> list[KernelShape]:
    """Grouped kernels that wait for counts, and those that read them ahead."""
    return [replace(shape, counts_ahead=ahead) for shape in shapes for ahead in (False, True)]
