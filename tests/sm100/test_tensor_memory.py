"""tcgen05.ld, st and cp reach the cells that CuTeDSL's copy atoms and the PTX ISA name."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from tests.sm100.emulator.engines import Options
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.support.tensor_snippets import core_matrices, matrix_descriptor, run_tensor_code

SHAPES = ["16x64b", "16x128b", "16x256b", "16x32bx2"]
NOTHING = np.zeros((1, 2048), np.uint8)


@pytest.mark.parametrize("repetition", [1, 4, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_cutedsl_stores_in_one_shape_it_loads_in_another(shape: str, repetition: int) -> None:
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]
    from cutlass.cute.runtime import from_dlpack

    from tests.sm100.emulator import emulated
    from tests.sm100.support.tensor_transfer import compiled_round_trip

    columns = {1: 32, 4: 64, 128: 256}[repetition]
    source = torch.arange(128 * columns, dtype=torch.float32).reshape(128, columns)
    for pair in ((shape, "32x32b"), ("32x32b", shape)):
        compiled = compiled_round_trip(*pair, repetition, columns)
        found = re.findall(r"tcgen05\.(st|ld)\.sync\.aligned\.(\w+)\.x", compiled.ptx)
        assert set(found) == {("st", pair[0]), ("ld", pair[1])}
        target = torch.zeros_like(source)
        with emulated(reads=[source], writes=[target]) as emulator:
            tensors = (from_dlpack(tensor, assumed_align=16) for tensor in (source, target))
            emulator(compiled, *tensors, cuda.CUstream(0))
        assert torch.equal(source, target)


# Element (thread, register) of a load as (lane, position), position counting 32-bit items along the lane.
# Thread bits and register bits as CUTLASS's copy traits of these shapes state them.
EXPECTED = {
    "32x32b": lambda t, r, count: (t, r),
    "16x32bx2": lambda t, r, count: (t % 16, t // 16 * count + r),
    "16x64b": lambda t, r, count: (t % 2 * 8 + t // 4, t // 2 % 2 + 2 * r),
    "16x128b": lambda t, r, count: (t // 4 + r % 2 * 8, t % 4 + r // 2 * 4),
    "16x256b": lambda t, r, count: (t // 4 + r // 2 % 2 * 8, t % 4 * 2 + r % 2 + r // 4 * 8),
}
PER_REPETITION = {"32x32b": 1, "16x32bx2": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}


@pytest.mark.parametrize(("shape", "half"), [("32x32b", 0), *((shape, half) for shape in SHAPES for half in (0, 16))])
def test_packed_transfers_move_the_low_halves(shape: str, half: int) -> None:
    count = 2
    registers = count * PER_REPETITION[shape]
    names = [f"%r{40 + i}" for i in range(registers)]
    split = f", {2 * count}" if shape == "16x32bx2" else ""
    show = [f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r23+{32 + i}], {{{name}}};" for i, name in enumerate(names)]
    code = f"""add.s32 %r24, %r23, {half << 16};
    tcgen05.ld.sync.aligned.{shape}.x{count}.pack::16b.b32 {{{", ".join(names)}}}, [%r24]{split};
    tcgen05.wait::ld.sync.aligned;
    {" ".join(show)}
    tcgen05.st.sync.aligned.{shape}.x{count}.unpack::16b.b32 [%r24+64]{split}, {{{", ".join(names)}}};"""
    cells = np.random.default_rng(1).integers(0, 2**32, (1, 128, 96), dtype=np.uint32)
    result = run_tensor_code(code, NOTHING, cells, every_warp=True)[0]
    for warp in range(4):
        for thread in range(32):
            for register in range(registers):
                lane, position = EXPECTED[shape](thread, register, count)
                lane += 32 * warp + half
                low, high = (int(cells[0, lane, 2 * position + i]) & 0xFFFF for i in (0, 1))
                assert result[32 * warp + thread, 32 + register] == low | high << 16
                assert [int(result[lane, 64 + 2 * position + i]) & 0xFFFF for i in (0, 1)] == [low, high]


def test_split_of_the_two_halves() -> None:
    code = """tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {%r40, %r41}, [%r23+1], 5;
    tcgen05.wait::ld.sync.aligned;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r23+8], {%r40, %r41};"""
    cells = np.arange(128 * 16, dtype=np.uint32).reshape(1, 128, 16)
    result = run_tensor_code(code, NOTHING, cells, every_warp=True)[0]
    for thread in range(128):
        lane, start = thread // 32 * 32 + thread % 16, 6 if thread % 32 >= 16 else 1
        assert result[thread, 8:10].tolist() == cells[0, lane, start : start + 2].tolist()


@pytest.mark.parametrize(("code", "error"), [
    ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r40}, [%r20];", HazardError),
    ("tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r40}, [%r24];", HazardError),
    ("tcgen05.ld.sync.aligned.16x128b.x128.b32 {%r40}, [%r23];", UnsupportedError),
    ("tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {%r40, %r41}, %r42, [%r23];", UnsupportedError),
], ids=["another quarter", "lane 8", "too many registers", "reduction"])  # fmt: skip
def test_wrong_transfers_are_refused(code: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        run_tensor_code(
            f"add.s32 %r24, %r23, {8 << 16};\n{code}", NOTHING, np.zeros((1, 128, 8), np.uint32), every_warp=True
        )


def expected_lanes(shape: str, row: int) -> list[int]:
    """Lanes that row ``row`` of tcgen05.cp goes to (PTX ISA, tcgen05.cp: shapes and multicast)."""
    return {
        "128x256b": [row],
        "128x128b": [row],
        "32x128b.warpx4": [row, row + 32, row + 64, row + 96],
        "64x128b.warpx2::02_13": [row, row + 64],
        "64x128b.warpx2::01_23": [row, row + 32] if row < 32 else [row + 32, row + 64],
        "4x256b": [32 * row + 31],
    }[shape]


@pytest.mark.parametrize("mode", ["immediate", "random"])
@pytest.mark.parametrize(
    "shape", ["128x256b", "128x128b", "32x128b.warpx4", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23", "4x256b"]
)
def test_copies_from_shared_memory(shape: str, mode: str) -> None:
    rows, bits = (int(number) for number in re.findall(r"\d+", shape)[:2])
    values = np.random.default_rng(2).integers(0, 256, (max(rows, 8), bits // 8), dtype=np.uint8)
    shared = np.zeros((1, 4096), np.uint8)
    shared[0, : values.size] = core_matrices(values)
    before = np.random.default_rng(3).integers(0, 2**32, (1, 128, 16), dtype=np.uint32)
    descriptor = matrix_descriptor(0, 16 * len(values), 128)
    start = 31 << 16 if shape == "4x256b" else 0
    code = f"""add.s32 %r24, %r20, {start + 4}; mov.u64 %q5, {descriptor};
    tcgen05.cp.cta_group::1.{shape} [%r24], %q5;"""
    result = run_tensor_code(code, shared, before, Options(mode, 1))[0]  # type: ignore[arg-type]
    expected = before[0].copy()
    for row in range(rows):
        for lane in expected_lanes(shape, row):
            expected[lane, 4 : 4 + bits // 32] = values[row].view(np.uint32)
    assert np.array_equal(result, expected)
