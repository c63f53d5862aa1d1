"""The one place that decides which implementation of an op runs on which target.

A target maps every op to ``module:function``, and has a decoder that composes them: on the CPU op by op
(:mod:`nvfp4_sgl.model`, which receives an :class:`Ops`), on a GPU at the boundaries of the fused kernels
(:mod:`nvfp4_sgl.gpu`). Neither contains a branch over targets. A target that lacks an implementation is refused as a
whole: no op falls back to another target's.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from nvfp4_sgl.errors import UnsupportedError


class Target(enum.Enum):
    """What the kernels are built for."""

    CPU = "cpu"
    SM90 = "sm_90a"
    SM100 = "sm_100a"


Op = Callable[..., Any]


@dataclass(frozen=True)
class Ops:
    """The implementations in use; each field's contract is the docstring of its CPU reference."""

    rms_norm: Op
    rms_norm_rope: Op
    apply_rope: Op
    expand_streams: Op
    hyper_connection_pre: Op
    hyper_connection_post: Op
    hyper_connection_head: Op
    linear: Op
    grouped_linear: Op
    route_topk: Op
    route_hash: Op
    routed_experts: Op
    expert_mlp: Op
    compress_windows: Op
    indexer_query: Op
    write_index_keys: Op
    select_entries: Op
    sparse_attention: Op


_REFERENCES = {
    "rms_norm": "norm",
    "rms_norm_rope": "rope",
    "apply_rope": "rope",
    "expand_streams": "hyper_connection",
    "hyper_connection_pre": "hyper_connection",
    "hyper_connection_post": "hyper_connection",
    "hyper_connection_head": "hyper_connection",
    "linear": "linear",
    "grouped_linear": "linear",
    "route_topk": "moe",
    "route_hash": "moe",
    "routed_experts": "moe",
    "expert_mlp": "moe",
    "compress_windows": "compressor",
    "indexer_query": "indexer",
    "write_index_keys": "indexer",
    "select_entries": "indexer",
    "sparse_attention": "attention",
}

_KERNELS = {
    "rms_norm": "attention_inputs.prepare:prepare_attention",
    "rms_norm_rope": "attention.sparse_attention:sparse_attention",
    "apply_rope": "attention.sparse_attention:sparse_attention",
    "expand_streams": "hyper_connection.streams:embed_streams",
    "hyper_connection_pre": "hyper_connection.site:hyper_connection_next",
    "hyper_connection_post": "hyper_connection.site:hyper_connection_next",
    "hyper_connection_head": "hyper_connection.site:hyper_connection_next",
    "route_topk": "experts.routing:route_topk",
    "route_hash": "experts.routing:route_hash",
    "compress_windows": "attention_inputs.prepare:prepare_attention",
    "indexer_query": "indexer.scores:index_scores",
    "write_index_keys": "attention_inputs.prepare:prepare_attention",
    "select_entries": "indexer.topk:select_entries",
    "sparse_attention": "attention.sparse_attention:sparse_attention",
}
"""Ops that are Triton kernels on every GPU; one named twice does both in one launch."""

_BF16_PRODUCTS = {
    "linear": "MergedProjection",
    "grouped_linear": "GroupedProjection",
    "routed_experts": "ExpertProjection",
    "expert_mlp": "ExpertProjection",
}

_TABLE: dict[Target, dict[str, str]] = {
    Target.CPU: {op: f"nvfp4_sgl.ops.{module}:{op}" for op, module in _REFERENCES.items()},
    Target.SM90: {
        **{op: f"nvfp4_sgl.triton_kernels.{where}" for op, where in _KERNELS.items()},
        **{op: f"nvfp4_sgl.gpu.products:{where}" for op, where in _BF16_PRODUCTS.items()},
    },
}

STAND_INS: dict[Target, str] = {
    Target.SM90: "matrix products are bf16 matmuls on weights dequantised at load: 4 times the memory of NVFP4"
}
"""What a target does in another way than it should, for ``doctor`` and the log."""


ACTIVATION_MODES: dict[Target, tuple[str, ...]] = {
    Target.CPU: ("w4a16", "w4a4"),
    Target.SM90: ("w4a16",),
    Target.SM100: (),
}
"""What may enter products with NVFP4 weights, by target (:class:`nvfp4_sgl.ops.linear.ActivationMode`)."""


def op_names() -> list[str]:
    """Every op of the model."""
    return [field.name for field in fields(Ops)]


def implementations(target: Target) -> dict[str, str | None]:
    """Which implementation of each op runs on ``target`` (``module:function``), ``None`` where there is none."""
    return {name: _TABLE.get(target, {}).get(name) for name in op_names()}


def detect_target() -> Target:
    """The target of this machine: the CUDA device's architecture if there is one, else the CPU."""
    if not torch.cuda.is_available():
        return Target.CPU
    capability = torch.cuda.get_device_capability()
    by_major = {9: Target.SM90, 10: Target.SM100}
    if capability[0] not in by_major:
        raise UnsupportedError(
            f"CUDA device {torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]};"
            " expected 9.0 (Hopper) or 10.x (Blackwell data centre), or no CUDA device for the CPU path"
        )
    return by_major[capability[0]]


def require_complete(target: Target) -> None:
    """:class:`UnsupportedError` if ``target`` lacks an implementation of any op."""
    missing = [name for name, where in implementations(target).items() if where is None]
    if missing:
        raise UnsupportedError(
            f"target {target.value}: no implementation of {', '.join(missing)}; today the CPU and sm_90a are complete"
            " (run where no CUDA device is visible, for example with CUDA_VISIBLE_DEVICES='')"
        )


def load_implementations(target: Target) -> dict[str, Any]:
    """Import what :func:`implementations` names; :class:`UnsupportedError` if any op has none."""
    require_complete(target)
    loaded = {}
    for name, where in implementations(target).items():
        assert where is not None
        module, function = where.split(":")
        loaded[name] = getattr(importlib.import_module(module), function)
    return loaded


def reference_ops() -> Ops:
    """The CPU's implementations, which are every op's reference."""
    return Ops(**load_implementations(Target.CPU))
