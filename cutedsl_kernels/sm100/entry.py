"""The compiled kernels' host function: the same flat list of addresses and sizes for every shape and epilogue.

One signature without tuples or absent arguments keeps the C interface of all kernels alike, so that one small piece of
code (native.py) calls them, whether they were compiled in this process or come from a library.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda  # type: ignore[import-untyped]
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from .epilogue import Epilogue
from .gemm import NvFp4Gemm
from .shape import KernelShape

OPERAND_ALIGNMENT = 16
"""Bytes; what TMA asks of an address."""


class Entry:
    """``cute.compile(Entry(shape, epilogue), *Entry.example(shape))``."""

    def __init__(self, shape: KernelShape, epilogue: Epilogue, programmatic_launch: bool = True) -> None:
        self.shape, self.epilogue, self.programmatic_launch = shape, epilogue, programmatic_launch
        self.gemm = NvFp4Gemm(shape, epilogue)

    @staticmethod
    def example(shape: KernelShape) -> list[Any]:
        """Arguments to compile with; they need no GPU and stand for tensors of any size."""
        output = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32, "nvfp4": cutlass.Uint8}[shape.output]
        codes, scales, fp32, i32 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.Float32, cutlass.Int32
        operands = [(dtype, OPERAND_ALIGNMENT) for dtype in (codes, scales, codes, scales, output, cutlass.Uint8)]
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
        """Launch; :class:`.arguments.Arguments` says what each is."""
        shape = self.shape
        quantized, weighted = shape.output == "nvfp4", self.epilogue.weighted
        self.gemm(
            weights, weight_scales, tokens, token_scales,
            (out, out_scales if quantized else None, row_scale, row_weight if weighted else None, alpha),
            offsets if shape.grouped else None, counts if shape.grouped else None,
            features, k, rows, groups, (token_row, token_group), (token_scale_row, token_scale_group),
            (out_row, out_group, row_scale_row, row_scale_group, alpha_feature, alpha_group, out_scale_row),
            clusters, stream, self.programmatic_launch,
        )  # fmt: skip
