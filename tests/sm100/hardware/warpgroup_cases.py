"""wgmma: every kind of operand and layout that kernels use, one instruction or a chain of them, by one warpgroup.

Operands are small integers, so that sums are exact whatever their order, except where the case says so. Instructions
are inline PTX within one block, so that ptxas sees fences, commit and wait beside them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from tests.sm100.emulator.formats import to_bf16, to_e4m3
from tests.sm100.hardware.case import Case, untouched

THREADS = 128
A_BYTES, B_BYTES = 8192, 20480
WORDS = (A_BYTES + B_BYTES) // 4
STEPS = 2
"""Instructions of a chain: each takes the next 32 bytes of K of both operands."""
NAMES = {
    "f32.bf16.bf16": ("bf16", 16), "f32.f16.f16": ("f16", 16), "f32.e4m3.e4m3": ("e4m3", 32),
}  # fmt: skip


class Multiplication:
    """One form of wgmma; ``layout``, ``leading``, ``stride``, ``base`` and ``across`` are those of B.

    A in shared memory is K-major with a swizzle of 128 bytes. ``steps`` is the number of instructions, of which the
    first overwrites the accumulators.
    """

    def __init__(
        self, columns: int, types: str, *, registers: bool = False, across: bool = False, layout: int = 1,
        leading: int = 0, stride: int = 1024, base: int = 0, steps: int = STEPS, signs: tuple[int, int] = (1, 1),
    ) -> None:  # fmt: skip
        self.columns, self.types, self.registers, self.across = columns, types, registers, across
        self.fields = leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | layout << 62
        self.first, self.steps, self.signs = 128 * base, steps, signs

    @cute.jit
    def __call__(self, source: Any, fragments: Any, before: Any, result: Any) -> None:
        self.kernel(source, fragments, before, result).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    def statement(self) -> str:
        """The PTX: $rw are the accumulators, $r0 and $r1 the descriptors, $r2 and on the registers of A."""
        depth = NAMES[self.types][1]
        count = self.columns // 2
        sums = ", ".join(f"{{$rw{i}}}" for i in range(count))
        trans = ("" if self.registers else ", 0") + f", {int(self.across)}" if depth == 16 else ""
        lines = ["{ .reg .pred p; .reg .b64 a, b; mov.b64 a, {$r0}; mov.b64 b, {$r1}; wgmma.fence.sync.aligned;"]
        for step in range(self.steps):
            left = "a"
            if self.registers:
                left = "{ " + ", ".join(f"{{$r{2 + 4 * step + i}}}" for i in range(4)) + " }"
            lines.append(
                f"setp.ne.b32 p, {int(step > 0)}, 0; wgmma.mma_async.sync.aligned.m64n{self.columns}k{depth}.{self.types} "
                f"{{ {sums} }}, {left}, b, p, {self.signs[0]}, {self.signs[1]}{trans};"
            )
            if step + 1 < self.steps:
                lines.append("add.s64 a, a, 2; add.s64 b, b, 2;")
        return " ".join([*lines, "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"])

    @cute.kernel
    def kernel(self, source: Any, fragments: Any, before: Any, result: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        words = cute.arch.alloc_smem(cutlass.Uint32, WORDS, alignment=1024)
        buffer = cute.make_tensor(words, cute.make_layout(WORDS))
        for word in cutlass.range_constexpr(WORDS // THREADS):
            buffer[word * THREADS + thread] = cutlass.Uint32(source[word * THREADS + thread])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        start = cutlass.Uint64(words.toint())
        fields = cutlass.Uint64(self.fields)
        left = (start >> 4) | cutlass.Uint64(1024 >> 4 << 32 | 1 << 62)
        right = ((start + cutlass.Uint64(A_BYTES + self.first)) >> 4) | fields
        held = [cutlass.Uint32(fragments[thread, i]) for i in range(4 * self.steps if self.registers else 0)]
        sums = [cutlass.Float32(before[thread, i]) for i in range(self.columns // 2)]
        found = inline_ptx(self.statement(), read_write_args=sums, read_only_args=[left, right, *held])
        for i in cutlass.range_constexpr(self.columns // 2):
            result[thread, i] = found[i]
