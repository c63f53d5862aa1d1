"""NVIDIA's persistent half-precision GEMM for SM100 (CuTeDSL), as FlashInfer installs it, callable in the emulator."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

import torch

from tests.sm100.emulator import Compiled, Options, Statistics, compile_for, emulated

TYPES = {"BFloat16": torch.bfloat16, "Float16": torch.float16, "Float32": torch.float32}


@functools.cache
def _module() -> ModuleType:
    import flashinfer

    folder = Path(flashinfer.__file__).parent / "data/cutlass/examples/python/CuTeDSL/blackwell"
    spec = importlib.util.spec_from_file_location("dense_gemm_persistent", folder / "dense_gemm_persistent.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def compiled_half_gemm(
    dtype: str, output: str, tile: tuple[int, int], cluster: tuple[int, int], majors: str, tma_store: bool
) -> Compiled:
    """The kernel on one cluster.

    Args:
        dtype, output: element types by CuTeDSL's names.
        tile, cluster: M and N; a tile of M = 256, and of M = 128 for a cluster of an even M, is a pair's.
        majors: the contiguous dimension of a, b and c, such as "mnn" or "kkm".
        tma_store: whether the epilogue stores by TMA.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    kernel = _module().PersistentDenseGemmKernel(cutlass.Float32, cluster[0] % 2 == 0, tile, cluster, tma_store)
    tensors = []
    for kind, major, names in zip((dtype, dtype, output), majors, ("mk", "nk", "mn"), strict=True):
        divisible = cute.sym_int32(divisibility=8)
        shape = *(divisible if name == major else cute.sym_int32() for name in names), cute.sym_int32()
        order = (0, 1, 2) if major == names[0] else (1, 0, 2)
        element = getattr(cutlass, kind)
        tensors.append(make_fake_compact_tensor(element, shape, stride_order=order, assumed_align=16))
    return compile_for("sm_100a", kernel, *tensors, 1, make_fake_stream())


def run_half_gemm(
    dtype: str,
    output: str,
    tile: tuple[int, int],
    cluster: tuple[int, int],
    majors: str,
    tma_store: bool,
    shape: tuple[int, int, int],
    options: Options,
) -> tuple[bool, Statistics]:
    """Multiply small random integers of (M, N, K), whose sums are exact; whether the output is equal."""
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]
    from cutlass.cute.runtime import from_dlpack

    compiled = compiled_half_gemm(dtype, output, tile, cluster, majors, tma_store)
    m, n, k = shape
    random = torch.Generator().manual_seed(1)
    matrices = []
    for extents, major, names in zip(((m, k), (n, k), (m, n)), majors, ("mk", "nk", "mn"), strict=True):
        values = torch.randint(-2, 3, extents, generator=random).to(TYPES[dtype if "k" in names else output])
        contiguous = values.T.contiguous().T if major == names[0] else values.contiguous()
        matrices.append(contiguous[..., None])
    a, b, c = matrices
    c.fill_(float("nan"))
    with emulated(options, reads=[a, b], writes=[c]) as emulator:
        tensors = [
            from_dlpack(matrix, assumed_align=16).mark_layout_dynamic(0 if major == names[0] else 1)
            for matrix, major, names in zip(matrices, majors, ("mk", "nk", "mn"), strict=True)
        ]
        emulator(compiled, *tensors, cuda.CUstream(0))
    expected = a[..., 0].double() @ b[..., 0].double().T
    return torch.equal(c[..., 0].double(), expected.to(c.dtype).double()), emulator.statistics[0]
