"""The compiled kernels' host function: the flat list of addresses and sizes that all kernels of this package take.

It is SM100's (sm100/arguments.py), so that the same code calls both; what is not named below is not used here.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda  # type: ignore[import-untyped]
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from ..sm100.entry import OPERAND_ALIGNMENT
from .epilogue import Epilogue
from .gemm import W4A16Gemm
from .shape import KernelShape


class Entry:
    """``cute.compile(Entry(shape, epilogue), *Entry.example(shape))``."""

    def __init__(self, shape: KernelShape, epilogue: Epilogue, programmatic_launch: bool = True) -> None:
        self.shape, self.programmatic_launch = shape, programmatic_launch
        self.gemm = W4A16Gemm(shape, epilogue)

    @staticmethod
    def example(shape: KernelShape) -> list[Any]:
        """Arguments to compile with; they need no GPU and stand for tensors of any size."""
        output = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32}[shape.output]
        byte, fp32, i32 = cutlass.Uint8, cutlass.Float32, cutlass.Int32
        operands = [(dtype, OPERAND_ALIGNMENT) for dtype in (byte, byte, cutlass.BFloat16, byte, output, byte)]
        vectors = [(dtype, dtype.width // 8) for dtype in (fp32, fp32, fp32, i32, i32)]
        return [
            *(make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align) for dtype, align in operands + vectors),
            *[Int32(1)] * 5,
            *[Int64(1)] * 11,
            make_fake_stream(),
        ]

    @cute.jit
    def __call__(
        self,
        weights: cute.Pointer,
        weight_scales: cute.Pointer,
        tokens: cute.Pointer,
        token_scales: cute.Pointer,
        out: cute.Pointer,
        out_scales: cute.Pointer,
        row_scale: cute.Pointer,
        row_weight: cute.Pointer,
        alpha: cute.Pointer,
        offsets: cute.Pointer,
        counts: cute.Pointer,
        features: Int32,
        k: Int32,
        rows: Int32,
        groups: Int32,
        clusters: Int32,
        token_row: Int64,
        token_group: Int64,
        token_scale_row: Int64,
        token_scale_group: Int64,
        out_row: Int64,
        out_group: Int64,
        row_scale_row: Int64,
        row_scale_group: Int64,
        alpha_feature: Int64,
        alpha_group: Int64,
        out_scale_row: Int64,
        stream: cuda.CUstream,
    ):
        """Launch; :class:`..sm100.arguments.Arguments` says what each is."""
        self.gemm(
            weights, tokens, (out, alpha), features, k, rows, groups, (token_row, token_group),
            (out_row, out_group, alpha_feature, alpha_group), clusters, stream, self.programmatic_launch,
        )  # fmt: skip
