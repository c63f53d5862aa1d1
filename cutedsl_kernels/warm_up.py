"""The warm-up before the first request: find the kernels that a model needs, and run each of them once.

A kernel is compiled (or read from a library) and loaded to the device at its first launch. Neither may happen while a
CUDA graph is captured or a request waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import torch

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.scale_layout import scale_bytes

from . import launcher
from .common.call import GemmCall
from .common.clusters import Clusters
from .common.shape import Output
from .compiled import KernelKey
from .plan import (
    Pin,
    expert_token_tile_for,
    plan_experts,
    plan_gated,
    plan_gemm,
    plan_w4a16,
    plan_w4a16_experts,
    rows_of,
    token_tile_for,
    w4a16_expert_token_tile_for,
    w4a16_gathers,
)
from .sm90.call import Call as HopperCall
from .sm90.layout import TILE_K as HOPPER_TILE_K
from .sm90.layout import TILE_ROWS
from .sm90.shape import KernelShape as HopperShape
from .sm100.call import Call
from .sm100.shape import BlockScaledKind, KernelShape
from .workspace import workspace


class SizedGemm(Protocol):
    """The sizes of one of a model's GEMMs.

    Attributes:
        features: features of the result; of gate and up each, if gated.
        k: K.
        groups: GEMMs of a block-diagonal one, or experts.
        gated: whether there are a gate and an up matrix of ``features`` each.
        experts_per_token: experts that each token visits; 0 if every token takes part in every group.
        output: what is written.
        kind: of operands: "nvfp4" everywhere, "mxfp8" on SM100, "fp8" on Hopper; "bf16" is a library's GEMM,
            and no kernel of these.
    """

    @property
    def features(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def output(self) -> Output: ...
    @property
    def kind(self) -> Literal["nvfp4", "mxfp8", "fp8", "bf16"]: ...


def keys_for(
    products: Iterable[SizedGemm],
    max_tokens: int,
    limit: float,
    architecture: str,
    clusters: Clusters,
    weighted: bool = False,
    programmatic_launch: bool = True,
    pin: Pin | None = None,
    copies: int = 0,
) -> list[KernelKey]:
    """The kernels that calls with 1 to ``max_tokens`` tokens use, each once.

    Experts' calls are those of a model: with ``counts_ahead``, but on Hopper of down GEMMs alone.

    Args:
        products: the GEMMs of the model.
        max_tokens: the most tokens of a pass.
        limit: the SwiGLU clamp.
        architecture: one of ``compiled.ARCHITECTURES``.
        clusters: how many clusters the GPU runs at a time.
        weighted: whether the experts' down GEMMs are called with row weights.
        programmatic_launch: as in :class:`.compiled.KernelKey`.
        pin: what all plans have in common, as the launcher has it.
        copies: tensors beside ``out`` that get the results of ``products``. All of these are then dense GEMMs of NVFP4
            weights on Hopper that write bf16.

    Raises:
        OperandValueError: there are copies of other GEMMs, or on another architecture.
    """
    if architecture == "sm_90a":
        return _w4a16_keys(products, max_tokens, limit, clusters, programmatic_launch, pin, copies)
    if copies:
        raise OperandValueError(f"copies: expected 0 for {architecture}, found {copies}")
    found: dict[KernelKey, None] = {}
    for product in products:
        if product.kind == "bf16" or product.kind == "fp8":
            continue
        for tokens in range(1, max_tokens + 1):
            shape = _shape(product, product.kind, tokens, clusters, pin)
            down = shape.grouped and not shape.gated
            key = KernelKey(architecture, shape, limit if shape.gated else None, weighted and down, programmatic_launch)
            found[key] = None
    return sorted(found, key=lambda key: key.name)


def _w4a16_keys(
    products: Iterable[SizedGemm],
    max_tokens: int,
    limit: float,
    clusters: Clusters,
    programmatic_launch: bool,
    pin: Pin | None,
    copies: int,
) -> list[KernelKey]:
    """:func:`keys_for` on Hopper, whose experts write bf16 unless fp32 is asked for."""
    found: dict[KernelKey, None] = {}
    for product in products:
        if product.kind == "bf16" or product.kind == "mxfp8":
            continue
        features, k, groups = product.features, product.k, product.groups
        is_plain = product.kind == "nvfp4" and product.output == "bf16" and groups == 1
        if copies and (not is_plain or product.gated or product.experts_per_token):
            raise OperandValueError(
                f"copies: expected 0 but for dense GEMMs of NVFP4 weights that write bf16, found {copies} for {product}"
            )
        for tokens in range(1, max_tokens + 1):
            if product.experts_per_token:
                pairs = tokens * product.experts_per_token
                tile = w4a16_expert_token_tile_for(pairs, groups, pin)
                rows = rows_of(pairs, groups, tile)
                output: Output = "fp32" if product.output == "fp32" else "bf16"
                gathers = product.gated and w4a16_gathers(tile)
                shape = plan_w4a16_experts(
                    features,
                    k,
                    rows,
                    groups,
                    product.gated,
                    tile,
                    output,
                    clusters,
                    gathers,
                    not product.gated,
                    pin=pin,
                )
            else:
                sizes = features, k, tokens, groups
                shape = plan_w4a16(*sizes, product.output, clusters, product.kind, copies=copies, pin=pin)
            key = KernelKey("sm_90a", shape, limit if product.gated else None, programmatic_launch=programmatic_launch)
            found[key] = None
    return sorted(found, key=lambda key: key.name)


def _shape(product: SizedGemm, kind: BlockScaledKind, tokens: int, clusters: Clusters, pin: Pin | None) -> KernelShape:
    """The kernel that the operations will plan for ``tokens`` tokens."""
    features, k, groups, output = product.features, product.k, product.groups, product.output
    if product.experts_per_token and groups > 1:
        pairs = tokens * product.experts_per_token
        tile = expert_token_tile_for(pairs, groups, pin)
        rows = rows_of(pairs, groups, tile)
        sizes = features, k, rows, groups, product.gated, tile
        return plan_experts(*sizes, output, clusters, counts_ahead=True, pin=pin)
    tile = token_tile_for(tokens, pin)
    if product.gated:
        return plan_gated(features, k, tokens, tile, output, clusters, kind, pin=pin)
    return plan_gemm(features, k, tokens, groups, tile, output, clusters, kind, pin=pin)


def warm_up(keys: Iterable[KernelKey], device: torch.device) -> None:
    """Ask how many clusters the device runs, run each kernel once on zeros, and wait for the last.

    The workspace that some of them need is made here (workspace.py).
    """
    runner = launcher.current()
    runner.clusters(device)
    for key in keys:
        runner.launch(key, smallest_call(key, device), 1)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def smallest_call(key: KernelKey, device: torch.device) -> GemmCall:
    """The smallest call of a kernel: one tile of one group, all zeros (valid NVFP4, MXFP8 and FP8)."""
    if isinstance(key.shape, HopperShape):
        return _smallest_w4a16_call(key.shape, device)
    shape = key.shape
    rows, features, k = shape.token_tile, shape.tile_features, shape.tile_k * shape.split_k
    outputs = shape.tile_outputs
    quantized = shape.output == "nvfp4"
    codes = k // shape.byte_elements

    def zeros(*sizes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(*sizes, dtype=dtype, device=device)

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "nvfp4": torch.uint8}
    return Call(
        shape=shape,
        weights=zeros(1, features, codes),
        weight_scales=zeros(scale_bytes(features, k, block=shape.block)),
        tokens=zeros(rows, codes),
        token_scales=zeros(scale_bytes(rows, k, shape.token_tile, shape.block)),
        out=zeros(rows, outputs // 2 if quantized else outputs, dtype=dtypes[shape.output]),
        row_scale=zeros(rows, dtype=torch.float32),
        alpha=zeros(2 if shape.gated else 1 if shape.grouped else features, dtype=torch.float32),
        out_scales=zeros(scale_bytes(rows, outputs, shape.token_tile)) if quantized else None,
        row_weight=zeros(rows, dtype=torch.float32) if key.weighted else None,
        offsets=zeros(1, dtype=torch.int32) if shape.grouped else None,
        counts=torch.full((1,), rows, dtype=torch.int32, device=device) if shape.grouped else None,
        workspace=workspace(device, launcher.current().clusters(device)) if shape.stream_k else None,
    )


def _smallest_w4a16_call(shape: HopperShape, device: torch.device) -> HopperCall:
    k, rows = HOPPER_TILE_K * shape.split_k, shape.token_tile
    outputs = TILE_ROWS // 2 if shape.gated else TILE_ROWS

    def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*sizes, dtype=dtype, device=device)

    of_alpha = (1, 2) if shape.gated else (1,) if shape.grouped else (1, TILE_ROWS)
    return HopperCall(
        shape=shape,
        weights=zeros(1, 1, shape.split_k, shape.tile_bytes, dtype=torch.uint8),
        tokens=zeros(rows, k, dtype=torch.bfloat16),
        out=zeros(rows, outputs, dtype=torch.bfloat16 if shape.output == "bf16" else torch.float32),
        alpha=zeros(*of_alpha),
        offsets=zeros(1, dtype=torch.int32) if shape.grouped else None,
        counts=torch.full((1,), rows, dtype=torch.int32, device=device) if shape.grouped else None,
        sources=zeros(rows, dtype=torch.int32) if shape.gathers else None,
        copies=[zeros(rows, outputs, dtype=torch.bfloat16) for _ in range(shape.copies)],
    )
