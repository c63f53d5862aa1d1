"""tcgen05.mma: M, number of CTAs, major-ness and swizzles as CuTeDSL lays them out, and forms that it does not use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.sm100.emulator import Options, emulated
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.mma import check_shape
from tests.sm100.emulator.mma_descriptors import InstructionDescriptor, MatrixDescriptor
from tests.sm100.emulator.tensor_layouts import Accumulator
from tests.sm100.emulator.tensor_memory import TensorMemory
from tests.sm100.support.tensor_snippets import core_matrices, matrix_descriptor, run_tensor_code
from tests.support.numpy_nvfp4 import dequantize

Case = tuple[str, tuple[int, int, int], int, tuple[str, str], tuple[str, int]]
CASES: list[Case] = [
    ("BFloat16", (128, 64, 64), 1, ("K_SW128", "K_SW128"), ("32x32b", 64)),
    ("Float16", (128, 96, 32), 1, ("K_SW64", "K_SW32"), ("32x32b", 32)),
    ("BFloat16", (128, 24, 32), 1, ("K_INTER", "K_INTER"), ("32x32b", 8)),
    ("BFloat16", (64, 64, 64), 1, ("K_SW128", "K_SW64"), ("16x256b", 8)),
    ("Float16", (64, 32, 32), 1, ("K_SW64", "K_INTER"), ("16x64b", 16)),
    ("Float16", (64, 64, 32), 1, ("MN_SW128", "K_SW64"), ("16x128b", 8)),
    ("Float16", (128, 64, 64), 1, ("MN_SW128", "MN_SW128"), ("32x32b", 16)),
    ("BFloat16", (128, 64, 32), 1, ("MN_SW64", "MN_SW32"), ("32x32b", 16)),
    ("Float16", (128, 32, 32), 1, ("MN_INTER", "MN_INTER"), ("32x32b", 16)),
    ("BFloat16", (256, 64, 32), 2, ("K_SW64", "MN_SW64"), ("32x32b", 16)),
    ("BFloat16", (128, 64, 32), 2, ("K_SW64", "K_SW64"), ("32x32b", 16)),
    ("Float16", (128, 128, 32), 2, ("MN_SW128", "MN_SW128"), ("32x32b", 16)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(str(part) for part in case))
def test_half_precision_product_laid_out_by_cutedsl(case: Case) -> None:
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]
    from cutlass.cute.runtime import from_dlpack

    from tests.sm100.support.one_tile_gemm import compiled_one_tile

    compiled = compiled_one_tile(*case)
    (m, n, k), ctas = case[1:3]
    dtype = {"Float16": torch.float16, "BFloat16": torch.bfloat16}[case[0]]
    random = torch.Generator().manual_seed(1)
    # Small integers: every partial sum is exact.
    a, b = (torch.randint(-8, 9, (rows, k), generator=random).to(dtype) for rows in (m, n))
    c = torch.full((m, n), float("nan"))
    with emulated(Options("random", 1), reads=[a, b], writes=[c]) as emulator:
        emulator(compiled, *(from_dlpack(tensor, assumed_align=16) for tensor in (a, b, c)), cuda.CUstream(0))
    assert torch.equal(c.double(), a.double() @ b.double().T)
    assert emulator.statistics[0].engine_operations["multiply_adds"] == m * n * k
    assert f"tcgen05.mma.cta_group::{ctas}.kind::f16" in compiled.ptx


def half_descriptor(m: int, n: int) -> int:
    """Instruction descriptor: fp32 accumulation of fp16 operands, K-major."""
    return 1 << 4 | n // 8 << 17 | m // 16 << 24


def test_operand_a_in_tensor_memory() -> None:
    random = np.random.default_rng(1)
    a, b = (random.integers(-8, 9, (rows, 16)).astype(np.float16) for rows in (128, 32))
    shared = np.zeros((1, 2048), np.uint8)
    shared[0, :1024] = core_matrices(b.view(np.uint8))
    cells = np.zeros((1, 128, 48), np.uint32)
    cells[0, :, :8] = a.view(np.uint32)
    code = f"""add.s32 %r24, %r20, 16; mov.u64 %q5, {matrix_descriptor(0, 16 * 32, 128)};
    mov.u32 %r25, {half_descriptor(128, 32)}; setp.ne.s32 %p5, 0, 0;
    tcgen05.mma.cta_group::1.kind::f16 [%r24], [%r20], %q5, %r25, %p5;"""
    result = run_tensor_code(code, shared, cells)[0]
    assert np.array_equal(result[:, 16:].view(np.float32), a.astype(np.float32) @ b.T.astype(np.float32))


def test_two_accumulators_of_64_rows_share_columns() -> None:
    random = np.random.default_rng(1)
    a, b = (random.integers(-8, 9, (rows, 16)).astype(np.float16) for rows in (128, 16))
    shared = np.zeros((1, 6144), np.uint8)
    for part in range(2):
        shared[0, 2048 * part : 2048 * (part + 1)] = core_matrices(a[64 * part : 64 * (part + 1)].view(np.uint8))
    shared[0, 4096:4608] = core_matrices(b.view(np.uint8))
    code = f"""add.s32 %r24, %r20, {16 << 16}; mov.u64 %q5, {matrix_descriptor(0, 16 * 64, 128)};
    mov.u64 %q6, {matrix_descriptor(2048, 16 * 64, 128)}; mov.u64 %q7, {matrix_descriptor(4096, 16 * 16, 128)};
    mov.u32 %r25, {half_descriptor(64, 16)}; setp.ne.s32 %p5, 0, 0;
    tcgen05.mma.cta_group::1.kind::f16 [%r20], %q5, %q7, %r25, %p5;
    tcgen05.mma.cta_group::1.kind::f16 [%r24], %q6, %q7, %r25, %p5;"""
    result = run_tensor_code(code, shared, np.zeros((1, 128, 16), np.uint32))[0].view(np.float32)
    expected = a.astype(np.float32) @ b.T.astype(np.float32)
    for row in range(128):
        # Rows 0–63 of the first in lanes 0–15 of each quarter, of the second in lanes 16–31.
        lane = row % 64 // 16 * 32 + row // 64 * 16 + row % 16
        assert np.array_equal(result[lane], expected[row])


def test_an_accumulator_may_be_read_while_the_other_of_its_columns_is_written() -> None:
    memory = TensorMemory("a CTA")
    memory.allocate(32)
    second = Accumulator.at(16 << 16, 64, 16, 1)
    memory.announce(second.halves, second.span, 1)
    memory.check_settled(Accumulator.at(0, 64, 16, 1).halves, second.span, "read")
    with pytest.raises(HazardError, match="yet to write"):
        memory.check_settled(second.halves, second.span, "read")


@pytest.mark.parametrize("n", [32, 64, 96])
def test_pair_of_64_rows_each_with_scales(n: int) -> None:
    """CUTLASS's layouts of 128 rows over a pair: the scales of B's second half are in lanes 64 to 127."""
    random = np.random.default_rng(n)
    codes = [random.integers(0, 256, (rows, 32), dtype=np.uint8) for rows in (128, n)]
    scales = [random.integers(40, 80, (rows, 4), dtype=np.uint8) for rows in (128, n)]
    shared = np.zeros((2, 6144), np.uint8)
    for rank in range(2):
        a = core_matrices(codes[0][64 * rank : 64 * (rank + 1)])
        b = core_matrices(codes[1][n // 2 * rank : n // 2 * (rank + 1)])
        shared[rank, : a.size], shared[rank, 2048 : 2048 + b.size] = a, b
    cells = np.zeros((2, 128, 64), np.uint32)
    for rank in range(2):
        for lane in range(128):
            for column in range(2):
                cells[rank, lane, 56 + column] = scales[0][64 * rank + 32 * column + lane % 32].view(np.uint32)[0]
                row = 32 * column + lane % 32
                if row < n // 2:
                    cells[rank, lane, 58 + column] = scales[1][n // 2 * (lane // 64) + row].view(np.uint32)[0]
    descriptor = 1 << 7 | 1 << 10 | n // 8 << 17 | 1 << 27
    code = f"""mov.u64 %q5, {matrix_descriptor(0, 16 * 64, 128)}; mov.u64 %q6, {matrix_descriptor(2048, 8 * n, 128)};
    mov.u32 %r25, {descriptor}; add.s32 %r26, %r20, 56; add.s32 %r27, %r20, 58; setp.ne.s32 %p5, 0, 0;
    tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 [%r20], %q5, %q6, %r25, [%r26], [%r27], %p5;"""
    result = run_tensor_code(code, shared, cells).view(np.float32)
    expected = dequantize(codes[0], scales[0]) @ dequantize(codes[1], scales[1]).T
    for rank in range(2):
        for lane in range(128):
            part = expected[64 * rank + lane % 64, n // 2 * (lane // 64) : n // 2 * (lane // 64 + 1)]
            assert np.array_equal(result[rank, lane, : n // 2], part.astype(np.float32))


@pytest.mark.parametrize(("kind", "m", "n", "ctas"), [
    ("f16", 64, 12, 1), ("f16", 32, 16, 1), ("f16", 64, 32, 2), ("f16", 256, 32, 1), ("f16", 256, 24, 2),
    ("f16", 128, 0, 1), ("f16", 128, 264, 1), ("mxf4nvf4", 64, 16, 1), ("mxf4nvf4", 256, 16, 1),
])  # fmt: skip
def test_impossible_shapes_are_refused(kind: str, m: int, n: int, ctas: int) -> None:
    descriptor = InstructionDescriptor(m, n, "", "", "e4m3" if kind == "mxf4nvf4" else "", False)
    with pytest.raises(UnsupportedError, match="M = "):
        check_shape(descriptor, ctas)


@pytest.mark.parametrize("bit", [2, 3, 5, 9, 12, 23, 29, 30])
def test_unknown_descriptor_bits_are_refused(bit: int) -> None:
    with pytest.raises(UnsupportedError, match="instruction descriptor"):
        InstructionDescriptor.decode(half_descriptor(128, 64) | 1 << bit, "f16")


@pytest.mark.parametrize("bits", [1 << 14, 1 << 30, 1 << 47, 1 << 49, 1 << 52, 1 << 61, 3 << 61, 7 << 61])
def test_unknown_matrix_descriptors_are_refused(bits: int) -> None:
    MatrixDescriptor.decode(1 << 46)
    with pytest.raises(UnsupportedError, match="matrix descriptor"):
        MatrixDescriptor.decode(1 << 46 | bits)
