"""The operators of the MXFP8 GEMMs (:mod:`..operators`). Callers use :mod:`.operations`."""

from __future__ import annotations

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
from nvfp4_sgl.formats.mxfp8 import BLOCK
from nvfp4_sgl.formats.nvfp4 import swiglu_row_scale
from nvfp4_sgl.formats.scale_layout import scale_bytes
from nvfp4_sgl.limits import MXFP8_K_MULTIPLE

from .. import operators, plan
from ..common.shape import TOKEN_TILES, Output
from ..launcher import Target
from ..operators import Operator, Room, check_alpha, check_out
from ..sm100.call import Call
from ..sm100.shape import GATE_ROWS, KernelShape
from ..w4a4.custom_ops import ARCHITECTURES

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Operands(operators.Operands):
    """Arguments of these operators: MXFP8 rows, and weights as :class:`.operand.MxFp8Weights` has them."""

    token_scales: Tensor
    token_tile: int
    weight_scales: Tensor
    ones: Tensor


def _check_operands(op: str, x: Operands) -> None:
    """Check activations [T, K] or [T, G, K] and weights [G, F, K]."""
    tokens, token_scales, weights, weight_scales = x.tokens, x.token_scales, x.weights, x.weight_scales
    require_dtype(f"{op}: tokens", tokens, E4M3)
    require_dtype(f"{op}: token_scales", token_scales, torch.uint8)
    require_one_of(f"{op}: token_tile", x.token_tile, TOKEN_TILES)
    rows, k, groups = tokens.shape[0], tokens.shape[-1], tokens.shape[1] if tokens.dim() == 3 else 1
    require_multiple(f"{op}: tokens", "K", k, MXFP8_K_MULTIPLE, "whole blocks")
    require_rows(f"{op}: tokens", tokens, ALIGNMENT)
    require_extent(f"{op}: tokens", "rows", rows)
    require_contiguous(f"{op}: token_scales", token_scales)
    expected = scale_bytes(rows, k, x.token_tile, BLOCK, groups)
    if token_scales.numel() != expected:
        raise OperandValueError(
            f"{op}: token_scales: expected {expected} bytes for {rows} rows of {groups} by {k} in token tiles of"
            f" {x.token_tile}, found {token_scales.numel()}; ask token_tile_for before quantising"
        )
    require_dtype(f"{op}: weights", weights, E4M3)
    require_dimensions(f"{op}: weights", weights, 3, "[groups, features, K]")
    features = weights.shape[1]
    require_shape(f"{op}: weights", weights, (groups, features, k), "[groups, features, K], groups and K of tokens")
    require_contiguous(f"{op}: weights", weights)
    if not groups or not features:
        raise OperandValueError(f"{op}: weights: expected at least one feature, found shape {tuple(weights.shape)}")
    require_extent(f"{op}: weights", "features", features)
    require_dtype(f"{op}: weight_scales", weight_scales, torch.uint8)
    require_contiguous(f"{op}: weight_scales", weight_scales)
    expected = groups * scale_bytes(features, k, block=BLOCK)
    if weight_scales.numel() != expected:
        raise OperandValueError(
            f"{op}: weight_scales: expected {expected} bytes for {groups} swizzled matrices of {features} by {k},"
            f" found {weight_scales.numel()}"
        )
    check_alpha(op, x.ones, (2,), "[2]")


def _call(x: Operands, shape: KernelShape, alpha: Tensor) -> Call:
    return Call(
        shape=shape,
        weights=x.weights,
        weight_scales=x.weight_scales,
        tokens=x.tokens,
        token_scales=x.token_scales,
        out=x.out,
        row_scale=x.ones[:1],
        alpha=alpha,
    )


def _check_gemm(op: str, x: Operands) -> Output:
    if x.tokens.dim() not in (2, 3):
        found = tuple(x.tokens.shape)
        raise OperandValueError(f"{op}: tokens: expected shape [rows, K] or [rows, groups, K], found {found}")
    _check_operands(op, x)
    shape = (*x.tokens.shape[:-1], x.weights.shape[1])
    return check_out(op, x.out, shape, "[rows, features] or [rows, groups, features]")


def _gemm(x: Operands, output: Output, target: Target) -> Call:
    (groups, features, k), rows = x.weights.shape, max(x.tokens.shape[0], 1)
    shape = plan.plan_gemm(features, k, rows, groups, x.token_tile, output, target.clusters, "mxfp8", pin=target.pin)
    return _call(x, shape, x.ones[:1].expand(groups, features))


def _check_gate_up(op: str, x: Operands) -> Output:
    require_dimensions(f"{op}: tokens", x.tokens, 2, "[rows, K]")
    assert x.limit is not None
    swiglu_row_scale(x.limit)
    _check_operands(op, x)
    require_multiple(f"{op}: weights", "rows", x.weights.shape[1], 2 * GATE_ROWS, "16 gates, 16 ups, …")
    return check_out(op, x.out, (x.tokens.shape[0], x.weights.shape[1] // 2), "[rows, features]")


def _gate_up(x: Operands, output: Output, target: Target) -> Call:
    (_, rows_of_weights, k), rows = x.weights.shape, max(x.tokens.shape[0], 1)
    shape = plan.plan_gated(
        rows_of_weights // 2, k, rows, x.token_tile, output, target.clusters, "mxfp8", pin=target.pin
    )
    return _call(x, shape, x.ones.unsqueeze(0))


_OPERANDS = "Tensor tokens, Tensor token_scales, int token_tile, Tensor weights, Tensor weight_scales, Tensor ones"

Room(Operands, ARCHITECTURES, "MXFP8 activations").register(
    Operator(f"mxfp8_product({_OPERANDS}, Tensor(a!) out)", _check_gemm, _gemm),
    Operator(f"mxfp8_gate_up({_OPERANDS}, float limit, Tensor(a!) out)", _check_gate_up, _gate_up),
)
