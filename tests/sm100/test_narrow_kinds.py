"""tcgen05.mma of kinds f8f6f4, mxf8f6f4 and mxf4: operands of 4, 6 and 8 bits, scale blocks of 32."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.emulator.mma_descriptors import KINDS, InstructionDescriptor
from tests.sm100.support.narrow_operands import TYPES, NarrowOperand, scale_cells
from tests.sm100.support.tensor_snippets import core_matrices, matrix_descriptor, run_tensor_code

M, N = 128, 48
B_OFFSET = 8192
SCALES = 48
"""First column of the scales of a; those of b come 8 columns later."""


def multiply(
    kind: str, a: np.ndarray, b: np.ndarray, descriptor: int, scales: tuple[np.ndarray, np.ndarray] | None = None,
    places: tuple[int, int] = (0, 0), tagged: bool = False,
) -> np.ndarray:  # fmt: skip
    """fp32 [M, N] of one instruction on K-major operand bytes [rows, 32]; ``tagged`` scale addresses name the byte."""
    shared = np.zeros((1, 10240), np.uint8)
    shared[0, : a.size], shared[0, B_OFFSET : B_OFFSET + b.size] = core_matrices(a), core_matrices(b)
    cells = np.zeros((1, 128, 64), np.uint32)
    operands = ""
    if scales is not None:
        for which, (values, place) in enumerate(zip(scales, places, strict=True)):
            found = scale_cells(values, place)
            cells[0, :, SCALES + 8 * which : SCALES + 8 * which + found.shape[1]] = found
        operands = " [%r26], [%r27],"
    tags = [place << 30 if tagged else 0 for place in places]
    starts = matrix_descriptor(0, 16 * M, 128), matrix_descriptor(B_OFFSET, 16 * N, 128)
    code = f"""mov.u64 %q5, {starts[0]}; mov.u64 %q6, {starts[1]};
    mov.u32 %r25, {descriptor}; setp.ne.s32 %p5, 0, 0;
    add.s32 %r26, %r20, {SCALES + tags[0]}; add.s32 %r27, %r20, {SCALES + 8 + tags[1]};
    tcgen05.mma.cta_group::1.kind::{kind} [%r20], %q5, %q6, %r25,{operands} %p5;"""
    return run_tensor_code(code, shared, cells)[0, :, :N].view(np.float32)


def plain_descriptor(a: NarrowOperand, b: NarrowOperand) -> int:
    """Instruction descriptor of kind f8f6f4, K-major, fp32 accumulation."""
    return 1 << 4 | a.number << 7 | b.number << 10 | N // 8 << 17 | M // 16 << 24


def scaled_descriptor(a: int, b: int, places: tuple[int, int] = (0, 0)) -> int:
    """Instruction descriptor of a kind with UE8M0 scales, by the numbers of the types."""
    return places[1] << 4 | a << 7 | b << 10 | N // 8 << 17 | 1 << 23 | M // 128 << 27 | places[0] << 29


def random_scales(rows: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """UE8M0 bytes [rows, count] around one, and their values."""
    codes = np.random.default_rng(seed).integers(120, 135, (rows, count), dtype=np.uint8)
    return codes, 2.0 ** (codes.astype(np.float64) - 127)


@pytest.mark.parametrize(("left", "right"), list(product(TYPES, TYPES)))
def test_f8f6f4_of_any_two_types(left: str, right: str) -> None:
    a, b = NarrowOperand.random(left, M, 32, 1), NarrowOperand.random(right, N, 32, 2)
    found = multiply("f8f6f4", a.padded(), b.padded(), plain_descriptor(a, b))
    assert np.array_equal(found, (a.values() @ b.values().T).astype(np.float32))


def test_tf32_ignores_the_lowest_13_bits() -> None:
    random = np.random.default_rng(9)
    a, b = (random.integers(-500, 501, (rows, 8)).astype(np.float32) for rows in (M, N))

    def noisy(values: np.ndarray) -> np.ndarray:
        low = random.integers(0, 1 << 13, values.shape, dtype=np.uint32)
        return (values.view(np.uint32) | low).view(np.uint8)

    found = multiply("tf32", noisy(a), noisy(b), 1 << 4 | 2 << 7 | 2 << 10 | N // 8 << 17 | M // 16 << 24)
    assert np.array_equal(found, a @ b.T)


@pytest.mark.parametrize(("left", "right"), [("e4m3", "e4m3"), ("e4m3", "e2m1"), ("e2m3", "e5m2"), ("e2m1", "e3m2")])
@pytest.mark.parametrize("places", [(0, 0), (1, 3), (2, 0)])
@pytest.mark.parametrize("tagged", [True, False])
def test_mxf8f6f4_scales_rows_by_blocks_of_32(left: str, right: str, places: tuple[int, int], tagged: bool) -> None:
    a, b = NarrowOperand.random(left, M, 32, 3), NarrowOperand.random(right, N, 32, 4)
    (codes_a, scales_a), (codes_b, scales_b) = random_scales(M, 1, 5), random_scales(N, 1, 6)
    descriptor = scaled_descriptor(a.number, b.number, places)
    suffix = "" if tagged else ".scale_vec::1X"
    found = multiply(
        f"mxf8f6f4.block_scale{suffix}", a.padded(), b.padded(), descriptor, (codes_a, codes_b), places, tagged
    )
    expected = (a.values() * scales_a) @ (b.values() * scales_b).T
    assert np.array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("kind", ["mxf4.block_scale", "mxf4.block_scale.block32", "mxf4nvf4.block_scale.scale_vec::2X"])
@pytest.mark.parametrize("places", [(0, 0), (2, 0), (0, 2)])
def test_four_bits_with_blocks_of_32(kind: str, places: tuple[int, int]) -> None:
    a, b = NarrowOperand.random("e2m1", M, 64, 7), NarrowOperand.random("e2m1", N, 64, 8)
    (codes_a, scales_a), (codes_b, scales_b) = random_scales(M, 2, 9), random_scales(N, 2, 10)
    found = multiply(kind, a.packed(), b.packed(), scaled_descriptor(1, 1, places), (codes_a, codes_b), places)
    wide = [np.repeat(scales, 32, axis=1) for scales in (scales_a, scales_b)]
    assert np.array_equal(found, ((a.values() * wide[0]) @ (b.values() * wide[1]).T).astype(np.float32))


def test_scales_that_are_no_number_spread() -> None:
    a, b = NarrowOperand.random("e4m3", M, 32, 3), NarrowOperand.random("e4m3", N, 32, 4)
    scales, other = random_scales(M, 1, 5)[0], random_scales(N, 1, 6)[0]
    scales[7] = 0xFF
    found = multiply("mxf8f6f4.block_scale", a.padded(), b.padded(), scaled_descriptor(0, 0), (scales, other))
    assert np.isnan(found[7]).all() and np.isfinite(np.delete(found, 7, axis=0)).all()


def test_eight_bits_across_rows_without_a_swizzle() -> None:
    """MN-major: core matrices of 8 of K by 16 rows."""
    a, b = NarrowOperand.random("e4m3", M, 32, 11), NarrowOperand.random("e5m2", N, 32, 12)

    def across(codes: np.ndarray) -> np.ndarray:
        rows, k = codes.shape
        return codes.reshape(rows // 16, 16, k // 8, 8).transpose(2, 0, 3, 1).ravel()

    shared = np.zeros((1, 10240), np.uint8)
    shared[0, : a.codes.size], shared[0, B_OFFSET : B_OFFSET + b.codes.size] = across(a.codes), across(b.codes)
    starts = (matrix_descriptor(0, 8 * M, 128), matrix_descriptor(B_OFFSET, 8 * N, 128))
    code = f"""mov.u64 %q5, {starts[0]}; mov.u64 %q6, {starts[1]};
    mov.u32 %r25, {plain_descriptor(a, b) | 3 << 15}; setp.ne.s32 %p5, 0, 0;
    tcgen05.mma.cta_group::1.kind::f8f6f4 [%r20], %q5, %q6, %r25, %p5;"""
    found = run_tensor_code(code, shared, np.zeros((1, 128, N), np.uint32))[0].view(np.float32)
    assert np.array_equal(found, (a.values() @ b.values().T).astype(np.float32))


def test_operand_a_of_eight_bits_in_tensor_memory() -> None:
    a, b = NarrowOperand.random("e5m2", M, 32, 13), NarrowOperand.random("e2m1", N, 32, 14)
    shared = np.zeros((1, 2048), np.uint8)
    shared[0, : 32 * N] = core_matrices(b.padded())
    cells = np.zeros((1, 128, 64), np.uint32)
    cells[0, :, :8] = a.codes.view(np.uint32)
    code = f"""add.s32 %r24, %r20, 8; mov.u64 %q5, {matrix_descriptor(0, 16 * N, 128)};
    mov.u32 %r25, {plain_descriptor(a, b)}; setp.ne.s32 %p5, 0, 0;
    tcgen05.mma.cta_group::1.kind::f8f6f4 [%r24], [%r20], %q5, %r25, %p5;"""
    found = run_tensor_code(code, shared, cells)[0, :, 8 : 8 + N].view(np.float32)
    assert np.array_equal(found, (a.values() @ b.values().T).astype(np.float32))
    with pytest.raises(UnsupportedError, match="operand A of 128 rows in tensor memory"):
        run_tensor_code(code.replace(f"{plain_descriptor(a, b)}", f"{plain_descriptor(b, b)}"), shared, cells)


REFUSED = {
    "no such type": ("f8f6f4", 0, 1 << 4 | 2 << 7),
    "fp16 accumulation": ("f8f6f4", 0, 0),
    "sparsity": ("f8f6f4", 0, 1 << 4 | 1 << 2),
    "four bits across": ("f8f6f4", 0, 1 << 4 | 5 << 7 | 1 << 15),
    "E4M3 scales of 32": ("mxf8f6f4", 0, 1 << 27),
    "E4M3 scales of FP4's 32": ("mxf4nvf4", 32, 1 << 7 | 1 << 10 | 1 << 27),
    "two scales from an odd byte": ("mxf4", 0, 1 << 7 | 1 << 10 | 1 << 23 | 1 << 29),
    "four scales from a later byte": ("mxf4nvf4", 16, 1 << 7 | 1 << 10 | 1 << 29),
    "FP4 as eight bits": ("mxf4", 0, 1 << 23),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_kind_does_not_have_is_refused(what: str) -> None:
    kind, block, raw = REFUSED[what]
    with pytest.raises(UnsupportedError, match="instruction descriptor|scales of"):
        InstructionDescriptor.decode(raw, kind, block)


def test_each_kind_takes_32_bytes_of_k() -> None:
    for known in KINDS.values():
        bits = {"tf32": 32, "f16": 16, "bf16": 16, "e2m1": 4}
        assert all(known.depth * bits.get(name, 8) == 256 for name in known.types.values())
