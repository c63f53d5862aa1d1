"""NVIDIA's grouped NVFP4 GEMM for SM100 (CuTeDSL), as FlashInfer installs it, made callable in the emulator.

It gives each group its tensor maps on the device: built in shared memory, copied to global memory, fenced.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_ptr

from tests.sm100.emulator import Compiled, Options, Statistics, compile_for, emulated
from tests.sm100.support.flashinfer_gemm import Operand
from tests.support.numpy_nvfp4 import dequantize

SMALLEST = 32
"""Extent of the tensors from which the kernel takes types and layouts only."""


@functools.cache
def _module() -> ModuleType:
    import flashinfer

    folder = Path(flashinfer.__file__).parent / "data/cutlass/examples/python/CuTeDSL/blackwell"
    spec = importlib.util.spec_from_file_location("grouped_blockscaled_gemm", folder / "grouped_blockscaled_gemm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Entry:
    """The kernel, called with pointers in place of the tensors that tell types and layouts."""

    def __init__(
        self, tile: tuple[int, int], cluster: tuple[int, int], groups: int, clusters: int, active: int
    ) -> None:
        self.kernel = _module().Sm100GroupedBlockScaledGemmKernel(16, tile, cluster)
        self.groups, self.clusters, self.active = groups, clusters, active

    @cute.jit
    def __call__(
        self,
        code: cute.Pointer,
        scale: cute.Pointer,
        output: cute.Pointer,
        extent: cutlass.Int32,
        shapes: cute.Tensor,
        strides: cute.Tensor,
        addresses: cute.Tensor,
        scale_addresses: cute.Tensor,
        maps: cute.Tensor,
        stream: Any,
    ) -> None:
        layout = cute.make_layout((extent, extent, 1), stride=(extent, 1, extent))
        codes, scales, outputs = (cute.make_tensor(pointer, layout) for pointer in (code, scale, output))
        self.kernel(
            codes, codes, outputs, scales, scales, self.groups, shapes, strides, addresses, scale_addresses,
            self.clusters, maps, self.active, stream,
        )  # fmt: skip


def _tables(groups: int, buffers: int) -> list[Any]:
    extents = (cutlass.Int32, (groups, 4)), (cutlass.Int32, (groups, 3, 2)), (cutlass.Int64, (groups, 3))
    kinds = (*extents, (cutlass.Int64, (groups, 2)), (cutlass.Int64, (buffers, 5, 16)))
    return [
        make_fake_compact_tensor(kind, shape, stride_order=tuple(range(len(shape)))[::-1], assumed_align=16)
        for kind, shape in kinds
    ]


def _pointers(address: int) -> list[Any]:
    kinds = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.BFloat16
    return [make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=16) for kind in kinds]


@functools.cache
def compiled_grouped_gemm(
    tile: tuple[int, int], cluster: tuple[int, int], groups: int, clusters: int, active: int
) -> Compiled:
    """The kernel for a number of groups and of output tiles, on at most ``active`` clusters."""
    entry = _Entry(tile, cluster, groups, clusters, active)
    tables = _tables(groups, active * cluster[0] * cluster[1])
    return compile_for("sm_100a", entry, *_pointers(16), 0, *tables, make_fake_stream())


def run_grouped_gemm(
    tile: tuple[int, int],
    cluster: tuple[int, int],
    shapes: Sequence[tuple[int, int, int]],
    active: int,
    options: Options,
    patch: tuple[str, str] | None = None,
) -> tuple[bool, Statistics]:
    """Multiply random operands of (M, N, K) for each group; whether all outputs are right (see run_gemm).

    ``patch`` replaces a piece of the PTX.
    """
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]
    from cutlass.cute.runtime import from_dlpack

    rows, columns = 128 * cluster[0], tile[1] * cluster[1]
    clusters = sum(-(-m // rows) * -(-n // columns) for m, n, _ in shapes)
    compiled = compiled_grouped_gemm(tile, cluster, len(shapes), clusters, active)
    if patch is not None:
        compiled = compiled.patched(*patch)
    operands = [(Operand.random(m, k, 2 * i), Operand.random(n, k, 2 * i + 1)) for i, (m, n, k) in enumerate(shapes)]
    outputs = [torch.full((m, n), float("nan"), dtype=torch.bfloat16) for m, n, _ in shapes]
    tables = [
        torch.tensor([(*shape, 1) for shape in shapes], dtype=torch.int32),
        torch.tensor([((k, 1), (k, 1), (n, 1)) for _, n, k in shapes], dtype=torch.int32),
        torch.tensor(
            [
                (a.packed.ctypes.data, b.packed.ctypes.data, output.data_ptr())
                for (a, b), output in zip(operands, outputs, strict=True)
            ]
        ),
        torch.tensor([(a.swizzled.ctypes.data, b.swizzled.ctypes.data) for a, b in operands]),
    ]
    maps = torch.zeros(active * cluster[0] * cluster[1] * 5 * 16 + 16, dtype=torch.int64)
    maps = maps[(-maps.data_ptr() % 128) // 8 :][: len(maps) - 16].reshape(-1, 5, 16)
    reads = [*tables, *(array for pair in operands for one in pair for array in (one.packed, one.swizzled))]
    with emulated(options, reads=reads, writes=[*outputs, maps]) as emulator:
        tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (*tables, maps)]
        emulator(compiled, *_pointers(outputs[0].data_ptr()), SMALLEST, *tensors, cuda.CUstream(0))
    right = True
    for (a, b), output, (_, _, k) in zip(operands, outputs, shapes, strict=True):
        left, other = dequantize(a.packed, a.scales), dequantize(b.packed, b.scales)
        slack = (k // 64 + 1) * 2.0**-24 * (np.abs(left) @ np.abs(other).T)
        low, high = (torch.from_numpy(left @ other.T + sign * slack).to(torch.bfloat16) for sign in (-1, 1))
        right &= bool(((low <= output) & (output <= high)).all())
    return right, emulator.statistics[0]
