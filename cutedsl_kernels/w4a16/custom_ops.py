"""The operators of the w4a16 GEMMs (:mod:`..operators`). Callers use :mod:`.operations`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import (
    ALIGNMENT,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_extent,
    require_multiple,
    require_one_of,
    require_rows,
    require_shape,
)
from nvfp4_sgl.limits import TILED_K_MULTIPLE

from .. import operators, plan
from ..common.shape import TOKEN_TILES, Output
from ..launcher import Target
from ..operators import Operator, Room, check_alpha, check_experts, check_out
from ..sm90.call import Call
from ..sm90.layout import TILE_BYTES, TILE_K, TILE_ROWS
from ..sm90.shape import COPIES, GATE_ROWS

ARCHITECTURES = ("sm_90a",)
"""Architectures that have kernels for bf16 activations."""
ACTIVATIONS = "bf16 activations"


@dataclass(frozen=True, kw_only=True)
class GemmOperands(operators.Operands):
    """Arguments of ``w4a16_product``, as :class:`..sm90.call.Call` describes them."""

    alpha: Tensor
    copies: Sequence[Tensor] = ()


@dataclass(frozen=True, kw_only=True)
class ExpertOperands(GemmOperands):
    """Arguments of ``w4a16_experts``, as :class:`..sm90.call.Call` describes them.

    Attributes:
        token_tile: what offsets are multiples of.
        counts_ahead: whether offsets and counts may be read before the previous kernel has ended.
    """

    token_tile: int
    offsets: Tensor
    counts: Tensor
    sources: Tensor | None
    counts_ahead: bool


def _check_operands(op: str, x: operators.Operands, features: int, tile_bytes: int = TILE_BYTES) -> None:
    """Check activations [..., K] and tiles of weights [matrices, feature tiles, K tiles, bytes]."""
    tokens, weights, k = x.tokens, x.weights, x.tokens.shape[-1]
    require_dtype(f"{op}: tokens", tokens, torch.bfloat16)
    require_dtype(f"{op}: weights", weights, torch.uint8)
    require_rows(f"{op}: tokens", tokens, ALIGNMENT)
    require_extent(f"{op}: tokens", "rows", tokens.shape[0])
    require_multiple(f"{op}: tokens", "K", k, TILED_K_MULTIPLE, "whole halves of a tile of weights")
    require_dimensions(f"{op}: weights", weights, 4, "[matrices, feature tiles, K tiles, bytes]")
    expected = (weights.shape[0], -(-features // TILE_ROWS), -(-k // TILE_K), tile_bytes)
    require_shape(f"{op}: weights", weights, expected, f"tiles of matrices of {features} features by K = {k}")
    require_contiguous(f"{op}: weights", weights)
    if not weights.shape[0] or not features:
        raise OperandValueError(f"{op}: weights: expected at least one feature, found shape {tuple(weights.shape)}")


def check_dense(op: str, x: operators.Operands, tile_bytes: int) -> Output:
    """Check what dense and block-diagonal GEMMs have, however their weights are stored; the output's dtype."""
    if x.tokens.dim() not in (2, 3):
        found = tuple(x.tokens.shape)
        raise OperandValueError(f"{op}: tokens: expected shape [rows, K] or [rows, groups, K], found {found}")
    features, groups = x.out.shape[-1], x.tokens.shape[1] if x.tokens.dim() == 3 else 1
    _check_operands(op, x, features, tile_bytes)
    if x.weights.shape[0] != groups:
        raise OperandValueError(
            f"{op}: weights: expected {groups} matrices, as tokens have groups, found {x.weights.shape[0]}"
        )
    return check_out(op, x.out, (*x.tokens.shape[:-1], features), "[rows, features] or [rows, groups, features]")


def _check_gemm(op: str, x: GemmOperands) -> Output:
    output = check_dense(op, x, TILE_BYTES)
    check_alpha(op, x.alpha, (x.weights.shape[0], x.out.shape[-1]), "[groups, features]")
    if x.copies:
        _check_copies(op, x, output)
    return output


def _check_copies(op: str, x: GemmOperands, output: Output) -> None:
    """Check tensors that get the same result as ``out``."""
    require_one_of(f"{op}: copies", len(x.copies), COPIES)
    if x.out.dim() != 2 or output != "bf16":
        raise OperandValueError(
            f"{op}: copies: expected none unless out is bf16 [rows, features], found {len(x.copies)} of {x.out.dtype}"
            f" with {x.out.dim()} dimensions"
        )
    for i, copy in enumerate(x.copies):
        require_dtype(f"{op}: copies[{i}]", copy, x.out.dtype)
        require_shape(f"{op}: copies[{i}]", copy, x.out.shape, "that of out")
        if copy.stride() != x.out.stride():
            expected = f"those of out, {x.out.stride()}"
            raise OperandValueError(f"{op}: copies[{i}]: expected strides {expected}, found {copy.stride()}")


