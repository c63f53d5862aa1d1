"""The MXFP8 GEMMs as PyTorch custom operators, ``torch.ops.nvfp4_sgl``: plain tensors in, results into given tensors.

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
from nvfp4_sgl.formats.mxfp8 import BLOCK
from nvfp4_sgl.formats.scale_layout import scale_bytes

from .. import launcher, plan
from ..common.shape import TOKEN_TILES, Output
from ..compiled import swiglu_row_scale
from ..sm100.call import Call
from ..sm100.shape import GATE_ROWS
from ..w4a4.custom_ops import ARCHITECTURES, check_alpha, check_out, launch, register
from .operand import K_MULTIPLE

WHAT = "MXFP8 activations"
"""What an error on another architecture says these operators take."""
E4M3 = torch.float8_e4m3fn


def _check_operands(
    op: str, tokens: Tensor, token_scales: Tensor, token_tile: int, weights: Tensor, weight_scales: Tensor, ones: Tensor
) -> None:
    """Check activations [T, K] or [T, G, K] and weights [G, F, K]."""
    require_dtype(f"{op}: tokens", tokens, E4M3)
    require_dtype(f"{op}: token_scales", token_scales, torch.uint8)
    require_one_of(f"{op}: token_tile", token_tile, TOKEN_TILES)
    rows, k, groups = tokens.shape[0], tokens.shape[-1], tokens.shape[1] if tokens.dim() == 3 else 1
    require_multiple(f"{op}: tokens", "K", k, K_MULTIPLE, "whole blocks")
    require_rows(f"{op}: tokens", tokens, ALIGNMENT)
    require_extent(f"{op}: tokens", "rows", rows)
    require_contiguous(f"{op}: token_scales", token_scales)
    expected = scale_bytes(rows, k, token_tile, BLOCK, groups)
    if token_scales.numel() != expected:
        raise OperandValueError(
            f"{op}: token_scales: expected {expected} bytes for {rows} rows of {groups} by {k} in token tiles of"
            f" {token_tile}, found {token_scales.numel()}; ask token_tile_for before quantising"
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
    check_alpha(op, ones, (2,), "[2]")


def _check_product(
    tokens: Tensor,
    token_scales: Tensor,
    token_tile: int,
    weights: Tensor,
    weight_scales: Tensor,
    ones: Tensor,
    out: Tensor,
) -> Output:
    op = "mxfp8_product"
    require_same_device(
        "out", out, tokens=tokens, token_scales=token_scales, weights=weights, weight_scales=weight_scales, ones=ones
    )
    if tokens.dim() not in (2, 3):
        found = tuple(tokens.shape)
        raise OperandValueError(f"{op}: tokens: expected shape [rows, K] or [rows, groups, K], found {found}")
    _check_operands(op, tokens, token_scales, token_tile, weights, weight_scales, ones)
    shape = (*tokens.shape[:-1], weights.shape[1])
    return check_out(op, out, shape, "[rows, features] or [rows, groups, features]")


def _product(
    tokens: Tensor,
    token_scales: Tensor,
    token_tile: int,
    weights: Tensor,
    weight_scales: Tensor,
    ones: Tensor,
    out: Tensor,
) -> None:
    output = _check_product(tokens, token_scales, token_tile, weights, weight_scales, ones, out)
    architecture, clusters = launcher.target(out.device, ARCHITECTURES, WHAT)
    (groups, features, k), rows = weights.shape, max(tokens.shape[0], 1)
    shape = plan.plan_product(features, k, rows, groups, token_tile, output, clusters, "mxfp8")
    call = Call(
        shape=shape,
        weights=weights,
        weight_scales=weight_scales,
        tokens=tokens,
        token_scales=token_scales,
        out=out,
        row_scale=ones[:1],
        alpha=ones[:1].expand(groups, features),
    )
    launch("mxfp8_product", architecture, call)


def _check_gate_up(
    tokens: Tensor,
    token_scales: Tensor,
    token_tile: int,
    weights: Tensor,
    weight_scales: Tensor,
    ones: Tensor,
    limit: float,
    out: Tensor,
) -> Output:
    op = "mxfp8_gate_up"
    require_same_device(
        "out", out, tokens=tokens, token_scales=token_scales, weights=weights, weight_scales=weight_scales, ones=ones
    )
    require_dimensions(f"{op}: tokens", tokens, 2, "[rows, K]")
    swiglu_row_scale(limit)
    _check_operands(op, tokens, token_scales, token_tile, weights, weight_scales, ones)
    require_multiple(f"{op}: weights", "rows", weights.shape[1], 2 * GATE_ROWS, "16 gates, 16 ups, …")
    return check_out(op, out, (tokens.shape[0], weights.shape[1] // 2), "[rows, features]")


def _gate_up(
    tokens: Tensor,
    token_scales: Tensor,
    token_tile: int,
    weights: Tensor,
    weight_scales: Tensor,
    ones: Tensor,
    limit: float,
    out: Tensor,
) -> None:
    output = _check_gate_up(tokens, token_scales, token_tile, weights, weight_scales, ones, limit, out)
    architecture, clusters = launcher.target(out.device, ARCHITECTURES, WHAT)
    _, rows_of_weights, k = weights.shape
    rows = max(tokens.shape[0], 1)
    shape = plan.plan_gated(rows_of_weights // 2, k, rows, token_tile, output, clusters, "mxfp8")
    call = Call(
        shape=shape,
        weights=weights,
        weight_scales=weight_scales,
        tokens=tokens,
        token_scales=token_scales,
        out=out,
        row_scale=ones[:1],
        alpha=ones.unsqueeze(0),
    )
    launch("mxfp8_gate_up", architecture, call, limit)


_OPERANDS = "Tensor tokens, Tensor token_scales, int token_tile, Tensor weights, Tensor weight_scales, Tensor ones"
register(f"mxfp8_product({_OPERANDS}, Tensor(a!) out)", _product, _check_product)
register(f"mxfp8_gate_up({_OPERANDS}, float limit, Tensor(a!) out)", _gate_up, _check_gate_up)
