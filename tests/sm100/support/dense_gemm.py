"""NVIDIA's persistent GEMMs without scales for SM100 and Hopper (CuTeDSL), as FlashInfer installs them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.sm100.emulator import Compiled, Options, Statistics, compile_for, emulated
from tests.sm100.support.cutlass_examples import example

TYPES = {
    "BFloat16": torch.bfloat16,
    "Float16": torch.float16,
    "Float32": torch.float32,
    "Float8E4M3FN": torch.float8_e4m3fn,
    "Float8E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class DenseGemm:
    """A kernel on one cluster (a kernel that schedules itself takes as many as there are tiles).

    Attributes:
        dtype, output: element types by CuTeDSL's names.
        tile, cluster: M and N; a tile of M = 256, and of M = 128 for a cluster of an even M, is a pair's.
        majors: the contiguous dimension of a, b and c, such as "mnn" or "kkm".
        tma_store: whether the epilogue stores by TMA.
        source: the example; all have one interface.
        hopper: whether it is the one for Hopper, which stores by TMA.
    """

    dtype: str
    output: str
    tile: tuple[int, int]
    cluster: tuple[int, int]
    majors: str = "kkn"
    tma_store: bool = True
    source: str = "dense_gemm_persistent"
    hopper: bool = False

    def compiled(self) -> Compiled:
        return _compiled(self)

    def run(self, shape: tuple[int, int, int], options: Options) -> tuple[bool, Statistics]:
        """Multiply small random integers of (M, N, K), whose sums are exact; whether the output is equal."""
        import cuda.bindings.driver as cuda  # type: ignore[import-untyped]

        m, n, k = shape
        random = torch.Generator().manual_seed(1)
        matrices = []
        for extents, major, names in zip(((m, k), (n, k), (m, n)), self.majors, ("mk", "nk", "mn"), strict=True):
            dtype = TYPES[self.dtype if "k" in names else self.output]
            values = torch.randint(-2, 3, extents, generator=random).to(dtype)
            contiguous = values.T.contiguous().T if major == names[0] else values.contiguous()
            matrices.append(contiguous[..., None])
        a, b, c = matrices
        c.fill_(float("nan"))
        with emulated(options, reads=[a, b], writes=[c]) as emulator:
            tensors = [
                _tensor(matrix, kind, 0 if major == names[0] else 1)
                for matrix, kind, major, names in zip(
                    matrices, (self.dtype, self.dtype, self.output), self.majors, ("mk", "nk", "mn"), strict=True
                )
            ]
            emulator(self.compiled(), *tensors, cuda.CUstream(0))
        expected = a[..., 0].double() @ b[..., 0].double().T
        return torch.equal(c[..., 0].double(), expected.to(c.dtype).double()), emulator.statistics[0]


def _tensor(matrix: Tensor, kind: str, leading: int) -> Any:
    """As CuTeDSL takes it; DLPack knows no 8-bit floats."""
    import cutlass
    from cutlass.cute.runtime import from_dlpack

    if not kind.startswith("Float8"):
        return from_dlpack(matrix, assumed_align=16).mark_layout_dynamic(leading)
    found = from_dlpack(matrix.view(torch.uint8), assumed_align=16).mark_layout_dynamic(leading)
    found.element_type = getattr(cutlass, kind)
    return found


@functools.cache
def _compiled(gemm: DenseGemm) -> Compiled:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    if gemm.hopper:
        kernel = example(gemm.source, "hopper").HopperWgmmaGemmPersistentKernel(
            cutlass.Float32, gemm.tile, gemm.cluster, swizzle_size=1, raster_along_m=True
        )
    else:
        make = example(gemm.source).PersistentDenseGemmKernel
        kernel = make(cutlass.Float32, gemm.cluster[0] % 2 == 0, gemm.tile, gemm.cluster, gemm.tma_store)
    tensors = []
    for kind, major, names in zip((gemm.dtype, gemm.dtype, gemm.output), gemm.majors, ("mk", "nk", "mn"), strict=True):
        element = getattr(cutlass, kind)
        divisible = cute.sym_int32(divisibility=128 // element.width)
        shape = *(divisible if name == major else cute.sym_int32() for name in names), cute.sym_int32()
        order = (0, 1, 2) if major == names[0] else (1, 0, 2)
        tensors.append(make_fake_compact_tensor(element, shape, stride_order=order, assumed_align=16))
    return compile_for("sm_90a" if gemm.hopper else "sm_100a", kernel, *tensors, 1, make_fake_stream())
