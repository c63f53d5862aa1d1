"""The compiled kernels' host function: the same flat list of addresses and sizes for every kernel.

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

from .arguments import COPIES, Arguments
from .gemm import Gemm

OPERAND_ALIGNMENT = 16
"""Bytes; what TMA asks of an address."""
OUTPUT_TYPES = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32, "nvfp4": cutlass.Uint8}


class Entry:
    """``cute.compile(entry, *entry.example())`` compiles a GEMM."""

    def __init__(self, gemm: Gemm, programmatic_launch: bool = True) -> None:
        self.gemm, self.programmatic_launch = gemm, programmatic_launch

    def example(self) -> list[Any]:
        """Arguments to compile with; they need no GPU and stand for tensors of any size."""
        output = OUTPUT_TYPES[self.gemm.shape.output]
        operands = [(dtype, OPERAND_ALIGNMENT) for dtype in (*self.gemm.operand_types, output, cutlass.Uint8)]
        fp32, i32 = cutlass.Float32, cutlass.Int32
        vectors = [(dtype, dtype.width // 8) for dtype in (fp32, fp32, fp32, i32, i32, i32)]
        vectors += [(fp32, OPERAND_ALIGNMENT), *[(output, OPERAND_ALIGNMENT)] * len(COPIES)]
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
        sources: cute.Pointer,
        workspace: cute.Pointer,
        copy_0: cute.Pointer,
        copy_1: cute.Pointer,
        copy_2: cute.Pointer,
        copy_3: cute.Pointer,
        copy_4: cute.Pointer,
        copy_5: cute.Pointer,
        copy_6: cute.Pointer,
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
        arguments = Arguments(
            weights, weight_scales, tokens, token_scales, out, out_scales, row_scale, row_weight, alpha, offsets,
            counts, sources, workspace, copy_0, copy_1, copy_2, copy_3, copy_4, copy_5, copy_6, features, k, rows,
            groups, clusters, token_row, token_group, token_scale_row, token_scale_group, out_row, out_group,
            row_scale_row, row_scale_group, alpha_feature, alpha_group, out_scale_row,
        )  # fmt: skip
        self.gemm.launch(arguments, stream, self.programmatic_launch)
