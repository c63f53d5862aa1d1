"""The installed FlashInfer's dense NVFP4 GEMM for SM100 (CuTeDSL), made callable in the emulator, and its reference.

Nobody here wrote that kernel: it runs on hardware, so it judges the emulator.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.sm100.emulator import Compiled, Options, Statistics, compile_for, emulated
from tests.support.numpy_nvfp4 import dequantize

ALPHA = 2.0**-12


@functools.cache
def compiled_gemm(tile: tuple[int, int], cluster: tuple[int, int], max_clusters: int = 1) -> Compiled:
    """The kernel for one tile and cluster shape, bf16 output, on at most ``max_clusters`` clusters."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_ptr
    from flashinfer.gemm.kernels.dense_blockscaled_gemm_sm100 import Sm100BlockScaledPersistentDenseGemmKernel

    kernel = Sm100BlockScaledPersistentDenseGemmKernel(16, tile, cluster, False, True)
    packed = cute.sym_int32(divisibility=16)
    operands = [
        make_fake_compact_tensor(dtype, (cute.sym_int32(), width), stride_order=(1, 0), assumed_align=16)
        for dtype, width in (
            (cutlass.Uint8, packed),
            (cutlass.Uint8, packed),
            (cutlass.BFloat16, cute.sym_int32(divisibility=8)),
        )
    ]
    scales = make_ptr(cutlass.Float8E4M3FN, 16, cute.AddressSpace.gmem, assumed_align=16)
    alpha = make_fake_compact_tensor(cutlass.Float32, (1,))
    return compile_for(
        "sm_100a", kernel.wrapper, *operands, 1, 1, 1, 1, scales, scales, alpha, max_clusters, make_fake_stream(), False
    )


@dataclass(frozen=True)
class Operand:
    """Random FP4 codes [rows, K/2] and block scales, plain [rows, K/16] and in the swizzled layout."""

    packed: np.ndarray
    scales: np.ndarray
    swizzled: np.ndarray

    @classmethod
    def random(cls, rows: int, k: int, seed: int) -> Operand:
        random = np.random.default_rng(seed)
        packed = random.integers(0, 256, (rows, k // 2), dtype=np.uint8)
        padded = random.integers(0, 127, (-(-rows // 128) * 128, -(-k // 64) * 4), dtype=np.uint8)
        tiles = padded.reshape(len(padded) // 128, 4, 32, -1, 4).transpose(0, 3, 2, 1, 4)
        return cls(packed, padded[:rows, : k // 16], np.ascontiguousarray(tiles))


def run_gemm(compiled: Compiled, shape: tuple[int, int, int], options: Options) -> tuple[bool, Statistics]:
    """Multiply random operands of (M, N, K); whether the output is right.

    Right: the fp64 reference rounded to bf16. The accumulator is rounded to fp32 after each 64 of K and once by
    alpha, so where the reference is that near to a rounding boundary, either neighbour will do.
    """
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack, make_ptr

    m, n, k = shape
    a, b = Operand.random(m, k, 1), Operand.random(n, k, 2)
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    alpha = torch.tensor([ALPHA])
    values = [torch.from_numpy(a.packed), torch.from_numpy(b.packed), out]
    tensors: list[Any] = [from_dlpack(value, assumed_align=16).mark_layout_dynamic(1) for value in values]
    pointers = [
        make_ptr(cutlass.Float8E4M3FN, operand.swizzled.ctypes.data, cute.AddressSpace.gmem, assumed_align=16)
        for operand in (a, b)
    ]
    blocks = -(-m // 128), -(-n // 128), -(-k // 64)
    reads = [*values[:2], a.swizzled, b.swizzled, alpha]
    with emulated(options, reads=reads, writes=[out]) as emulator:
        emulator(compiled, *tensors, *blocks, *pointers, from_dlpack(alpha), cuda.CUstream(0))
    left, right = dequantize(a.packed, a.scales), dequantize(b.packed, b.scales)
    expected = left @ right.T * ALPHA
    slack = (k // 64 + 2) * 2.0**-24 * (np.abs(left) @ np.abs(right).T * ALPHA)
    low, high = (torch.from_numpy(expected + sign * slack).to(torch.bfloat16) for sign in (-1, 1))
    exact = (low == high).double().mean()
    assert exact > 0.99, "operands leave too many outputs undecided"
    return bool(((low <= out) & (out <= high)).all()), emulator.statistics[0]
