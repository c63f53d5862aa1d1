"""wgmma against a matrix product, with fragments and shared memory laid out by the PTX ISA's own formulas."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator import Options, UnsupportedError
from tests.sm100.emulator.formats import E4M3, E5M2, from_bf16, to_bf16, to_e4m3, to_e5m2
from tests.sm100.support.warpgroup_snippets import (
    COMMIT,
    FENCE,
    WAIT,
    accumulator_fragments,
    descriptor,
    multiply,
    operand_fragments,
    run,
)

SIZE = 40960
B_OFFSET = 8192
SPANS = {0: 0, 32: 3, 64: 2, 128: 1}
"""Layouts by swizzle span."""
ENCODE = {"bf16": to_bf16, "f16": lambda x: x.astype(np.float16).view(np.uint16), "e4m3": to_e4m3, "e5m2": to_e5m2}
DECODE = {
    "bf16": from_bf16, "f16": lambda x: x.view(np.float16).astype(np.float32), "e4m3": lambda x: E4M3[x],
    "e5m2": lambda x: E5M2[x],
}  # fmt: skip


def operand(rows: int, kind: str, seed: int) -> np.ndarray:
    """The bits of [rows, K], with outliers."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, 16 if "f16" in kind else 32)).astype(np.float32)
    values[rows // 2, 3], values[1, 7] = 300.0, -(2.0**-8)
    return ENCODE[kind](values)


def swizzled(address: int, span: int) -> int:
    """The ISA's swizzle: units of 16 bytes exchanged by the number of the 128-byte row."""
    return address ^ (address >> 7 & {0: 0, 32: 1, 64: 3, 128: 7}[span]) << 4


def place(matrix: np.ndarray, span: int, across: bool, offset: int = 0) -> tuple[np.ndarray, int, int]:
    """An operand [rows, K] in shared memory of SIZE bytes: bytes, leading and stride offsets; element by element."""
    memory, size = np.zeros(SIZE, np.uint8), matrix.itemsize
    rows, depth = matrix.shape
    unit, leading, stride = 16 // size, 0, 0
    for row in range(rows):
        for k in range(depth):
            along, other = (row, k) if across else (k, row)
            if span == 0:
                # Core matrices: 8 by 16 bytes, 128 bytes each; one after the other along the rows, then along K.
                along_step, other_step = (128, rows * 16) if across else (rows * 16, 128)
                leading, stride = (other_step, along_step) if across else (along_step, other_step)
                at = along // unit * along_step + other // 8 * other_step + other % 8 * 16 + along % unit * size
            else:
                # Atoms: 8 by the span, one after the other along what is contiguous, then the other way.
                atom, width = 8 * span, span // size
                count = -(-(rows if across else depth) // width)
                leading, stride = atom, atom * count
                at = along // width * atom + other // 8 * stride + other % 8 * span + along % width * size
                at = swizzled(at, span)
            memory[offset + at : offset + at + size] = np.frombuffer(matrix[row, k].tobytes(), np.uint8)
    return memory, leading, stride


def expected(a: np.ndarray, b: np.ndarray, before: np.ndarray, kind: str, sign: int = 1) -> np.ndarray:
    kinds = kind.split(".") * (1 if "." in kind else 2)
    product = DECODE[kinds[0]](a).astype(np.float64) @ DECODE[kinds[1]](b).astype(np.float64).T
    return (before + sign * product).astype(np.float32)


def accumulators(columns: int) -> np.ndarray:
    return np.random.default_rng(9).standard_normal((64, columns)).astype(np.float32)


def check(
    columns: int, kind: str, *, spans: tuple[int, int] = (128, 128), across: tuple[bool, bool] = (False, False),
    registers: bool = False, signs: tuple[int, int] = (1, 1), options: Options | None = None, keep: bool = True,
) -> None:  # fmt: skip
    kinds = kind.split(".") * (1 if "." in kind else 2)
    a, b, before = operand(64, kinds[0], 1), operand(columns, kinds[1], 2), accumulators(columns)
    left, a_leading, a_stride = place(a, spans[0], across[0])
    right, leading, stride = place(b, spans[1], across[1], B_OFFSET)
    trans = [int(one) for one in across]
    rest = ", ".join(map(str, [*signs, *(trans[1:] if registers else trans)] if "f16" in kind else signs))
    where = None if registers else descriptor(0, a_leading, a_stride, SPANS[spans[0]])
    code = FENCE + multiply(
        columns, where, descriptor(B_OFFSET, leading, stride, SPANS[spans[1]]), kind=kind, rest=rest,
        keep="%p1" if keep else "%p2",
    ) + COMMIT + WAIT  # fmt: skip
    found = run(code, left | right, operand_fragments(a) if registers else None, accumulator_fragments(before), options)
    wanted = expected(a, b, before if keep else np.zeros_like(before), kind, signs[0] * signs[1])
    assert np.array_equal(found, accumulator_fragments(wanted))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("columns", [8, 24, 64, 256])
@pytest.mark.parametrize("registers", [False, True], ids=["A shared", "A in registers"])
def test_half_precision(kind: str, columns: int, registers: bool) -> None:
    check(columns, kind, registers=registers)


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("across", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_layouts(span: int, across: tuple[bool, bool]) -> None:
    check(64, "bf16", spans=(span, span), across=across)


@pytest.mark.parametrize("span", SPANS)
def test_mn_major_b_with_a_in_registers(span: int) -> None:
    check(128, "bf16", spans=(0, span), across=(False, True), registers=True)


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1), (-1, -1)])
def test_signs(signs: tuple[int, int]) -> None:
    check(16, "bf16", signs=signs, registers=True)


