"""NVIDIA's persistent block-scaled GEMM for SM100 (CuTeDSL), as FlashInfer installs it, with UE8M0 scales of 32."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvfp4_sgl.formats.scale_layout import swizzle_128x4
from tests.sm100.emulator import Compiled, Options, Statistics, compile_for, emulated
from tests.sm100.support.cutlass_examples import example
from tests.sm100.support.narrow_operands import NarrowOperand

TYPES = {"e4m3": "Float8E4M3FN", "e5m2": "Float8E5M2", "e2m1": "Float4E2M1FN"}
BLOCK = 32


@dataclass(frozen=True)
class ScaledOperand:
    """Random codes [rows, k] with UE8M0 scales [rows, k/32]: the bytes in memory, the swizzled scales, the values."""

    raw: Tensor
    swizzled: Tensor
    values: np.ndarray

    @classmethod
    def random(cls, name: str, rows: int, k: int, seed: int) -> ScaledOperand:
        operand = NarrowOperand.random(name, rows, k, seed)
        scales = np.random.default_rng(seed + 100).integers(124, 131, (rows, k // BLOCK), dtype=np.uint8)
        padded = np.full((-(-rows // 128) * 128, scales.shape[1]), 0xFF, np.uint8)  # NaN
        padded[:rows] = scales
        raw = operand.packed() if name == "e2m1" else operand.codes
        values = operand.values() * np.repeat(2.0 ** (scales.astype(np.float64) - 127), BLOCK, axis=1)
        return cls(torch.from_numpy(raw), swizzle_128x4(torch.from_numpy(padded)), values)


@dataclass(frozen=True)
class ScaledGemm:
    """The kernel on one cluster; tile and cluster in M and N, output fp32."""

    kind: str
    tile: tuple[int, int]
    cluster: tuple[int, int]

    def compiled(self) -> Compiled:
        return _compiled(self)

    def run(self, shape: tuple[int, int, int], options: Options) -> tuple[bool, Statistics]:
        """Multiply random operands of (M, N, K), K-major; whether each element is right up to the order of its sum."""
        m, n, k = shape
        a, b = ScaledOperand.random(self.kind, m, k, 1), ScaledOperand.random(self.kind, n, k, 2)
        out, statistics = self.multiply(a, b, options)
        expected = a.values @ b.values.T
        slack = 2.0**-22 * np.abs(a.values) @ np.abs(b.values).T
        return bool((np.abs(out.numpy() - expected) <= slack).all()), statistics

    def multiply(self, a: ScaledOperand, b: ScaledOperand, options: Options) -> tuple[Tensor, Statistics]:
        """fp32 [M, N], ``a @ b.T``."""
        import cuda.bindings.driver as cuda  # type: ignore[import-untyped]

        (m, k), n = a.values.shape, len(b.values)
        out = torch.full((m, n), float("nan"))
        buffers = [a.raw, b.raw, a.swizzled, b.swizzled]
        with emulated(options, reads=buffers, writes=[out]) as emulator:
            pointers = _pointers(self.kind, [tensor.data_ptr() for tensor in (*buffers, out)])
            emulator(self.compiled(), *pointers, (m, n, k, 1), cuda.CUstream(0))
        return out, emulator.statistics[0]


def _pointers(kind: str, addresses: list[int]) -> list[object]:
    """Pointers to a, b, their scales and the output."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_ptr

    operand = getattr(cutlass, TYPES[kind])
    scale, real = cutlass.Float8E8M0FNU, cutlass.Float32
    aligned = ((operand, 16), (operand, 16), (scale, 32), (scale, 32), (real, 16))
    return [
        make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
        for (dtype, align), address in zip(aligned, addresses, strict=True)
    ]


@functools.cache
def _compiled(gemm: ScaledGemm) -> Compiled:
    import cutlass
    import cutlass.utils as utils
    from cutlass.cute.nvgpu import OperandMajorMode
    from cutlass.cute.runtime import make_fake_stream

    make = example("dense_blockscaled_gemm_persistent").Sm100BlockScaledPersistentDenseGemmKernel
    kernel = make(BLOCK, gemm.tile, gemm.cluster)
    layouts = OperandMajorMode.K, OperandMajorMode.K, utils.LayoutEnum.ROW_MAJOR
    sizes = (cutlass.Int32(0),) * 4
    return compile_for("sm_100a", kernel, *_pointers(gemm.kind, [0] * 5), layouts, sizes, 1, make_fake_stream())
