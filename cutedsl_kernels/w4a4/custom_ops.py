"""The NVFP4 GEMMs as PyTorch custom operators, ``torch.ops.nvfp4_sgl``: plain tensors in, results into given tensors.

Every call is checked from the tensors' metadata before anything is launched. The same checks run on fake tensors, so
that ``torch.compile`` reports a mistake while tracing. Nothing is allocated, copied or synchronised, so calls may be
captured in CUDA graphs (each kernel must have run once before: see :mod:`.warm_up`). Callers use :mod:`.operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandTypeError, OperandValueError
from nvfp4_sgl.formats.checks import (
    ALIGNMENT,
    require_aligned,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_extent,
    require_multiple,
    require_rows,
    require_same_device,
    require_shape,
)
from nvfp4_sgl.formats.scale_layout import scale_bytes

from .. import launcher, plan
from ..common.clusters import Clusters
from ..common.shape import MAX_EXPERTS, TOKEN_TILES, Output
from ..compiled import KernelKey, swiglu_row_scale
from ..sm100.call import Call
from ..sm100.shape import GATE_ROWS
from ..workspace import workspace
from .operand import K_MULTIPLE

OUTPUTS: dict[torch.dtype, Output] = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Kernel outputs by the dtype of ``out``."""
WHOLE_STORES_REASON = "stores write whole 16 bytes, beyond a row's end too"
"""Why features must be a multiple, for messages. Seen on an H200: a TMA store ends not at the tensor's last element,
but at the next multiple of 16 bytes."""
ARCHITECTURES = ("sm_100a", "sm_103a")
"""Architectures with block-scaled tensor cores."""
NVFP4_FEATURES_MULTIPLE = 2 * ALIGNMENT
"""Features of NVFP4 output must be a multiple of this: a row is whole 16 bytes."""


def _check_tokens(op: str, tokens: Tensor, token_scales: Tensor, row_scale: Tensor, token_tile: int) -> int:
    """Check activations [T, K/2] or [T, G, K/2]; returns K."""
    require_dtype(f"{op}: tokens", tokens, torch.uint8)
    require_dtype(f"{op}: token_scales", token_scales, torch.float8_e4m3fn)
    require_dtype(f"{op}: row_scale", row_scale, torch.float32)
    if token_tile not in TOKEN_TILES:
        raise OperandValueError(f"{op}: token_tile: expected one of {TOKEN_TILES}, found {token_tile}")
    rows, k = tokens.shape[0], tokens.shape[-1] * 2
    require_multiple(f"{op}: tokens", "K", k, K_MULTIPLE, "whole groups of four block scales")
    require_rows(f"{op}: tokens", tokens, ALIGNMENT)
    require_extent(f"{op}: tokens", "rows", rows)
    columns = k * (tokens.shape[1] if tokens.dim() == 3 else 1)
    require_contiguous(f"{op}: token_scales", token_scales)
    expected = scale_bytes(rows, columns, token_tile)
    if token_scales.numel() != expected:
        raise OperandValueError(
            f"{op}: token_scales: expected {expected} bytes for {rows} rows of {columns} in token tiles of"
            f" {token_tile}, found {token_scales.numel()}; ask token_tile_for before quantising"
        )
    if row_scale.numel() != 1:
        require_shape(f"{op}: row_scale", row_scale, tokens.shape[:-1], "[rows] or [rows, groups], or [1]")
    return k


def _check_weights(op: str, weights: Tensor, weight_scales: Tensor, k: int) -> None:
    """Check weights [..., features, K/2]."""
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


