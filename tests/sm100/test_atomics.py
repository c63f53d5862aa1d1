"""atom and red: what they leave in memory and what they return, in global and in shared memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.support.snippets import LANES, launch

PROLOGUE = """mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 3; mov.u32 %r10, dynamic;
    ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; ld.param.b64 %q2, [p2];
    """


def update(operation: str, dtype: str, cells: np.ndarray, operands: np.ndarray, shared: bool) -> np.ndarray:
    """Lane i applies ``operation`` with ``operands[i]`` to ``cells[i % 4]``, changed in place; what each lane gets."""
    size = cells.itemsize
    results = np.zeros(LANES, cells.dtype)
    names = {2: "%h", 4: "%r", 8: "%q"}
    operand, result = f"{names[size]}20", f"{names[size]}21"
    bits = 8 * size
    if shared:
        where = "%r12"
        space = "shared"
        before = f"""setp.gt.u32 %p0, %r0, 3;
            mad.lo.s32 %r11, %r0, {size}, %r10; mad.wide.u32 %q3, %r0, {size}, %q0;
            @%p0 bra READY;
            ld.global.b{bits} {result}, [%q3]; st.shared.b{bits} [%r11], {result};
            READY: bar.sync 0;
            mad.lo.s32 %r12, %r1, {size}, %r10;"""
        after = f"bar.sync 0; @%p0 ret; ld.shared.b{bits} {result}, [%r11]; st.global.b{bits} [%q3], {result};"
    else:
        where, space, before, after = "%q3", "global", f"mad.wide.u32 %q3, %r1, {size}, %q0;", ""
    body = f"""{PROLOGUE}{before}
    mad.wide.u32 %q4, %r0, {size}, %q1; mad.wide.u32 %q5, %r0, {size}, %q2;
    ld.global.b{bits} {operand}, [%q4];
    atom.{space}.{operation}.{dtype} {result}, [{where}], {operand};
    st.global.b{bits} [%q5], {result};
    {after} ret;"""
    launch(body, [cells, operands, results], shared=64)
    return results


INTEGERS: dict[str, Callable[[int, int], int]] = {
    "add": lambda old, new: (old + new) % 2**32,
    "min": min,
    "max": max,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "exch": lambda old, new: new,
    "inc": lambda old, new: 0 if old >= new else old + 1,
    "dec": lambda old, new: new if old == 0 or old > new else old - 1,
}


@pytest.mark.parametrize("shared", [False, True], ids=["global", "shared"])
@pytest.mark.parametrize("operation", INTEGERS)
def test_unsigned(operation: str, shared: bool) -> None:
    random = np.random.default_rng(1)
    cells, operands = (random.integers(0, 2**32, n, dtype=np.uint32) for n in (4, LANES))
    cells[0] = 0
    expected, returned = cells.tolist(), []
    for lane, operand in enumerate(operands.tolist()):
        returned.append(expected[lane % 4])
        expected[lane % 4] = INTEGERS[operation](expected[lane % 4], operand)
    dtype = "b32" if operation in ("and", "or", "xor", "exch") else "u32"
    assert update(operation, dtype, cells, operands, shared).tolist() == returned
    assert cells.tolist() == expected


def test_signed_minimum() -> None:
    cells, operands = np.full(4, 5, np.int32), np.arange(LANES, dtype=np.int32) - 16
    update("min", "s32", cells, operands, False)
    assert cells.tolist() == [-16, -15, -14, -13]


def test_sums_of_floats_flush_subnormals_in_global_memory_only() -> None:
    tiny = np.float32(1e-40)
    for shared in (False, True):
        cells = np.array([1.0, 0.0, tiny, 3.0], np.float32)
        update("add", "f32", cells, np.where(np.arange(LANES) % 4 == 0, np.float32(0.1), tiny), shared)
        one = np.float32(1)
        for _ in range(8):
            one += np.float32(0.1)
        small = np.float32(0)
        for _ in range(8):
            small += tiny
        assert cells.tolist() == [one, small if shared else 0, small + tiny if shared else 0, 3.0]


@pytest.mark.parametrize("name", ["f16x2", "bf16x2"])
def test_sums_of_packed_halves(name: str) -> None:
    whole = np.arange(2 * LANES, dtype=np.float32) % 8
    raw = whole.astype(np.float16).view(np.uint16) if name == "f16x2" else (whole.view(np.uint32) >> 16)
    operands = np.ascontiguousarray(raw.astype(np.uint16)).view(np.uint32)
    cells = np.zeros(4, np.uint32)
    update("add.noftz", name, cells, operands, False)
    halves = cells.view(np.uint16)
    values = halves.view(np.float16) if name == "f16x2" else (halves.astype(np.uint32) << 16).view(np.float32)
    assert values.tolist() == whole.reshape(-1, 8).sum(0).tolist()


@pytest.mark.parametrize("width", [2, 4])
def test_vectors_of_floats(width: int) -> None:
    cells, operands = np.zeros(4 * width, np.float32), np.arange(LANES * width, dtype=np.float32)
    items = ", ".join(f"%r{20 + i}" for i in range(width))
    body = f"""{PROLOGUE}
    mad.wide.u32 %q3, %r1, {4 * width}, %q0; mad.wide.u32 %q4, %r0, {4 * width}, %q1;
    ld.global.v{width}.b32 {{{items}}}, [%q4];
    red.relaxed.gpu.global.add.v{width}.f32 [%q3], {{{items}}};
    ret;"""
    launch(body, [cells, operands, np.zeros(1)])
    assert cells.tolist() == operands.reshape(-1, 4 * width).sum(0).tolist()


def test_compare_and_swap_is_done_by_one_lane() -> None:
    cells, winners = np.array([7], np.uint32), np.zeros(LANES, np.uint32)
    body = f"""{PROLOGUE} add.s32 %r2, %r0, 100; mad.wide.u32 %q4, %r0, 4, %q1;
    atom.global.cas.b32 %r3, [%q0], 7, %r2;
    st.global.b32 [%q4], %r3; ret;"""
    launch(body, [cells, winners, np.zeros(1)])
    assert cells[0] == 100 and winners.tolist() == [7] + [100] * (LANES - 1)


@pytest.mark.parametrize("operation", ["min.f32", "add.u16", "inc.s32", "exch.f16", "and.f32"])
def test_operations_that_do_not_exist_are_refused(operation: str) -> None:
    with pytest.raises(UnsupportedError):
        launch(f"ret; red.global.{operation} [%q0], %{'h' if '16' in operation else 'r'}0;", [])
