"""The installed FlashInfer's second MoE GEMM for SM100 (CuTeDSL): grouped NVFP4 product, rows weighted and added up by
token. Made callable in the emulator, with its reference.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.sm100.emulator import Compiled, Options, Statistics, compile_for, emulated
from tests.sm100.support.flashinfer_gemm import Operand
from tests.sm100.support.routing import TOP_K, Routing, aligned
from tests.support.numpy_nvfp4 import dequantize

ALPHA = 2.0**-14
KINDS = (
    "Float4E2M1FN", "Float4E2M1FN", "Float8E4M3FN", "Float8E4M3FN", "BFloat16", "Float32",
    "Int32", "Int32", "Int32", "Int32", "Float32",
)  # fmt: skip
"""Element types of the pointers: a, b, their scales, output, alpha, tile maps, rows' tokens, count, tokens' weights."""


def _pointers(addresses: Sequence[int]) -> list[Any]:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_ptr

    return [
        make_ptr(getattr(cutlass, kind), address, cute.AddressSpace.gmem, assumed_align=32 if "4E2" in kind else 16)
        for kind, address in zip(KINDS, addresses, strict=True)
    ]


@functools.cache
def compiled_finalizing_moe(tile: tuple[int, int], cluster: tuple[int, int], max_clusters: int) -> Compiled:
    """The kernel for a tile and cluster shape."""
    from cutlass.cute.runtime import make_fake_stream
    from flashinfer.fused_moe.cute_dsl.blackwell.blockscaled_contiguous_grouped_gemm_finalize_fusion import (
        Sm100BlockScaledContiguousGroupedGemmFinalizeFusionKernel,
    )

    kernel = Sm100BlockScaledContiguousGroupedGemmFinalizeFusionKernel(16, tile, cluster)
    pointers = _pointers([32] * len(KINDS))
    sizes = [1] * 6
    return compile_for(
        "sm_100a", kernel.wrapper, *pointers, None, *sizes, tile[0], 16, max_clusters, make_fake_stream()
    )


def run_finalizing_moe(
    tile: tuple[int, int],
    cluster: tuple[int, int],
    rows_of_experts: Sequence[int],
    width: int,
    k: int,
    options: Options,
    max_clusters: int = 1,
) -> tuple[bool, Statistics]:
    """Experts with that many tokens, ``width`` outputs each; whether each token's sum is right.

    Right: the fp64 sum, up to a rounding to bf16 of each term and each partial sum.
    """
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]

    routing = Routing.random(rows_of_experts, tile[0])
    experts, total = len(rows_of_experts), len(routing.expanded)
    a = Operand.random(total, k, 1)
    weights = [Operand.random(width, k, 10 + expert) for expert in range(experts)]
    packed, swizzled = (np.stack([getattr(w, name) for w in weights]) for name in ("packed", "swizzled"))
    token_weights = np.random.default_rng(6).random((routing.tokens, TOP_K), dtype=np.float32)
    output = np.zeros((routing.tokens, width), np.uint16)
    arguments: list[np.ndarray] = [
        a.packed, packed, a.swizzled, swizzled, output, np.full(experts, ALPHA, np.float32), routing.tile_expert,
        routing.tile_limit, routing.expanded, routing.tile_count, token_weights,
    ]  # fmt: skip
    buffers = [aligned(argument) for argument in arguments]
    compiled = compiled_finalizing_moe(tile, cluster, max_clusters)
    reads = [buffer for index, buffer in enumerate(buffers) if index != 4]
    with emulated(options, reads=reads, writes=[buffers[4]]) as emulator:
        pointers = _pointers([buffer.ctypes.data for buffer in buffers])
        sizes = total, width, k, experts, routing.tokens, TOP_K
        emulator(compiled, *pointers, None, *sizes, stream=cuda.CUstream(0))

    expected, slack = np.zeros((routing.tokens, width)), np.zeros((routing.tokens, width))
    rows = dequantize(a.packed, a.scales)
    for expert in range(experts):
        used = routing.rows(expert)
        tokens, places = np.divmod(routing.expanded[used], TOP_K)
        weight = dequantize(weights[expert].packed, weights[expert].scales)
        product = rows[used] @ weight.T
        terms = product * ALPHA * token_weights[tokens, places][:, None]
        np.add.at(expected, tokens, terms)
        np.add.at(slack, tokens, np.abs(terms))
    found = torch.from_numpy(buffers[4].view(np.int16)).view(torch.bfloat16).double().numpy()
    return bool((np.abs(found - expected) <= slack * 2.0**-7 + 1e-6).all()), emulator.statistics[0]