def check_alpha(op: str, alpha: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Check global scales, fp32 of ``shape``."""
    require_dtype(f"{op}: alpha", alpha, torch.float32)
    require_shape(f"{op}: alpha", alpha, shape, meaning)
    require_contiguous(f"{op}: alpha", alpha)


def check_out(op: str, out: Tensor, shape: tuple[int, ...], meaning: str) -> Output:
    """Check a bf16 or fp32 result of ``shape``; returns which it is."""
    require_dtype(f"{op}: out", out, *OUTPUTS)
    require_shape(f"{op}: out", out, shape, meaning)
    require_rows(f"{op}: out", out, ALIGNMENT)
    whole = ALIGNMENT // out.element_size()
    require_multiple(f"{op}: out", "features", shape[-1], whole, WHOLE_STORES_REASON)
    return OUTPUTS[out.dtype]


def _check_experts(op: str, offsets: Tensor | None, counts: Tensor | None, experts: int) -> None:
    """Check offsets and counts, int32 [experts]; without them there must be one expert."""
    if (offsets is None) != (counts is None):
        absent = "offsets" if offsets is None else "counts"
        raise OperandTypeError(f"{op}: {absent}: expected offsets and counts or neither, found None")
    if not 1 <= experts <= MAX_EXPERTS:
        raise OperandValueError(f"{op}: weights: expected 1 to {MAX_EXPERTS} experts, found {experts}")
    if offsets is None or counts is None:
        if experts != 1:
            raise OperandTypeError(f"{op}: offsets: expected a tensor, since there are {experts} experts, found None")
        return
    for name, tensor in (("offsets", offsets), ("counts", counts)):
        require_dtype(f"{op}: {name}", tensor, torch.int32)
        require_shape(f"{op}: {name}", tensor, (experts,), "[experts]")
        require_contiguous(f"{op}: {name}", tensor)


def _check_devices(op: str, out: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            require_same_device("out", out, **{f"{op}: {name}": tensor})


def launch(op: str, architecture: str, call: Call, limit: float | None = None) -> None:
    """Check addresses, which only real tensors have, and launch the call unless it has no rows."""
    through_tma = {
        "weights": call.weights,
        "weight_scales": call.weight_scales,
        "tokens": call.tokens,
        "token_scales": call.token_scales,
        "out": call.out,
        "out_scales": call.out_scales,
    }
    for name, tensor in through_tma.items():
        if tensor is not None:
            require_aligned(f"{op}: {name}", tensor)
    if call.rows == 0:
        return
    runner, device = launcher.current(), call.out.device
    clusters = runner.clusters(device)
    if call.shape.stream_k:
        call = replace(call, workspace=workspace(device, clusters))
    key = KernelKey(architecture, call.shape, limit, call.row_weight is not None, runner.programmatic_launch)
    runner.launch(key, call, call.clusters(clusters))


def _check_product(
    tokens: Tensor,
    token_scales: Tensor,
    row_scale: Tensor,
    token_tile: int,
    weights: Tensor,
    weight_scales: Tensor,
    alpha: Tensor,
    out: Tensor,
) -> Output:
    op = "product"
    _check_devices(
        op, out, tokens=tokens, token_scales=token_scales, row_scale=row_scale, weights=weights,
        weight_scales=weight_scales, alpha=alpha,
    )  # fmt: skip
    require_dimensions(f"{op}: tokens", tokens, 2, "[rows, K/2]")
    require_dimensions(f"{op}: weights", weights, 2, "[features, K/2]")
    k = _check_tokens(op, tokens, token_scales, row_scale, token_tile)
    _check_weights(op, weights, weight_scales, k)
    check_alpha(op, alpha, (weights.shape[0],), "[features]")
    return check_out(op, out, (tokens.shape[0], weights.shape[0]), "[rows, features]")


def _product(
    tokens: Tensor,
    token_scales: Tensor,
    row_scale: Tensor,
    token_tile: int,
    weights: Tensor,
    weight_scales: Tensor,
    alpha: Tensor,
    out: Tensor,
) -> None:
    output = _check_product(tokens, token_scales, row_scale, token_tile, weights, weight_scales, alpha, out)
    architecture, clusters = _target(out)
    rows, features = out.shape
    shape = plan.plan_product(features, tokens.shape[1] * 2, max(rows, 1), 1, token_tile, output, clusters)
    call = Call(
        shape=shape,
        weights=weights.unsqueeze(0),
        weight_scales=weight_scales,
        tokens=tokens,
        token_scales=token_scales,
        out=out,
        row_scale=row_scale,
        alpha=alpha,
    )
    launch("product", architecture, call)


def _check_grouped_product(
    tokens: Tensor,
    token_scales: Tensor,
    row_scale: Tensor,
    token_tile: int,
    weights: Tensor,
    weight_scales: Tensor,
    alpha: Tensor,
    out: Tensor,
) -> Output:
    op = "grouped_product"
    _check_devices(
        op, out, tokens=tokens, token_scales=token_scales, row_scale=row_scale, weights=weights,
        weight_scales=weight_scales, alpha=alpha,
    )  # fmt: skip
    require_dimensions(f"{op}: tokens", tokens, 3, "[rows, groups, K/2]")
    require_dimensions(f"{op}: weights", weights, 3, "[groups, features, K/2]")
    k = _check_tokens(op, tokens, token_scales, row_scale, token_tile)
    rows, groups, features = tokens.shape[0], tokens.shape[1], weights.shape[1]
    require_shape(f"{op}: weights", weights, (groups, features, k // 2), "[groups, features, K/2], groups of tokens")
    if groups == 0:
        raise OperandValueError(f"{op}: tokens: expected at least one group, found shape {tuple(tokens.shape)}")
    _check_weights(op, weights, weight_scales, k)
    check_alpha(op, alpha, (groups, features), "[groups, features]")
    return check_out(op, out, (rows, groups, features), "[rows, groups, features]")


def _grouped_product(
    tokens: Tensor,
    token_scales: Tensor,
    row_scale: Tensor,
    token_tile: int,
    weights: Tensor,
    weight_scales: Tensor,
    alpha: Tensor,
    out: Tensor,
) -> None:
    output = _check_grouped_product(tokens, token_scales, row_scale, token_tile, weights, weight_scales, alpha, out)
    architecture, clusters = _target(out)
    rows, groups, features = out.shape
    k = tokens.shape[2] * 2
    shape = plan.plan_product(features, k, max(rows, 1), groups, token_tile, output, clusters)
    call = Call(
        shape=shape,
        weights=weights,
        weight_scales=weight_scales,
        tokens=tokens,
        token_scales=token_scales,
        out=out,
        row_scale=row_scale,
        alpha=alpha,
    )
    launch("grouped_product", architecture, call)


def _check_expert_gate_up(
    tokens: Tensor,
    token_scales: Tensor,
    row_scale: Tensor,
    token_tile: int,
    offsets: Tensor | None,
    counts: Tensor | None,
    weights: Tensor,
    weight_scales: Tensor,
    alpha: Tensor,
    limit: float,
    out: Tensor,
    out_scales: Tensor | None,
) -> Output:
    op = "expert_gate_up"
    _check_devices(
        op, out, tokens=tokens, token_scales=token_scales, row_scale=row_scale, weights=weights,
        weight_scales=weight_scales, alpha=alpha,
        offsets=offsets, counts=counts, out_scales=out_scales,
    )  # fmt: skip
    require_dimensions(f"{op}: tokens", tokens, 2, "[rows, K/2]")
    require_dimensions(f"{op}: weights", weights, 3, "[experts, 2 * features, K/2]")
    swiglu_row_scale(limit)
    k = _check_tokens(op, tokens, token_scales, row_scale, token_tile)
    rows, experts, features = tokens.shape[0], weights.shape[0], weights.shape[1] // 2
    _check_experts(op, offsets, counts, experts)
    require_multiple(f"{op}: weights", "rows of an expert", weights.shape[1], 2 * GATE_ROWS, "16 gates, 16 ups, …")
    _check_weights(op, weights, weight_scales, k)
    check_alpha(op, alpha, (experts, 2), "[experts, gate and up]")
    if out_scales is None:
        return check_out(op, out, (rows, features), "[rows, features]")
    require_dtype(f"{op}: out (with out_scales: NVFP4 codes)", out, torch.uint8)
    require_multiple(f"{op}: weights", "features", features, NVFP4_FEATURES_MULTIPLE, WHOLE_STORES_REASON)
    require_shape(f"{op}: out", out, (rows, features // 2), "[rows, features/2]")
    require_rows(f"{op}: out", out, ALIGNMENT)
    require_dtype(f"{op}: out_scales", out_scales, torch.float8_e4m3fn)
    require_contiguous(f"{op}: out_scales", out_scales)
    expected = scale_bytes(rows, features, token_tile)
    if out_scales.numel() != expected:
        raise OperandValueError(
            f"{op}: out_scales: expected {expected} bytes for {rows} rows of {features} in token tiles of"
            f" {token_tile}, found {out_scales.numel()}"
        )
    return "nvfp4"


def _expert_gate_up(
    tokens: Tensor,
    token_scales: Tensor,
    row_scale: Tensor,
    token_tile: int,
    offsets: Tensor | None,
    counts: Tensor | None,
    weights: Tensor,
    weight_scales: Tensor,
    alpha: Tensor,
    limit: float,
    out: Tensor,
    out_scales: Tensor | None,
) -> None:
    output = _check_expert_gate_up(
        tokens, token_scales, row_scale, token_tile, offsets, counts, weights, weight_scales, alpha, limit, out,
        out_scales,
    )  # fmt: skip
    architecture, clusters = _target(out)
    experts, features = weights.shape[0], weights.shape[1] // 2
    k, rows = weights.shape[2] * 2, max(tokens.shape[0], 1)
    if offsets is None:
        shape = plan.plan_gated(features, k, rows, token_tile, output, clusters)
    else:
        shape = plan.plan_experts(features, k, rows, experts, True, token_tile, output, clusters)
    call = Call(
        shape=shape,
        weights=weights,
        weight_scales=weight_scales,
        tokens=tokens,
        token_scales=token_scales,
        out=out,
        row_scale=row_scale,
        alpha=alpha,
        out_scales=out_scales,
        offsets=offsets,
        counts=counts,
    )
    launch("expert_gate_up", architecture, call, limit)


def _check_expert_down(
    tokens: Tensor,
    token_scales: Tensor,
    row_scale: Tensor,
    token_tile: int,
    row_weight: Tensor | None,
    offsets: Tensor | None,
    counts: Tensor | None,
    weights: Tensor,
    weight_scales: Tensor,
    alpha: Tensor,
    out: Tensor,
) -> Output:
    op = "expert_down"
    _check_devices(
        op, out, tokens=tokens, token_scales=token_scales, row_scale=row_scale, weights=weights,
        weight_scales=weight_scales, alpha=alpha,
        row_weight=row_weight, offsets=offsets, counts=counts,
    )  # fmt: skip
    require_dimensions(f"{op}: tokens", tokens, 2, "[rows, K/2]")
    require_dimensions(f"{op}: weights", weights, 3, "[experts, features, K/2]")
    k = _check_tokens(op, tokens, token_scales, row_scale, token_tile)
    rows, experts, features = tokens.shape[0], weights.shape[0], weights.shape[1]
    _check_experts(op, offsets, counts, experts)
    _check_weights(op, weights, weight_scales, k)
    check_alpha(op, alpha, (experts,), "[experts]")
    if row_weight is not None:
        require_dtype(f"{op}: row_weight", row_weight, torch.float32)
        require_shape(f"{op}: row_weight", row_weight, (rows,), "[rows]")
        require_contiguous(f"{op}: row_weight", row_weight)
    return check_out(op, out, (rows, features), "[rows, features]")


def _expert_down(
    tokens: Tensor,
    token_scales: Tensor,
    row_scale: Tensor,
    token_tile: int,
    row_weight: Tensor | None,
    offsets: Tensor | None,
    counts: Tensor | None,
    weights: Tensor,
    weight_scales: Tensor,
    alpha: Tensor,
    out: Tensor,
) -> None:
    output = _check_expert_down(
        tokens, token_scales, row_scale, token_tile, row_weight, offsets, counts, weights, weight_scales, alpha, out
    )
    architecture, clusters = _target(out)
    experts, features, bytes_of_k = weights.shape
    k, rows = bytes_of_k * 2, max(tokens.shape[0], 1)
    if offsets is None:
        shape = plan.plan_product(features, k, rows, 1, token_tile, output, clusters)
        alpha = alpha.expand(features)
    else:
        shape = plan.plan_experts(features, k, rows, experts, False, token_tile, output, clusters)
    call = Call(
        shape=shape,
        weights=weights,
        weight_scales=weight_scales,
        tokens=tokens,
        token_scales=token_scales,
        out=out,
        row_scale=row_scale,
        alpha=alpha,
        row_weight=row_weight,
        offsets=offsets,
        counts=counts,
    )
    launch("expert_down", architecture, call)


def _target(out: Tensor) -> tuple[str, Clusters]:
    """The architecture of a tensor's device, and how many clusters it runs at a time."""
    return launcher.target(out.device, ARCHITECTURES, "NVFP4 activations")


_LIBRARY = torch.library.Library("nvfp4_sgl", "FRAGMENT")
_ROWS = "Tensor tokens, Tensor token_scales, Tensor row_scale, int token_tile"
_EXPERTS = "Tensor? offsets, Tensor? counts"
_WEIGHTS = "Tensor weights, Tensor weight_scales, Tensor alpha"


def register(schema: str, run: Callable[..., None], check: Callable[..., object]) -> None:
    """Register an operator for every device, so that a wrong device gets our error; ``check`` runs on fake tensors."""

    def trace(*arguments: object) -> None:
        check(*arguments)

    name = schema.partition("(")[0]
    _LIBRARY.define(f"{schema} -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nvfp4_sgl::{name}", trace, lib=_LIBRARY)


register(f"product({_ROWS}, {_WEIGHTS}, Tensor(a!) out)", _product, _check_product)
register(f"grouped_product({_ROWS}, {_WEIGHTS}, Tensor(a!) out)", _grouped_product, _check_grouped_product)
register(
    f"expert_gate_up({_ROWS}, {_EXPERTS}, {_WEIGHTS}, float limit, Tensor(a!) out, Tensor(b!)? out_scales)",
    _expert_gate_up,
    _check_expert_gate_up,
)
register(
    f"expert_down({_ROWS}, Tensor? row_weight, {_EXPERTS}, {_WEIGHTS}, Tensor(a!) out)",
    _expert_down,
    _check_expert_down,
)
