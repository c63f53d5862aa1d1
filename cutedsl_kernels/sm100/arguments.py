"""The numbers that a call hands to a compiled kernel."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .call import Call
from .shape import SCALE_ATOM_BYTES


class Arguments(NamedTuple):
    """What a compiled kernel takes, in the order of ``Entry.__call__`` (entry.py), without the stream.

    Addresses of what a kernel does not have are 0. Strides are in elements, those of block scales in bytes.
    """

    weights: int
    weight_scales: int
    tokens: int
    token_scales: int
    out: int
    out_scales: int
    row_scale: int
    row_weight: int
    alpha: int
    offsets: int
    counts: int
    features: int
    k: int
    rows: int
    groups: int
    clusters: int
    token_row: int
    token_group: int
    token_scale_row: int
    token_scale_group: int
    out_row: int
    out_group: int
    row_scale_row: int
    row_scale_group: int
    alpha_feature: int
    alpha_group: int
    out_scale_row: int


def arguments_of(call: Call, clusters: int) -> Arguments:
    """The launch of ``call`` on ``clusters`` persistent clusters."""
    tokens, out, row_scale = call.tokens, call.out, call.row_scale
    grouped_tokens = tokens.dim() == 3
    matrix_atoms = -(-call.k // 64)
    alpha_feature, alpha_group = _alpha_strides(call)
    return Arguments(
        weights=call.weights.data_ptr(),
        weight_scales=call.weight_scales.data_ptr(),
        tokens=tokens.data_ptr(),
        token_scales=call.token_scales.data_ptr(),
        out=out.data_ptr(),
        out_scales=_address(call.out_scales),
        row_scale=row_scale.data_ptr(),
        row_weight=_address(call.row_weight),
        alpha=call.alpha.data_ptr(),
        offsets=_address(call.offsets),
        counts=_address(call.counts),
        features=call.features,
        k=call.k,
        rows=call.rows,
        groups=call.groups,
        clusters=clusters,
        token_row=tokens.stride(0) * 2,
        token_group=tokens.stride(1) * 2 if grouped_tokens else 0,
        token_scale_row=matrix_atoms * (call.groups if grouped_tokens else 1) * SCALE_ATOM_BYTES,
        token_scale_group=matrix_atoms * SCALE_ATOM_BYTES,
        out_row=out.stride(0),
        out_group=out.stride(1) if out.dim() == 3 else 0,
        row_scale_row=0 if row_scale.numel() == 1 else row_scale.stride(0),
        row_scale_group=row_scale.stride(1) if row_scale.dim() == 2 else 0,
        alpha_feature=alpha_feature,
        alpha_group=alpha_group,
        out_scale_row=-(-call.outputs // 64) * SCALE_ATOM_BYTES,
    )


def _alpha_strides(call: Call) -> tuple[int, int]:
    """Of features (of gate and up, if gated) and of groups."""
    if call.shape.gated:
        return 1, 2
    if call.shape.grouped and call.alpha.numel() == call.groups:
        return 0, 1
    return call.alpha.stride(-1), call.features


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