def _gemm(x: GemmOperands, output: Output, target: Target) -> Call:
    rows, k, features, groups = max(x.tokens.shape[0], 1), x.tokens.shape[-1], x.out.shape[-1], x.weights.shape[0]
    copies, pin = len(x.copies), target.pin
    shape = plan.plan_w4a16(features, k, rows, groups, output, target.clusters, copies=copies, pin=pin)
    return Call(shape=shape, weights=x.weights, tokens=x.tokens, out=x.out, alpha=x.alpha, copies=x.copies)


def _check_experts(op: str, x: ExpertOperands) -> Output:
    require_dimensions(f"{op}: tokens", x.tokens, 2, "[rows, K]")
    require_one_of(f"{op}: token_tile", x.token_tile, TOKEN_TILES)
    require_dimensions(f"{op}: out", x.out, 2, "[rows, features]")
    (rows, features), experts = x.out.shape, x.weights.shape[0]
    if x.sources is None:
        require_shape(f"{op}: out", x.out, (x.tokens.shape[0], features), "[rows, features]")
    else:
        _check_sources(op, x, x.sources)
    if x.counts_ahead and x.limit is not None:
        raise OperandValueError(f"{op}: counts_ahead: expected False for a gated GEMM, which follows the routing")
    if x.limit is not None:
        require_multiple(f"{op}: out", "features", features, GATE_ROWS, "gates and ups alternate by so many")
    _check_operands(op, x, features if x.limit is None else 2 * features)
    check_experts(op, x.offsets, x.counts, experts)
    if x.limit is None:
        check_alpha(op, x.alpha, (experts,), "[experts]")
    elif not x.limit > 0:
        raise OperandValueError(f"{op}: limit: expected a positive clamp, found {x.limit!r}")
    else:
        check_alpha(op, x.alpha, (experts, 2), "[experts, gate and up]")
    return check_out(op, x.out, (rows, features), "[rows, features]")


def _check_sources(op: str, x: ExpertOperands, sources: Tensor) -> None:
    """Check where the rows of an unsorted matrix go."""
    rows = x.out.shape[0]
    if x.limit is None or not plan.w4a16_gathers(x.token_tile):
        raise OperandValueError(
            f"{op}: sources: expected a gated GEMM with a token tile that gathers, found token_tile {x.token_tile} and"
            f" limit {x.limit}; sort the rows"
        )
    require_dtype(f"{op}: sources", sources, torch.int32)
    require_shape(f"{op}: sources", sources, (rows,), "[rows of out]")
    require_multiple(f"{op}: sources", "rows", rows, x.token_tile, "they are looked up by whole tiles")
    require_contiguous(f"{op}: sources", sources)
    if x.tokens.shape[0] > rows:
        raise OperandValueError(
            f"{op}: tokens: expected at most as many rows as out has, {rows}, found {x.tokens.shape[0]}"
        )


def _experts(x: ExpertOperands, output: Output, target: Target) -> Call:
    features, k, rows, experts = x.out.shape[1], x.tokens.shape[1], max(x.out.shape[0], 1), x.weights.shape[0]
    gated, gathers = x.limit is not None, x.sources is not None
    shape = plan.plan_w4a16_experts(
        features,
        k,
        rows,
        experts,
        gated,
        x.token_tile,
        output,
        target.clusters,
        gathers,
        x.counts_ahead,
        pin=target.pin,
    )
    return Call(
        shape=shape, weights=x.weights, tokens=x.tokens, out=x.out, alpha=x.alpha, offsets=x.offsets, counts=x.counts,
        sources=x.sources,
    )  # fmt: skip


Room(GemmOperands, ARCHITECTURES, ACTIVATIONS).register(
    Operator(
        "w4a16_product(Tensor tokens, Tensor weights, Tensor alpha, Tensor(a!) out, Tensor(b!)[] copies)",
        _check_gemm,
        _gemm,
    )
)
Room(ExpertOperands, ARCHITECTURES, ACTIVATIONS).register(
    Operator(
        "w4a16_experts(Tensor tokens, int token_tile, Tensor offsets, Tensor counts, Tensor weights, Tensor alpha,"
        " float? limit, Tensor? sources, bool counts_ahead, Tensor(a!) out)",
        _check_experts,
        _experts,
    )
)
