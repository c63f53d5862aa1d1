"""The operators of the NVFP4 GEMMs (:mod:`..operators`). Callers use :mod:`.operations`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandTypeError, OperandValueError
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
from nvfp4_sgl.formats.nvfp4 import swiglu_row_scale
from nvfp4_sgl.formats.scale_layout import scale_bytes
from nvfp4_sgl.limits import NVFP4_K_MULTIPLE

from .. import operators, plan
from ..common.shape import TOKEN_TILES, Output
from ..launcher import Target
from ..operators import WHOLE_STORES_REASON, Operator, Room, check_alpha, check_experts, check_out
from ..sm100.call import Call
from ..sm100.shape import GATE_ROWS, KernelShape

ARCHITECTURES = ("sm_100a", "sm_103a")
"""Architectures with block-scaled tensor cores."""
NVFP4_FEATURES_MULTIPLE = 2 * ALIGNMENT
"""Features of NVFP4 output must be a multiple of this: a row is whole 16 bytes."""


@dataclass(frozen=True, kw_only=True)
class Operands(operators.Operands):
    """Arguments of these operators, as :class:`..sm100.call.Call` describes them; ``weights`` of ``product`` [F, K/2].

    Attributes:
        token_tile: what the tokens' block scales are laid out for.
        counts_ahead: whether offsets and counts may be read before the previous kernel has ended.
    """

    token_scales: Tensor
    row_scale: Tensor
    token_tile: int
    weight_scales: Tensor
    alpha: Tensor
    offsets: Tensor | None = None
    counts: Tensor | None = None
    counts_ahead: bool = False
    row_weight: Tensor | None = None
    out_scales: Tensor | None = None


def _check_tokens(op: str, x: Operands) -> int:
    """Check activations [T, K/2] or [T, G, K/2]; returns K."""
    tokens, token_scales, row_scale = x.tokens, x.token_scales, x.row_scale
    require_dtype(f"{op}: tokens", tokens, torch.uint8)
    require_dtype(f"{op}: token_scales", token_scales, torch.float8_e4m3fn)
    require_dtype(f"{op}: row_scale", row_scale, torch.float32)
    require_one_of(f"{op}: token_tile", x.token_tile, TOKEN_TILES)
    rows, k = tokens.shape[0], tokens.shape[-1] * 2
    require_multiple(f"{op}: tokens", "K", k, NVFP4_K_MULTIPLE, "whole groups of four block scales")
    require_rows(f"{op}: tokens", tokens, ALIGNMENT)
    require_extent(f"{op}: tokens", "rows", rows)
    columns = k * (tokens.shape[1] if tokens.dim() == 3 else 1)
    require_contiguous(f"{op}: token_scales", token_scales)
    expected = scale_bytes(rows, columns, x.token_tile)
    if token_scales.numel() != expected:
        raise OperandValueError(
            f"{op}: token_scales: expected {expected} bytes for {rows} rows of {columns} in token tiles of"
            f" {x.token_tile}, found {token_scales.numel()}; ask token_tile_for before quantising"
        )
    if row_scale.numel() != 1:
        require_shape(f"{op}: row_scale", row_scale, tokens.shape[:-1], "[rows] or [rows, groups], or [1]")
    return k


def _check_weights(op: str, x: Operands, k: int) -> None:
    """Check weights [..., features, K/2]."""
    weights, weight_scales = x.weights, x.weight_scales
    require_dtype(f"{op}: weights", weights, torch.uint8)
    require_dtype(f"{op}: weight_scales", weight_scales, torch.float8_e4m3fn)
    require_shape(f"{op}: weights", weights, (*weights.shape[:-1], k // 2), "[..., features, K/2], K that of tokens")
    require_contiguous(f"{op}: weights", weights)
    features = weights.shape[-2]
    if features == 0:
        raise OperandValueError(f"{op}: weights: expected at least one feature, found shape {tuple(weights.shape)}")
    require_extent(f"{op}: weights", "features", features)
    require_contiguous(f"{op}: weight_scales", weight_scales)
    matrices = weights.numel() // (features * (k // 2))
    expected = matrices * scale_bytes(features, k)
    if weight_scales.numel() != expected:
        raise OperandValueError(
            f"{op}: weight_scales: expected {expected} bytes for {matrices} swizzled matrices of {features} by {k},"
            f" found {weight_scales.numel()}"
        )


def _check_visits(op: str, x: Operands, experts: int) -> None:
    """Check offsets and counts; without them there must be one expert."""
    if x.counts_ahead and x.offsets is None:
        raise OperandValueError(f"{op}: counts_ahead: expected False without offsets and counts, found True")
    if x.offsets is not None and x.counts is not None:
        check_experts(op, x.offsets, x.counts, experts)
    elif x.offsets is not None or x.counts is not None:
        absent = "offsets" if x.offsets is None else "counts"
        raise OperandTypeError(f"{op}: {absent}: expected offsets and counts or neither, found None")
    elif experts != 1:
        raise OperandTypeError(f"{op}: offsets: expected a tensor, since there are {experts} experts, found None")


def _call(x: Operands, shape: KernelShape, weights: Tensor, alpha: Tensor) -> Call:
    return Call(
        shape=shape,
        weights=weights,
        weight_scales=x.weight_scales,
        tokens=x.tokens,
        token_scales=x.token_scales,
        out=x.out,
        row_scale=x.row_scale,
        alpha=alpha,
        out_scales=x.out_scales,
        row_weight=x.row_weight,
        offsets=x.offsets,
        counts=x.counts,
    )


def _check_gemm(op: str, x: Operands) -> Output:
    require_dimensions(f"{op}: tokens", x.tokens, 2, "[rows, K/2]")
    require_dimensions(f"{op}: weights", x.weights, 2, "[features, K/2]")
    _check_weights(op, x, _check_tokens(op, x))
    features = x.weights.shape[0]
    check_alpha(op, x.alpha, (features,), "[features]")
    return check_out(op, x.out, (x.tokens.shape[0], features), "[rows, features]")


def _check_grouped_gemm(op: str, x: Operands) -> Output:
    require_dimensions(f"{op}: tokens", x.tokens, 3, "[rows, groups, K/2]")
    require_dimensions(f"{op}: weights", x.weights, 3, "[groups, features, K/2]")
    k = _check_tokens(op, x)
    rows, groups, features = x.tokens.shape[0], x.tokens.shape[1], x.weights.shape[1]
    require_shape(f"{op}: weights", x.weights, (groups, features, k // 2), "[groups, features, K/2], groups of tokens")
    if groups == 0:
        raise OperandValueError(f"{op}: tokens: expected at least one group, found shape {tuple(x.tokens.shape)}")
    _check_weights(op, x, k)
    check_alpha(op, x.alpha, (groups, features), "[groups, features]")
    return check_out(op, x.out, (rows, groups, features), "[rows, groups, features]")


def _gemm(x: Operands, output: Output, target: Target) -> Call:
    """The call of a dense GEMM, or of a block-diagonal one."""
    weights = x.weights if x.weights.dim() == 3 else x.weights.unsqueeze(0)
    groups, features, bytes_of_k = weights.shape
    rows = max(x.tokens.shape[0], 1)
    shape = plan.plan_gemm(
        features, bytes_of_k * 2, rows, groups, x.token_tile, output, target.clusters, pin=target.pin
    )
    return _call(x, shape, weights, x.alpha)


def _check_gate_up(op: str, x: Operands) -> Output:
    require_dimensions(f"{op}: tokens", x.tokens, 2, "[rows, K/2]")
    require_dimensions(f"{op}: weights", x.weights, 3, "[experts, 2 * features, K/2]")
    assert x.limit is not None
    swiglu_row_scale(x.limit)
    k = _check_tokens(op, x)
    rows, experts, features = x.tokens.shape[0], x.weights.shape[0], x.weights.shape[1] // 2
    _check_visits(op, x, experts)
    require_multiple(f"{op}: weights", "rows of an expert", x.weights.shape[1], 2 * GATE_ROWS, "16 gates, 16 ups, …")
    _check_weights(op, x, k)
    check_alpha(op, x.alpha, (experts, 2), "[experts, gate and up]")
    if x.out_scales is None:
        return check_out(op, x.out, (rows, features), "[rows, features]")
    require_dtype(f"{op}: out (with out_scales: NVFP4 codes)", x.out, torch.uint8)
    require_multiple(f"{op}: weights", "features", features, NVFP4_FEATURES_MULTIPLE, WHOLE_STORES_REASON)
    require_shape(f"{op}: out", x.out, (rows, features // 2), "[rows, features/2]")
    require_rows(f"{op}: out", x.out, ALIGNMENT)
    require_dtype(f"{op}: out_scales", x.out_scales, torch.float8_e4m3fn)
    require_contiguous(f"{op}: out_scales", x.out_scales)
    expected = scale_bytes(rows, features, x.token_tile)
    if x.out_scales.numel() != expected:
        raise OperandValueError(
            f"{op}: out_scales: expected {expected} bytes for {rows} rows of {features} in token tiles of"
            f" {x.token_tile}, found {x.out_scales.numel()}"
        )
    return "nvfp4"


def _gate_up(x: Operands, output: Output, target: Target) -> Call:
    experts, rows_of_weights, bytes_of_k = x.weights.shape
    features, k, rows = rows_of_weights // 2, bytes_of_k * 2, max(x.tokens.shape[0], 1)
    if x.offsets is None:
        shape = plan.plan_gated(features, k, rows, x.token_tile, output, target.clusters, pin=target.pin)
    else:
        sizes = features, k, rows, experts, True, x.token_tile
        shape = plan.plan_experts(*sizes, output, target.clusters, x.counts_ahead, pin=target.pin)
    return _call(x, shape, x.weights, x.alpha)


def _check_down(op: str, x: Operands) -> Output:
    require_dimensions(f"{op}: tokens", x.tokens, 2, "[rows, K/2]")
    require_dimensions(f"{op}: weights", x.weights, 3, "[experts, features, K/2]")
    k = _check_tokens(op, x)
    rows, experts, features = x.tokens.shape[0], x.weights.shape[0], x.weights.shape[1]
    _check_visits(op, x, experts)
    _check_weights(op, x, k)
    check_alpha(op, x.alpha, (experts,), "[experts]")
    if x.row_weight is not None:
        require_dtype(f"{op}: row_weight", x.row_weight, torch.float32)
        require_shape(f"{op}: row_weight", x.row_weight, (rows,), "[rows]")
        require_contiguous(f"{op}: row_weight", x.row_weight)
    return check_out(op, x.out, (rows, features), "[rows, features]")


def _down(x: Operands, output: Output, target: Target) -> Call:
    experts, features, bytes_of_k = x.weights.shape
    k, rows = bytes_of_k * 2, max(x.tokens.shape[0], 1)
    if x.offsets is None:
        shape = plan.plan_gemm(features, k, rows, 1, x.token_tile, output, target.clusters, pin=target.pin)
        return _call(x, shape, x.weights, x.alpha.expand(features))
    sizes = features, k, rows, experts, False, x.token_tile
    shape = plan.plan_experts(*sizes, output, target.clusters, x.counts_ahead, pin=target.pin)
    return _call(x, shape, x.weights, x.alpha)


_ROWS = "Tensor tokens, Tensor token_scales, Tensor row_scale, int token_tile"
_EXPERTS = "Tensor? offsets, Tensor? counts"
_WEIGHTS = "Tensor weights, Tensor weight_scales, Tensor alpha"

Room(Operands, ARCHITECTURES, "NVFP4 activations").register(
    Operator(f"product({_ROWS}, {_WEIGHTS}, Tensor(a!) out)", _check_gemm, _gemm),
    Operator(f"grouped_product({_ROWS}, {_WEIGHTS}, Tensor(a!) out)", _check_grouped_gemm, _gemm),
    Operator(
        f"expert_gate_up({_ROWS}, {_EXPERTS}, {_WEIGHTS}, float limit, bool counts_ahead, Tensor(a!) out,"
        " Tensor(b!)? out_scales)",
        _check_gate_up,
        _gate_up,
    ),
    Operator(
        f"expert_down({_ROWS}, Tensor? row_weight, {_EXPERTS}, {_WEIGHTS}, bool counts_ahead, Tensor(a!) out)",
        _check_down,
        _down,
    ),
)
