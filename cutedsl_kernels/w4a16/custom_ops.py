"""The w4a16 GEMMs as PyTorch custom operators, ``torch.ops.nvfp4_sgl``: plain tensors in, results into given tensors.

Every call is checked from the tensors' metadata before anything is launched; the same checks run on fake tensors.
Nothing is allocated, copied or synchronised, so calls may be captured in CUDA graphs (each kernel must have run once
before). Callers use :mod:`.operations`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import (
    ALIGNMENT,
    require_aligned,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_extent,
    require_multiple,
    require_one_of,
    require_rows,
    require_same_device,
    require_shape,
)

from .. import launcher, plan
from ..common.shape import MAX_EXPERTS, TOKEN_TILES, Output
from ..compiled import KernelKey
from ..sm90.call import Call
from ..sm90.layout import K_MULTIPLE, TILE_BYTES, TILE_K, TILE_ROWS
from ..sm90.shape import GATE_ROWS
from ..w4a4.custom_ops import check_alpha, check_out, register

ARCHITECTURES = ("sm_90a",)
"""Architectures that have w4a16 kernels."""
WHAT = "bf16 activations"
"""What an error on another architecture says these operators take."""


def _check_operands(op: str, tokens: Tensor, weights: Tensor, features: int, tile_bytes: int = TILE_BYTES) -> None:
    """Check activations [..., K] and tiles of weights [matrices, feature tiles, K tiles, bytes]."""
    require_dtype(f"{op}: tokens", tokens, torch.bfloat16)
    require_dtype(f"{op}: weights", weights, torch.uint8)
    require_rows(f"{op}: tokens", tokens, ALIGNMENT)
    require_extent(f"{op}: tokens", "rows", tokens.shape[0])
    k = tokens.shape[-1]
    require_multiple(f"{op}: tokens", "K", k, K_MULTIPLE, "whole halves of a tile of weights")
    require_dimensions(f"{op}: weights", weights, 4, "[matrices, feature tiles, K tiles, bytes]")
    expected = (weights.shape[0], -(-features // TILE_ROWS), -(-k // TILE_K), tile_bytes)
    require_shape(f"{op}: weights", weights, expected, f"tiles of matrices of {features} features by K = {k}")
    require_contiguous(f"{op}: weights", weights)
    if not weights.shape[0] or not features:
        raise OperandValueError(f"{op}: weights: expected at least one feature, found shape {tuple(weights.shape)}")


def launch(op: str, architecture: str, call: Call, limit: float | None = None) -> None:
    """Check addresses, which only real tensors have, and launch the call unless it has no rows."""
    for name, tensor in (("weights", call.weights), ("tokens", call.tokens), ("out", call.out)):
        require_aligned(f"{op}: {name}", tensor)
    if call.rows == 0:
        return
    runner = launcher.current()
    key = KernelKey(architecture, call.shape, limit, programmatic_launch=runner.programmatic_launch)
    runner.launch(key, call, call.clusters(runner.clusters(call.out.device)))


def check_dense(op: str, tokens: Tensor, weights: Tensor, out: Tensor, tile_bytes: int) -> Output:
    """Check what dense and block-diagonal GEMMs have, however their weights are stored; the output's dtype."""
    if tokens.dim() not in (2, 3):
        found = tuple(tokens.shape)
        raise OperandValueError(f"{op}: tokens: expected shape [rows, K] or [rows, groups, K], found {found}")
    features, groups = out.shape[-1], tokens.shape[1] if tokens.dim() == 3 else 1
    _check_operands(op, tokens, weights, features, tile_bytes)
    if weights.shape[0] != groups:
        raise OperandValueError(
            f"{op}: weights: expected {groups} matrices, as tokens have groups, found {weights.shape[0]}"
        )
    return check_out(op, out, (*tokens.shape[:-1], features), "[rows, features] or [rows, groups, features]")


def _check_product(tokens: Tensor, weights: Tensor, alpha: Tensor, out: Tensor) -> Output:
    op = "w4a16_product"
    require_same_device("out", out, tokens=tokens, weights=weights, alpha=alpha)
    output = check_dense(op, tokens, weights, out, TILE_BYTES)
    check_alpha(op, alpha, (weights.shape[0], out.shape[-1]), "[groups, features]")
    return output


def _product(tokens: Tensor, weights: Tensor, alpha: Tensor, out: Tensor) -> None:
    output = _check_product(tokens, weights, alpha, out)
    architecture, clusters = launcher.target(out.device, ARCHITECTURES, WHAT)
    rows, k, features, groups = max(tokens.shape[0], 1), tokens.shape[-1], out.shape[-1], weights.shape[0]
    shape = plan.plan_w4a16(features, k, rows, groups, output, clusters)
    launch("w4a16_product", architecture, Call(shape=shape, weights=weights, tokens=tokens, out=out, alpha=alpha))