def test_accumulators_are_overwritten_without_scale_d() -> None:
    check(32, "bf16", keep=False)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e4m3.e5m2", "e5m2.e4m3"])
@pytest.mark.parametrize("registers", [False, True], ids=["A shared", "A in registers"])
def test_eight_bits(kind: str, registers: bool) -> None:
    check(40, kind, registers=registers)


@pytest.mark.parametrize(
    "options", [Options("random", seed) for seed in range(3)] + [Options("starved", 4, "warpgroup")], ids=str
)
def test_engine_that_acts_later(options: Options) -> None:
    check(64, "bf16", options=options, registers=True)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("span", [32, 64, 128])
def test_base_offset(span: int, across: bool) -> None:
    """The swizzle begins at a row of 128 bytes whose number is no multiple of eight."""
    a, b = operand(64, "bf16", 1), operand(64, "bf16", 2)
    for base in (1, 3, 6):
        start = B_OFFSET + 128 * base
        memory, leading, stride = place(b, span, across, start)
        code = multiply(64, None, descriptor(start, leading, stride, SPANS[span], base), rest=f"1, 1, {int(across)}")
        before = accumulators(64)
        found = run(FENCE + code + COMMIT + WAIT, memory, operand_fragments(a), accumulator_fragments(before))
        assert np.array_equal(found, accumulator_fragments(expected(a, b, before, "bf16")))


def test_steps_along_k_within_a_swizzle_atom() -> None:
    """Start addresses 32 bytes apart; the sums are exact."""
    random = np.random.default_rng(5)
    a, b = (to_bf16(random.integers(-8, 9, (rows, 64)).astype(np.float32)) for rows in (64, 96))
    left, leading, stride = place(a, 128, False)
    right, _, _ = place(b, 128, False, B_OFFSET)
    code = FENCE
    for step in range(4):
        places = (descriptor(start + 32 * step, leading, stride, SPANS[128]) for start in (0, B_OFFSET))
        code += multiply(96, *places, keep="%p1" if step else "%p2")
    found = run(code + COMMIT + WAIT, left | right, None, np.full((128, 48), np.nan, np.float32))
    assert np.array_equal(found, accumulator_fragments(expected(a, b, np.zeros((64, 96)), "bf16")))


STATEMENT = multiply(16, None, descriptor(B_OFFSET, 8192, 1024, 1), rest="1, 1, 0")
REFUSED = {
    "sparsity": (STATEMENT.replace("mma_async", "mma_async.sp"), "sp"),
    "tf32": (STATEMENT.replace("k16.f32.bf16.bf16", "k8.f32.tf32.tf32"), "types"),
    "integers": (STATEMENT.replace("k16.f32.bf16.bf16", "k32.s32.s8.s8"), "types"),
    "fp16 accumulators": (STATEMENT.replace("f32.bf16.bf16", "f16.f16.f16"), "types"),
    "mixed halves": (STATEMENT.replace("f32.bf16.bf16", "f32.bf16.f16"), "by .f16"),
    "another depth": (STATEMENT.replace("k16", "k32"), "shape"),
    "another N": (STATEMENT.replace("n16", "n12"), "shape"),
    "fewer accumulators": (STATEMENT.replace("n16", "n24"), "accumulators"),
    "an accumulator twice": (STATEMENT.replace("%r65", "%r64", 1), "twice"),
    "another sign": (STATEMENT.replace("1, 1, 0;", "2, 1, 0;"), "expected 1 or -1"),
    "an operand too many": (STATEMENT.replace("1, 1, 0;", "1, 1, 0, 0;"), "operands"),
    "a reserved bit": (multiply(16, None, descriptor(B_OFFSET) | 1 << 46, rest="1, 1, 0"), "matrix descriptor"),
    "a base offset without swizzle": (multiply(16, None, descriptor(0, base=1), rest="1, 1, 0"), "matrix descriptor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    code, report = REFUSED[what]
    with pytest.raises(UnsupportedError, match=report):
        run(FENCE + code + COMMIT + WAIT, np.zeros(SIZE, np.uint8), None, np.zeros((128, 8), np.float32))


def test_sm_100a_has_no_wgmma() -> None:
    with pytest.raises(UnsupportedError, match="sm_90a alone"):
        run(FENCE + STATEMENT, np.zeros(SIZE, np.uint8), None, np.zeros((128, 8), np.float32), target="sm_100a")
