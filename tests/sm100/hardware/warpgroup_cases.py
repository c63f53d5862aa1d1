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

from tests.sm100.emulator.formats import E4M3, from_bf16, from_f16, to_bf16, to_e4m3
from tests.sm100.hardware.case import Case, untouched

THREADS = 128
A_BYTES, B_BYTES = 8192, 20480
WORDS = (A_BYTES + B_BYTES) // 4
STEPS = 2
"""Instructions of a chain: each takes the next 32 bytes of K of both operands."""
NAMES = {
    "f32.bf16.bf16": ("bf16", 16), "f32.f16.f16": ("f16", 16), "f32.e4m3.e4m3": ("e4m3", 32),
}  # fmt: skip
DECODE = {"bf16": from_bf16, "f16": from_f16, "e4m3": lambda codes: E4M3[codes]}


class Multiplication:
    """One form of wgmma; ``layout``, ``leading``, ``stride``, ``base`` and ``across`` are those of B.

    A in shared memory is K-major with a swizzle of 128 bytes. ``steps`` is the number of instructions; ``keeps``
    whether the first adds to the accumulators, as the others do; ``product`` what they add, fp64 [64, N].
    """

    def __init__(
        self, columns: int, types: str, *, registers: bool = False, across: bool = False, layout: int = 1,
        leading: int = 0, stride: int = 1024, base: int = 0, steps: int = STEPS, signs: tuple[int, int] = (1, 1),
        keeps: bool = True, product: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.keeps, self.product = keeps, product
        self.columns, self.types, self.registers, self.across = columns, types, registers, across
        self.fields = leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | layout << 62
        self.first, self.steps, self.signs = 128 * base, steps, signs

    @cute.jit
    def __call__(self, source: Any, fragments: Any, before: Any, result: Any) -> None:
        self.kernel(source, fragments, before, result).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    def statement(self) -> str:
        """The PTX: results $w, descriptors $r0 and $r1, the accumulators before, the registers of A.

        It works on registers of its own: the compiler may give one register to an operand and a result.
        """
        depth, count = NAMES[self.types][1], self.columns // 2
        held = 4 * self.steps if self.registers else 0
        sums = ", ".join(f"d{i}" for i in range(count))
        trans = ("" if self.registers else ", 0") + f", {int(self.across)}" if depth == 16 else ""
        lines = [f"{{ .reg .pred p; .reg .b64 a, b; .reg .f32 d<{count}>; .reg .b32 h<{max(held, 1)}>;"]
        lines.append("mov.b64 a, {$r0}; mov.b64 b, {$r1};")
        lines += [f"mov.f32 d{i}, {{$r{2 + i}}};" for i in range(count)]
        lines += [f"mov.b32 h{i}, {{$r{2 + count + i}}};" for i in range(held)]
        lines.append("wgmma.fence.sync.aligned;")
        for step in range(self.steps):
            left = f"{{ h{4 * step}, h{4 * step + 1}, h{4 * step + 2}, h{4 * step + 3} }}" if self.registers else "a"
            opcode = f"wgmma.mma_async.sync.aligned.m64n{self.columns}k{depth}.{self.types}"
            lines.append(f"setp.ne.b32 p, {int(step > 0 or self.keeps)}, 0;")
            lines.append(f"{opcode} {{ {sums} }}, {left}, b, p, {self.signs[0]}, {self.signs[1]}{trans};")
            if step + 1 < self.steps:
                lines.append("add.s64 a, a, 2; add.s64 b, b, 2;")
        lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
        lines += [f"mov.f32 {{$w{i}}}, d{i};" for i in range(count)]
        return " ".join([*lines, "}"])

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
        found = inline_ptx(
            self.statement(),
            write_only_types=[cutlass.Float32] * (self.columns // 2), read_only_args=[left, right, *sums, *held],
        )  # fmt: skip
        for i in cutlass.range_constexpr(self.columns // 2):
            result[thread, i] = found[i]


def _blocked(raw: np.ndarray, across: bool, layout: int, size: int) -> tuple[np.ndarray, int, int]:
    """B [N, K] as ``layout`` wants it, without its swizzle: bytes, leading and stride offsets."""
    rows, depth = raw.shape
    span = {0: 16, 1: 128, 2: 64, 3: 32}[layout]
    width = span // size
    along, other = (raw.T, depth) if across else (raw, rows)
    extent = along.shape[1]
    assert extent % width == 0 and other % 8 == 0
    blocks = along.reshape(other // 8, 8, extent // width, width)
    if layout == 0 and across:
        # Core matrices one after the other along N, then along K.
        return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).view(np.uint8).ravel(), 128 * extent // width, 128
    if layout == 0:
        return np.ascontiguousarray(blocks.transpose(2, 0, 1, 3)).view(np.uint8).ravel(), 16 * rows, 128
    atom = 8 * span
    ordered = np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).view(np.uint8).ravel()
    return ordered, atom, atom * (extent // width)


def _swizzled(data: np.ndarray, layout: int) -> np.ndarray:
    """The bytes where the swizzle puts them, counted from where its pattern begins."""
    places = np.arange(data.size)
    mask = {0: 0, 1: 7, 2: 3, 3: 1}[layout]
    moved = np.empty_like(data)
    moved[places ^ (places >> 7 & mask) << 4] = data
    return moved


def _bits(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return to_bf16(values) if kind == "bf16" else to_e4m3(values)


def _held(a: np.ndarray) -> np.ndarray:
    """A [64, K] as the warps hold it, u32 [128, 4 for each 32 bytes of K]; the table is the PTX ISA's."""
    raw = np.ascontiguousarray(a).view(np.uint8).reshape(4, 2, 8, -1, 2, 4, 4)
    # warp, half of its rows, group, step, half of the step, place in the group, byte: registers take row halves first.
    return np.ascontiguousarray(raw.transpose(0, 2, 5, 3, 4, 1, 6)).reshape(THREADS, -1).view(np.uint32)


def _case(
    name: str, columns: int, types: str, *, registers: bool = False, across: bool = False, layout: int = 1,
    base: int = 0, signs: tuple[int, int] = (1, 1), rounded: bool = False,
    keeps: bool = True,
) -> Case:  # fmt: skip
    kind, depth = NAMES[types]
    size = 32 // depth
    # MN-major operands take one step: how K advances depends on the layout. So do narrow swizzles.
    steps = 1 if across or layout != 1 or rounded else STEPS
    random = np.random.default_rng(17)
    extent = steps * depth

    def values(rows: int) -> np.ndarray:
        if rounded:
            found = random.standard_normal((rows, extent)).astype(np.float32)
            found[rows // 2, 3] = 300.0
            return found
        return random.integers(-8, 9, (rows, extent)).astype(np.float32)

    a, b = _bits(values(64), kind), _bits(values(columns), kind)
    product = DECODE[kind](a).astype(np.float64) @ DECODE[kind](b).astype(np.float64).T * (signs[0] * signs[1])
    memory = np.zeros(4 * WORDS, np.uint8)
    wide = np.zeros((64, 128 // size), a.dtype)
    wide[:, :extent] = a
    memory[:A_BYTES] = _swizzled(wide.reshape(-1).view(np.uint8), 1)
    if not across:
        padded = np.zeros((columns, max(extent, {0: 16, 1: 128, 2: 64, 3: 32}[layout] // size)), b.dtype)
        padded[:, :extent] = b
        b = padded
    data, leading, stride = _blocked(b, across, layout, size)
    first = A_BYTES + 128 * base
    memory[first : first + data.size] = _swizzled(data, layout)
    function = Multiplication(
        columns, types, registers=registers, across=across, layout=layout, leading=leading, stride=stride, base=base,
        steps=steps, signs=signs, keeps=keeps, product=product,
    )  # fmt: skip
    before = random.integers(-8, 9, (THREADS, columns // 2)).astype(np.float32)
    return Case(
        f"wgmma {name}", function,
        {"source": torch.from_numpy(memory.view(np.int32)), "fragments": torch.from_numpy(_held(a).view(np.int32)),
         "before": torch.from_numpy(before)},
        {"result": untouched((THREADS, columns // 2), torch.float32)},
        ulp={f"wgmma {name}/result": ROUNDED_ULP} if rounded else {},
    )  # fmt: skip


ROUNDED_ULP = 4
"""Largest distance of a sum that must be rounded from the emulator's, in units in the last place, measured on an H200
on 2026-11-22: the tensor core aligns products to the largest and truncates."""
SPANS = {"none": 0, "32 B": 3, "64 B": 2, "128 B": 1}


def cases() -> list[Case]:
    """One case a form."""
    bf16 = "f32.bf16.bf16"
    found = [
        _case("bf16", 64, bf16),
        _case("bf16, A in registers", 32, bf16, registers=True),
        _case("bf16, N = 8, A in registers", 8, bf16, registers=True),
        _case("bf16, N = 96, A in registers", 96, bf16, registers=True),
        _case("f16", 64, "f32.f16.f16"),
        _case("f16, A in registers", 24, "f32.f16.f16", registers=True),
        _case("e4m3", 64, "f32.e4m3.e4m3"),
        _case("e4m3, A in registers", 16, "f32.e4m3.e4m3", registers=True),
        _case("bf16, overwriting", 32, bf16, keeps=False),
        _case("bf16, negated", 16, bf16, registers=True, signs=(-1, 1)),
        _case("bf16, rounded sums", 32, bf16, registers=True, rounded=True),
    ]
    for name, layout in SPANS.items():
        found.append(_case(f"bf16, B K-major, swizzle {name}", 64, bf16, registers=True, layout=layout))
        found.append(_case(f"bf16, B MN-major, swizzle {name}", 64, bf16, registers=True, across=True, layout=layout))
        if layout:
            found.append(_case(f"bf16, base offset, swizzle {name}", 64, bf16, registers=True, layout=layout, base=3))
    return found
