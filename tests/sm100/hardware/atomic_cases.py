"""Atomic operations, on addresses of one's own and on shared ones where the order cannot matter."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from tests.sm100.hardware import values
from tests.sm100.hardware.case import Case, from_bits

THREADS = 128
OPERATIONS = [
    "add.u32",
    "min.u32",
    "max.u32",
    "min.s32",
    "max.s32",
    "and.b32",
    "or.b32",
    "xor.b32",
    "exch.b32",
    "add.f32",
]
COMMUTING = ["add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32"]
"""Many threads on one address give one result, whatever their order. Sums of f32 do not."""


class Atomics:
    """Each operation as ``atom`` on global memory (a word a thread), then as ``red`` on one shared word for all."""

    @cute.jit
    def __call__(self, operands: Any, words: Any, old: Any, sums: Any) -> None:
        self.kernel(operands, words, old, sums).launch(grid=(values.COUNT // THREADS, 1, 1), block=(THREADS, 1, 1))

    @cute.kernel
    def kernel(self, operands: Any, words: Any, old: Any, sums: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        item = block * THREADS + thread
        operand = cutlass.Uint32(operands[0, item])
        other = cutlass.Uint32(operands[1, item])
        for row in cutlass.range_constexpr(len(OPERATIONS) + 1):
            place = (words.iterator + (row * values.COUNT + item)).toint()
            found = cutlass.Uint32(0)
            if cutlass.const_expr(row < len(OPERATIONS)):
                found = inline_ptx(
                    "atom.global." + OPERATIONS[row] + " {$w0}, [{$r0}], {$r1};",
                    write_only_types=[cutlass.Uint32], read_only_args=[place, operand],
                )  # fmt: skip
            else:
                found = inline_ptx(
                    "atom.relaxed.gpu.global.cas.b32 {$w0}, [{$r0}], {$r1}, {$r2};",
                    write_only_types=[cutlass.Uint32], read_only_args=[place, operand, other],
                )  # fmt: skip
            old[row, item] = old.element_type(found)
        shared = cute.arch.alloc_smem(cutlass.Uint32, len(COMMUTING), alignment=16)
        cell = cute.make_tensor(shared, cute.make_layout(len(COMMUTING)))
        if thread < len(COMMUTING):
            cell[thread] = cutlass.Uint32(0x12345678)
        cute.arch.sync_threads()
        for row in cutlass.range_constexpr(len(COMMUTING)):
            inline_ptx(
                "red.shared." + COMMUTING[row] + " [{$r0}], {$r1};",
                read_only_args=[(shared + row).toint(), operand],
            )
        cute.arch.sync_threads()
        for row in cutlass.range_constexpr(len(COMMUTING)):
            if thread == row:
                inline_ptx(
                    "red.relaxed.gpu.global." + COMMUTING[row] + " [{$r0}], {$r1};",
                    read_only_args=[(sums.iterator + row).toint(), cell[row]],
                )


class WideAtomics:
    """Atomics of other widths, a place for each thread: 64 bits, pairs of halves, f32 in shared memory, vectors."""

    PLAIN = ("atom.global.add.noftz.f16x2", "atom.global.add.noftz.bf16x2", "atom.shared.add.f32")
    """32-bit operations with a result."""
    VECTORS = ((2, "f32"), (4, "f32"))

    @cute.jit
    def __call__(self, operands: Any, words: Any, old: Any, wide: Any, vectors: Any) -> None:
        self.kernel(operands, words, old, wide, vectors).launch(
            grid=(values.COUNT // THREADS, 1, 1), block=(THREADS, 1, 1)
        )

    @cute.kernel
    def kernel(self, operands: Any, words: Any, old: Any, wide: Any, vectors: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        item = block * THREADS + thread
        cells = cute.arch.alloc_smem(cutlass.Uint32, THREADS, alignment=16)
        shared = cute.make_tensor(cells, cute.make_layout(THREADS))
        for row in cutlass.range_constexpr(len(self.PLAIN)):
            place = (words.iterator + (row * values.COUNT + item)).toint()
            if cutlass.const_expr("shared" in self.PLAIN[row]):
                shared[thread] = cutlass.Uint32(words[row, item])
                place = (cells + thread).toint()
            found = inline_ptx(
                self.PLAIN[row] + " {$w0}, [{$r0}], {$r1};",
                write_only_types=[cutlass.Uint32], read_only_args=[place, cutlass.Uint32(operands[row, item])],
            )  # fmt: skip
            old[row, item] = old.element_type(found)
            if cutlass.const_expr("shared" in self.PLAIN[row]):
                words[row, item] = words.element_type(shared[thread])
        inline_ptx(
            "red.global.add.u64 [{$r0}], {$r1};",
            read_only_args=[(wide.iterator + item).toint(), cutlass.Uint64(item) * cutlass.Uint64(0x9E3779B97F4A7C15)],
        )
        for row in cutlass.range_constexpr(len(self.VECTORS)):
            count, kind = self.VECTORS[row]
            if item % count == 0:
                names = ", ".join([f"{{$r{i + 1}}}" for i in range(count)])
                inline_ptx(
                    f"red.global.add.v{count}.{kind} [{{$r0}}], {{ {names} }};",
                    read_only_args=[
                        (vectors.iterator + (row * values.COUNT + item)).toint(),
                        *[cutlass.Uint32(operands[2, item + i]) for i in range(count)],
                    ],
                )


def wide_case() -> Case:
    operands = np.stack([values.half_pairs(np.float16, 0), values.half_pairs(np.float32, 0), values.floats(0)])
    words = np.stack([values.half_pairs(np.float16, 1), values.half_pairs(np.float32, 1), values.floats(1)])
    rows = list(WideAtomics.PLAIN)
    return Case(
        "wide atomics", WideAtomics(), {"operands": from_bits(operands, torch.int32)},
        {
            "words": from_bits(words, torch.int32),
            "old": from_bits(np.zeros_like(words), torch.int32),
            "wide": from_bits(np.repeat(values.wide_integers(0)[::2], 2), torch.int64),
            "vectors": from_bits(np.stack([values.floats(1)] * len(WideAtomics.VECTORS)), torch.int32),
        },
        {
            "words": [f"{row} leaves" for row in rows],
            "old": [f"{row} returns" for row in rows],
            "vectors": [f"red.global.add.v{count}.{kind}" for count, kind in WideAtomics.VECTORS],
        },
    )  # fmt: skip


def cases() -> list[Case]:
    """Common atomics and those of other widths."""
    operands = np.stack([values.integers(0), values.integers(1)])
    labels = [f"atom.{name}" for name in (*OPERATIONS, "cas.b32")]
    before = np.random.default_rng(11).integers(0, 2**32, (len(labels), values.COUNT), dtype=np.uint32)
    floats = OPERATIONS.index("add.f32")
    before[floats] = values.floats(1)
    before[-1, ::2] = operands[0, ::2]  # compare-and-swap succeeds at every other place
    outputs = {
        "words": from_bits(before, torch.int32),
        "old": from_bits(np.zeros_like(before), torch.int32),
        "sums": from_bits(np.full(len(COMMUTING), 0x0F0F0F0F, np.uint32), torch.int32),
    }
    rows = {"words": [f"{label} leaves" for label in labels], "old": [f"{label} returns" for label in labels]}
    common = Case("atomics", Atomics(), {"operands": from_bits(operands, torch.int32)}, outputs, rows)
    return [common, wide_case()]
