"""The installed FlashInfer's fused MoE GEMM for SM100 (CuTeDSL): gather of tokens, grouped NVFP4 product, SwiGLU,
quantisation to NVFP4. Made callable in the emulator, with its reference.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.sm100.emulator import Compiled, Options, Statistics, compile_for, emulated
from tests.sm100.support.flashinfer_gemm import Operand
from tests.sm100.support.routing import TOP_K, Routing, aligned
from tests.support.numpy_nvfp4 import E2M1, E4M3, dequantize

GRANULE = 64
"""Rows of the weights alternate between this many of the linear part and as many of the gate."""
ALPHA = 2.0**-19
GLOBAL_SCALE = 4.0
ROUNDING = 2e-5
"""Relative error allowed for fp32 arithmetic, before rounding to a narrow format."""

KINDS = (
    "Float4E2M1FN", "Float4E2M1FN", "Float8E4M3FN", "Float8E4M3FN", "Float4E2M1FN", "Float8E4M3FN", "Float32",
    "Int32", "Int32", "Int32", "Int32", "Float32",
)  # fmt: skip
"""Element types of the pointers: a, b, their scales, output, its scales, alpha, tile maps, tokens, count, scale."""


def _pointers(addresses: Sequence[int]) -> list[Any]:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_ptr

    return [
        make_ptr(getattr(cutlass, kind), address, cute.AddressSpace.gmem, assumed_align=32 if "4E2" in kind else 16)
        for kind, address in zip(KINDS, addresses, strict=True)
    ]


@functools.cache
def compiled_fused_moe(tile: tuple[int, int], cluster: tuple[int, int], max_clusters: int) -> Compiled:
    """The kernel for a tile and cluster shape."""
    from cutlass.cute.runtime import make_fake_stream
    from flashinfer.fused_moe.cute_dsl.blackwell.blockscaled_contiguous_gather_grouped_gemm_act_fusion import (
        BlockScaledContiguousGatherGroupedGemmKernel,
    )

    kernel = BlockScaledContiguousGatherGroupedGemmKernel(16, tile, cluster, True, TOP_K)
    pointers = _pointers([32] * len(KINDS))
    return compile_for(
        "sm_100a", kernel.wrapper, *pointers, None, 1, 1, 1, 1, 1, tile[0], 16, max_clusters, make_fake_stream()
    )


def run_fused_moe(
    tile: tuple[int, int],
    cluster: tuple[int, int],
    rows_of_experts: Sequence[int],
    width: int,
    k: int,
    options: Options,
    max_clusters: int = 1,
) -> tuple[bool, Statistics]:
    """Experts with that many tokens, ``width`` outputs each; whether all codes and scales are right.

    Right: a nearest value of the format, up to ``ROUNDING``.
    """
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]

    routing = Routing.random(rows_of_experts, tile[0])
    experts, total = len(rows_of_experts), len(routing.expanded)
    a = Operand.random(routing.tokens, k, 1)
    a_scales = np.ascontiguousarray(a.scales)
    weights = [Operand.random(2 * width, k, 10 + expert) for expert in range(experts)]
    packed, swizzled = (np.stack([getattr(w, name) for w in weights]) for name in ("packed", "swizzled"))
    codes: np.ndarray = np.zeros((total, width // 2), np.uint8)
    scales: np.ndarray = np.zeros((total // 128, width // 64, 32, 4, 4), np.uint8)
    alpha, global_scale = np.full(experts, ALPHA, np.float32), np.array([GLOBAL_SCALE], np.float32)
    arguments: list[np.ndarray] = [
        a.packed, packed, a_scales, swizzled, codes, scales, alpha, routing.tile_expert, routing.tile_limit,
        routing.expanded, routing.tile_count, global_scale,
    ]  # fmt: skip
    buffers = [aligned(argument) for argument in arguments]
    codes, scales = buffers[4], buffers[5]
    compiled = compiled_fused_moe(tile, cluster, max_clusters)
    reads = [buffer for index, buffer in enumerate(buffers) if index not in (4, 5)]
    with emulated(options, reads=reads, writes=[codes, scales]) as emulator:
        pointers = _pointers([buffer.ctypes.data for buffer in buffers])
        emulator(compiled, *pointers, None, routing.tokens, total, 2 * width, k, experts, stream=cuda.CUstream(0))

    plain = scales.transpose(0, 3, 2, 1, 4).reshape(total, width // 16)
    right = True
    values = dequantize(a.packed, a.scales)
    for expert, number in enumerate(rows_of_experts):
        used = routing.rows(expert)
        weight = dequantize(weights[expert].packed, weights[expert].scales)
        product = (values[routing.expanded[used] // TOP_K] @ weight.T * ALPHA).reshape(
            number, width // GRANULE, 2, GRANULE
        )
        linear, gate = product[:, :, 0].reshape(number, width), product[:, :, 1].reshape(number, width)
        right &= _is_quantised(linear * gate / (1 + np.exp(-gate)), codes[used], plain[used])
    return right, emulator.statistics[0]


def _is_nearest(found: np.ndarray, wanted: np.ndarray, table: np.ndarray) -> bool:
    """Whether each ``found`` is an entry of the table as near to ``wanted`` as any, up to rounding errors."""
    best = np.abs(np.minimum(wanted, table[-1])[..., None] - table).min(-1)
    return bool((np.abs(found - np.minimum(wanted, table[-1])) <= best + ROUNDING * np.abs(wanted)).all())


def _is_quantised(values: np.ndarray, packed: np.ndarray, scales: np.ndarray) -> bool:
    blocks = values.reshape(*scales.shape, 16)
    steps = E4M3[scales]
    if not _is_nearest(steps, np.abs(blocks).max(-1) / 6 * GLOBAL_SCALE, E4M3):
        return False
    found = np.stack((packed & 15, packed >> 4), -1).reshape(blocks.shape)
    # Codes of a block whose scale is zero mean nothing.
    meant = np.broadcast_to(steps[..., None] > 0, blocks.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = (blocks * GLOBAL_SCALE / steps[..., None])[meant]
    signs_agree = (((found[meant] & 8) != 0) == (scaled < 0)) | (np.abs(scaled) < 1e-6)
    return bool(signs_agree.all()) and _is_nearest(E2M1[found[meant] & 7], np.abs(scaled), E2M1)