def _check_experts(
    tokens: Tensor,
    token_tile: int,
    offsets: Tensor,
    counts: Tensor,
    weights: Tensor,
    alpha: Tensor,
    limit: float | None,
    sources: Tensor | None,
    out: Tensor,
) -> Output:
    op = "w4a16_experts"
    require_same_device("out", out, tokens=tokens, offsets=offsets, counts=counts, weights=weights, alpha=alpha)
    require_dimensions(f"{op}: tokens", tokens, 2, "[rows, K]")
    require_one_of(f"{op}: token_tile", token_tile, TOKEN_TILES)
    require_dimensions(f"{op}: out", out, 2, "[rows, features]")
    rows, features, experts = out.shape[0], out.shape[1], weights.shape[0]
    if sources is None:
        require_shape(f"{op}: out", out, (tokens.shape[0], features), "[rows, features]")
    else:
        _check_sources(op, tokens, token_tile, sources, limit, out)
    if limit is not None:
        require_multiple(f"{op}: out", "features", features, GATE_ROWS, "gates and ups alternate by so many")
    _check_operands(op, tokens, weights, features if limit is None else 2 * features)
    if experts > MAX_EXPERTS:
        raise OperandValueError(f"{op}: weights: expected 1 to {MAX_EXPERTS} experts, found {experts}")
    for name, tensor in (("offsets", offsets), ("counts", counts)):
        require_dtype(f"{op}: {name}", tensor, torch.int32)
        require_shape(f"{op}: {name}", tensor, (experts,), "[experts]")
        require_contiguous(f"{op}: {name}", tensor)
    if limit is None:
        check_alpha(op, alpha, (experts,), "[experts]")
    elif not limit > 0:
        raise OperandValueError(f"{op}: limit: expected a positive clamp, found {limit!r}")
    else:
        check_alpha(op, alpha, (experts, 2), "[experts, gate and up]")
    return check_out(op, out, (rows, features), "[rows, features]")


def _check_sources(op: str, tokens: Tensor, token_tile: int, sources: Tensor, limit: float | None, out: Tensor) -> None:
    """Check where the rows of an unsorted matrix go."""
    if limit is None or not plan.w4a16_gathers(token_tile):
        raise OperandValueError(
            f"{op}: sources: expected a gated GEMM with a token tile that gathers, found token_tile {token_tile} and"
            f" limit {limit}; sort the rows"
        )
    require_same_device("out", out, **{f"{op}: sources": sources})
    require_dtype(f"{op}: sources", sources, torch.int32)
    require_shape(f"{op}: sources", sources, (out.shape[0],), "[rows of out]")
    require_multiple(f"{op}: sources", "rows", out.shape[0], token_tile, "they are looked up by whole tiles")
    require_contiguous(f"{op}: sources", sources)
    if tokens.shape[0] > out.shape[0]:
        raise OperandValueError(
            f"{op}: tokens: expected at most as many rows as out has, {out.shape[0]}, found {tokens.shape[0]}"
        )


def _experts(
    tokens: Tensor,
    token_tile: int,
    offsets: Tensor,
    counts: Tensor,
    weights: Tensor,
    alpha: Tensor,
    limit: float | None,
    sources: Tensor | None,
    out: Tensor,
) -> None:
    output = _check_experts(tokens, token_tile, offsets, counts, weights, alpha, limit, sources, out)
    architecture, clusters = launcher.target(out.device, ARCHITECTURES, WHAT)
    features, k, rows = out.shape[1], tokens.shape[1], max(out.shape[0], 1)
    shape = plan.plan_w4a16_experts(
        features, k, rows, weights.shape[0], limit is not None, token_tile, output, clusters, sources is not None
    )
    call = Call(
        shape=shape, weights=weights, tokens=tokens, out=out, alpha=alpha, offsets=offsets, counts=counts,
        sources=sources,
    )  # fmt: skip
    launch("w4a16_experts", architecture, call, limit)


register("w4a16_product(Tensor tokens, Tensor weights, Tensor alpha, Tensor(a!) out)", _product, _check_product)
register(
    "w4a16_experts(Tensor tokens, int token_tile, Tensor offsets, Tensor counts, Tensor weights, Tensor alpha,"
    " float? limit, Tensor? sources, Tensor(a!) out)",
    _experts,
    _check_experts,
)
