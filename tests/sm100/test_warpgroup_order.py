"""Accesses to registers and shared memory that wgmma uses must be ordered, whatever the engine's timing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator import DeadlockError, HazardError, Options
from tests.sm100.support.snippets import launch
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

SIZE = 4096
COLUMNS = 16
B = descriptor(0, 256, 128)
MULTIPLY = multiply(COLUMNS, None, B, rest="1, 1, 0")
SHARED_A = multiply(COLUMNS, descriptor(0, 1024, 128), B)
OPTIONS = [Options(), Options("random", 1), Options("starved", 2, "warpgroup")]


def execute(code: str, options: Options | None = None, **keywords: str) -> np.ndarray:
    """Zeros times zeros: what matters is the order."""
    held = np.zeros((128, 4), np.uint32)
    return run(code, np.zeros(SIZE, np.uint8), held, np.zeros((128, COLUMNS // 2), np.float32), options, **keywords)


HAZARDS = {
    "no fence": (MULTIPLY + COMMIT + WAIT, "without wgmma.fence since"),
    "accumulator written since the fence": (
        FENCE + "add.f32 %r66, %r66, %r66;" + MULTIPLY + COMMIT + WAIT, "without wgmma.fence since"
    ),
    "accumulator read since the fence": (
        FENCE + "add.f32 %r10, %r66, %r66;" + MULTIPLY + COMMIT + WAIT, "without wgmma.fence since"
    ),
    "A written since the fence": (
        FENCE + "add.s32 %r61, %r61, 1;" + MULTIPLY + COMMIT + WAIT, "without wgmma.fence since"
    ),
    "A moved from a register written since the fence": (
        FENCE + "add.s32 %r10, %r10, 1; mov.b32 %r61, %r10;" + MULTIPLY + COMMIT + WAIT,
        "without wgmma.fence since",
    ),
    "no wait": (FENCE + MULTIPLY + COMMIT, "in flight accumulates"),
    "no commit": (FENCE + MULTIPLY + WAIT, "in flight accumulates"),
    "a wait for all but the last group": (
        FENCE + MULTIPLY + COMMIT + MULTIPLY + COMMIT + WAIT.replace("0", "1"), "in flight accumulates"
    ),
    "accumulator written in flight": (
        FENCE + MULTIPLY + COMMIT + "mov.b32 %r71, 0;" + WAIT, "in flight accumulates"
    ),
    "A written in flight": (FENCE + MULTIPLY + COMMIT + "mov.b32 %r60, 0;" + WAIT, "in flight reads"),
    "A loaded in flight": (FENCE + MULTIPLY + COMMIT + "ld.shared.b32 %r60, [%r1];" + WAIT, "in flight reads"),
    "another shape without a fence": (
        FENCE + MULTIPLY + multiply(8, None, B, rest="1, 1, 0") + COMMIT + WAIT, "another shape"
    ),
    "A from accumulators in flight": (
        FENCE + MULTIPLY + MULTIPLY.replace("{%r60, %r61, %r62, %r63}", "{%r64, %r65, %r66, %r67}") + COMMIT + WAIT,
        "accumulators of one in flight",
    ),
    "shared memory written in flight": (
        FENCE + MULTIPLY + COMMIT + "st.shared.b32 [%r2], %r0;" + WAIT,
        "(write of shared memory .* its read|read of shared memory .* its write)",
    ),
    "shared memory written by others before the wait is known": (
        FENCE + MULTIPLY + COMMIT
        + "setp.gt.u32 %p3, %r0, 31; @%p3 bra HERE; st.shared.b32 [%r1], %r0; HERE: bar.warp.sync -1;" + WAIT,
        "shared memory .* (its read|its write)",
    ),
    "A in shared memory never written": (
        FENCE + multiply(COLUMNS, descriptor(SIZE, 1024, 128), B) + COMMIT + WAIT, "never written"
    ),
    "B never written": (
        FENCE + multiply(COLUMNS, None, descriptor(SIZE - 128, 256, 128), rest="1, 1, 0") + COMMIT + WAIT,
        "never written",
    ),
    "exit without a wait": (FENCE + MULTIPLY + COMMIT + "ret;", "exit with 1 wgmma"),
    "half a warp": ("and.b32 %r10, %r0, 16; setp.eq.u32 %p3, %r10, 0; @%p3 wgmma.fence.sync.aligned;", "by 16 lanes"),
    "different descriptors": (
        FENCE + "setp.lt.u32 %p3, %r0, 64;" + MULTIPLY.replace(";", "; @%p3 add.s64 %q21, %q21, 8;", 1) + COMMIT + WAIT,
        "different operands",
    ),
    "lanes with different descriptors": (
        FENCE + "cvt.u64.u32 %q22, %r0;" + MULTIPLY.replace(";", "; add.s64 %q21, %q21, %q22;", 1) + COMMIT + WAIT,
        "descriptor differs between lanes",
    ),
    "different instructions": (
        "setp.lt.u32 %p3, %r0, 32; @%p3 bra OTHER;" + FENCE + "OTHER:" + MULTIPLY + COMMIT + WAIT,
        "different instructions|without wgmma.fence",
    ),
    "a commit that one warp leaves out": (
        FENCE + MULTIPLY + COMMIT + WAIT + "setp.lt.u32 %p3, %r0, 32; @%p3 bra OTHER;" + COMMIT + "OTHER:",
        "ended after",
    ),
}  # fmt: skip
"""What is wrong; the report."""


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.mode)
@pytest.mark.parametrize("what", HAZARDS)
def test_what_is_wrong_is_found(what: str, options: Options) -> None:
    code, report = HAZARDS[what]
    with pytest.raises(HazardError, match=report):
        execute(code, options)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.mode)
@pytest.mark.parametrize("code", [MULTIPLY, SHARED_A], ids=["A in registers", "A shared"])
def test_writes_of_the_generic_proxy_need_a_fence_and_a_barrier(code: str, options: Options) -> None:
    whole = FENCE + code + COMMIT + WAIT
    execute(whole, options)
    with pytest.raises(HazardError, match="read of shared memory .* without fence.proxy.async since its write"):
        execute(whole, options, ready="bar.sync 0;")
    with pytest.raises(HazardError, match="read of shared memory .* without fence.proxy.async since its write"):
        execute(whole, options, ready="bar.sync 0; fence.proxy.async.global;")
    with pytest.raises(HazardError, match="read of shared memory .* without being ordered after its write"):
        execute(whole, options, ready="fence.proxy.async.shared::cta;")


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.mode)
def test_what_is_allowed(options: Options) -> None:
    """Reading A in flight; the same accumulators again; other shapes after a fence; shared memory after the wait."""
    code = FENCE + MULTIPLY + "add.s32 %r10, %r60, %r61;" + MULTIPLY + COMMIT + "mov.b32 %r11, 0;" + MULTIPLY + COMMIT
    code += WAIT.replace("0", "1") + WAIT + "bar.sync 0; st.shared.b32 [%r2], %r0; fence.proxy.async; bar.sync 0;"
    code += FENCE + multiply(8, None, B, rest="1, 1, 0") + COMMIT + WAIT
    execute(code, options)


@pytest.mark.parametrize("move", ["mov.b32 %r66, 0;", "mov.b32 %r61, %r10;"])
def test_moves_after_the_fence_are_refused_on_request(move: str) -> None:
    """The compiler puts some there."""
    code = FENCE + move + MULTIPLY + COMMIT + WAIT
    execute(code)
    with pytest.raises(HazardError, match="without wgmma.fence since"):
        execute(code, Options(strict_moves=True))


def test_a_warp_that_has_waited_knows_that_the_others_are_done() -> None:
    """It may have memory overwritten that they all read."""
    code = FENCE + MULTIPLY + COMMIT + WAIT
    code += "setp.gt.u32 %p3, %r0, 0; @%p3 bra HERE; st.shared.b32 [%r1+128], %r0; HERE: bar.warp.sync -1;"
    execute(code, Options("random", 3))


def test_a_warp_that_does_not_come() -> None:
    code = "setp.gt.u32 %p3, %r0, 95; @%p3 ret;" + FENCE + MULTIPLY + COMMIT + WAIT
    with pytest.raises(DeadlockError, match="wgmma of line .* to be issued by 1 more warps"):
        execute(code)


def test_results_do_not_depend_on_timing() -> None:
    random = np.random.default_rng(4)
    a = random.integers(0, 2**16, (64, 16), dtype=np.uint16) & 0xBFFF
    shared = (random.integers(0, 2**16, SIZE // 2, dtype=np.uint16) & 0xBFFF).view(np.uint8)
    before = random.standard_normal((64, COLUMNS)).astype(np.float32)
    found = [
        run(
            FENCE + 3 * (MULTIPLY + COMMIT) + WAIT, shared, operand_fragments(a), accumulator_fragments(before), options
        )
        for options in OPTIONS
    ]
    assert all(np.array_equal(found[0], other, equal_nan=True) for other in found)


def budget(code: str, block: int = 128, target: str = "sm_90a") -> None:
    launch(f"mov.u32 %r0, %tid.x;\n{code}\nret;", [], block=block, target=target)


def test_register_budgets() -> None:
    set_registers = "setmaxnreg.{}.sync.aligned.u32 {};".format
    budget(set_registers("dec", 40) + set_registers("inc", 232))
    for code, report in {
        set_registers("dec", 20): "setmaxnreg 20",
        set_registers("inc", 100): "setmaxnreg 100",
        set_registers("dec", 40) + set_registers("dec", 48): "dec to 48 from 40",
        set_registers("inc", 160) + set_registers("inc", 152): "inc to 152 from 160",
        "setp.lt.u32 %p0, %r0, 32; @%p0 bra HERE;" + set_registers("dec", 40) + "HERE:": "ended after",
    }.items():
        with pytest.raises(HazardError, match=report):
            budget(code)
    with pytest.raises(DeadlockError, match="registers of a lane that other warps must give back"):
        budget(set_registers("inc", 240), block=384)
