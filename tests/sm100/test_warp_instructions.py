"""Shuffles, votes, election, divergence and reconvergence."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator.errors import DeadlockError, HazardError, UnsupportedError
from tests.sm100.emulator.ptx import parse
from tests.sm100.support.snippets import LANES, evaluate, kernel_text, launch

IDS = np.arange(LANES, dtype=np.uint32)


@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("amount", [0, 1, 5, 17])
def test_shfl(mode: str, amount: int, width: int) -> None:
    values = np.random.default_rng(1).integers(0, 2**32, LANES, dtype=np.uint32)
    limit = (32 - width) << 8 | (0 if mode == "up" else 31)
    found = evaluate(f"shfl.sync.{mode}.b32 {{out}}, {{0}}, {amount}, {limit}, -1;", [values], "u4")
    for lane in range(LANES):
        first = lane - lane % width
        source = {"up": lane - amount, "down": lane + amount, "bfly": lane ^ amount, "idx": first + amount % width}[
            mode
        ]
        # Out of the segment: the lane keeps its own (bfly may only leave it upwards to do so).
        inside = first <= source < first + width or (mode == "bfly" and source < first)
        assert found[lane] == values[source if inside else lane]


def test_vote_and_elect_and_match() -> None:
    values = IDS % 3
    ballot = evaluate("setp.eq.u32 %p1, {0}, 1;\nvote.sync.ballot.b32 {out}, %p1, -1;", [values], "u4")
    assert ballot.tolist() == [sum(1 << i for i in range(LANES) if i % 3 == 1)] * LANES
    elected = evaluate("elect.sync {out}|%p1, -1;\nselp.b32 {out}, 1, 0, %p1;", [], "u4")
    assert elected.tolist() == [1] + [0] * 31
    groups = evaluate("match.any.sync.b32 {out}, {0}, -1;", [values], "u4")
    assert groups.tolist() == [sum(1 << i for i in range(LANES) if i % 3 == lane % 3) for lane in range(LANES)]
    total = evaluate("redux.sync.add.s32 {out}, {0}, -1;", [IDS], "u4")
    assert total.tolist() == [496] * LANES


def test_divergent_loop_runs_each_lane_its_own_number_of_times() -> None:
    code = """mov.u32 {out}, 0;
    LOOP:
    setp.ge.u32 %p1, {out}, {0};
    @%p1 bra DONE;
    add.s32 {out}, {out}, 1;
    bra LOOP;
    DONE:
    shfl.sync.bfly.b32 {out}, {out}, 1, 31, -1;"""
    counts = IDS * 7 % 13
    assert evaluate(code, [counts], "u4").tolist() == counts[IDS ^ 1].tolist()


def test_a_group_that_spins_lets_the_others_of_its_warp_run() -> None:
    out = np.zeros(LANES, np.uint32)
    body = """mov.u32 %r0, %tid.x;
    mov.u32 %r1, dynamic;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra WAIT;
    mbarrier.init.shared.b64 [%r1], 1;
    WAIT:
    bar.warp.sync -1;
    @!%p0 bra ARRIVE;
    SPIN:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
    @!%p1 bra SPIN;
    bra DONE;
    ARRIVE:
    mbarrier.arrive.shared.b64 _, [%r1];
    DONE:
    ld.param.b64 %q0, [p0];
    mad.wide.u32 %q0, %r0, 4, %q0;
    st.global.b32 [%q0], %r0;
    ret;"""
    launch(body, [out], shared=64)
    assert out.tolist() == IDS.tolist()


def test_lanes_that_never_meet_are_reported() -> None:
    body = """mov.u32 %r0, %tid.x;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra B;
    shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;
    B:
    shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;
    ret;"""
    with pytest.raises(DeadlockError, match=r"lanes \[1, 2, .*to execute the same instruction"):
        launch(body, [])


def test_exit_of_some_lanes_leaves_the_others() -> None:
    out = np.zeros(LANES, np.uint32)
    body = """mov.u32 %r0, %tid.x;
    setp.lt.u32 %p0, %r0, 5;
    @%p0 ret;
    ld.param.b64 %q0, [p0];
    mad.wide.u32 %q0, %r0, 4, %q0;
    st.global.b32 [%q0], 1;
    ret;"""
    launch(body, [out])
    assert out.tolist() == [0] * 5 + [1] * 27


@pytest.mark.parametrize("statement", [
    "frobnicate.b32 %r0, %r1;",
    "add.rz.f32 %r0, %r1, %r2;",
    "add.s32.extra %r0, %r1, %r2;",
    "ld.global.frob.b32 %r0, [%q0];",
    "cvt.rs.satfinite.e2m1x4.f32 %h0, %r0, %r1, %r2, %r3, %r4;",
    "fma.rz.f64 %q0, %q1, %q2, %q3;",
    "add.ftz.f16 %h0, %h1, %h2;",
    "red.global.add.f64.v2 [%q0], {%q1, %q2};",
    "ld.const.b32 %r0, [%q0];",
    "mul.wide.s64 %q0, %q1, %q2;",
    "tcgen05.mma.cta_group::1.kind::i8 [%r0], %q0, %q1, %r1, %p0;",
    "tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {%r0, %r1}, %r2, [%r4];",
    "tcgen05.cp.cta_group::1.32x128b.warpx4.b8x16.b4x16_p64 [%r0], %q0;",
    "wgmma.fence.sync.aligned;",
    "bra.frob DONE; DONE:",
    "mov.u32 %r0, nowhere;",
    ".frob 3;",
])  # fmt: skip
def test_what_is_not_modelled_is_refused_before_anything_runs(statement: str) -> None:
    with pytest.raises(UnsupportedError, match="line"):
        launch(f"ret;\n{statement}\nret;", [])


def test_registers_of_a_scope_hide_the_outer_ones() -> None:
    code = """mov.u32 {out}, 1;
    {{ .reg .b32 %r50; mov.u32 %r50, 7; bra DONE; DONE: }}
    {{ bra DONE; DONE: }}"""
    assert evaluate(code, [], "u4").tolist() == [1] * LANES


def test_module_level_functions_are_refused() -> None:
    text = kernel_text("ret;", 0) + ".func frob() { ret; }"
    with pytest.raises(UnsupportedError, match="module level"):
        parse(text)


def test_special_registers_of_a_grid() -> None:
    out = np.zeros(96 * 2, np.uint32)
    body = """mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;
    mad.lo.s32 %r3, %r1, %r2, %r0;
    mov.u32 %r4, %warpid; mov.u32 %r5, %laneid;
    mad.lo.s32 %r4, %r4, 32, %r5;
    mad.lo.s32 %r4, %r1, 1000, %r4;
    ld.param.b64 %q0, [p0];
    mad.wide.u32 %q0, %r3, 4, %q0;
    st.global.b32 [%q0], %r4;
    ret;"""
    run = launch(body, [out], block=96, grid=2)
    assert out.tolist() == [1000 * cta + thread for cta in range(2) for thread in range(96)]
    assert run.statistics.by_opcode()["st.global.b32"] == 6
    assert run.statistics.by_role({"all": range(3)})["all"].total() == run.statistics.total
    with pytest.raises(ValueError, match="no role"):
        run.statistics.by_role({"some": range(2)})


def test_unknown_special_register() -> None:
    with pytest.raises(UnsupportedError, match="%clock"):
        launch("mov.u32 %r0, %clock;\nret;", [])


def test_member_mask_must_hold_the_lane() -> None:
    body = "mov.u32 %r0, %tid.x;\nsetp.lt.u32 %p0, %r0, 4;\n@%p0 bra A;\nret;\nA:\nbar.warp.sync 3;\nret;"
    with pytest.raises(HazardError, match="member mask"):
        launch(body, [])


def redux(values: np.ndarray, modifiers: str) -> np.ndarray:
    """Bits of what every lane gets."""
    found = evaluate(f"redux.sync.{modifiers}.f32 {{out}}, {{0}}, -1;", [values.astype(np.float32)], "u4")
    assert (found == found[0]).all()
    return found[0]


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("absolute", ["", ".abs"])
def test_redux_of_floats(name: str, absolute: str) -> None:
    random = np.random.default_rng(7)
    pick = {"min": np.min, "max": np.max}[name]
    for _ in range(4):
        values = (random.standard_normal(LANES) * 2.0 ** random.integers(-130, 100, LANES)).astype(np.float32)
        expected = pick(np.abs(values) if absolute else values)
        assert redux(values, f"{name}{absolute}").view(np.float32) == expected
        values[3] = np.nan
        expected = pick(np.delete(np.abs(values) if absolute else values, 3))
        assert redux(values, f"{name}{absolute}").view(np.float32) == expected
        assert redux(values, f"{name}{absolute}.NaN") == 0x7FFFFFFF
    assert redux(np.full(LANES, np.nan), f"{name}{absolute}") == 0x7FFFFFFF


def test_redux_of_zeros_and_infinities() -> None:
    zeros = np.where(np.arange(LANES) % 2, -0.0, 0.0)
    assert redux(zeros, "min") == 0x80000000 and redux(zeros, "max") == redux(zeros, "min.abs") == 0
    infinite = np.where(np.arange(LANES) == 5, -np.inf, 1.0)
    assert redux(infinite, "min") == 0xFF800000 and redux(infinite, "max.abs") == 0x7F800000


def test_redux_of_some_lanes() -> None:
    values = np.arange(LANES, dtype=np.float32)
    code = """mov.u32 %r2, %laneid; setp.gt.u32 %p1, %r2, 9; mov.b32 {out}, 0f00000000;
    @!%p1 redux.sync.max.NaN.f32 {out}, {0}, 0x3ff;"""
    found = evaluate(code, [values], "u4").view(np.float32)
    assert found.tolist() == [9.0] * 10 + [0.0] * 22


@pytest.mark.parametrize("opcode", ["redux.sync.add.f32", "redux.sync.max.NaN.s32", "redux.sync.and.f32"])
def test_other_reductions_are_refused(opcode: str) -> None:
    with pytest.raises(UnsupportedError):
        evaluate(f"{opcode} {{out}}, {{0}}, -1;", [IDS], "u4")
