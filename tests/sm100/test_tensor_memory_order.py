"""Accesses to tensor memory must be ordered: each rule on a few instructions, kept and broken.

Source of the rules: PTX ISA, tcgen05 memory consistency model (pipelined instructions, completion, canonical
synchronisation patterns).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sm100.emulator import HazardError, MemoryFaultError, Options
from tests.sm100.support.snippets import launch
from tests.sm100.support.tensor_snippets import matrix_descriptor

MODES = {
    "immediate": {},
    "random 1": {"mode": "random", "seed": 1},
    "random 2": {"mode": "random", "seed": 2},
}
HAZARD = "without|yet to write|never written|before its tensor-core operations were waited for"

PROLOGUE = f"""
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %warpid;
    mov.u32 %r2, dynamic;         // 512 bytes of scale factors, the allocation's address at 512, mbarriers from 520
    and.b32 %r3, %r0, 31;
    setp.ne.u32 %p0, %r1, 0;
    setp.ne.u32 %p1, %r3, 0;
    @%p0 bra READY;
    shl.b32 %r4, %r3, 4;
    add.s32 %r4, %r2, %r4;
    st.shared.v4.b32 [%r4], {{%r3, %r3, %r3, %r3}};
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+512], 32;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r2+520], 1;
    mbarrier.init.shared.b64 [%r2+528], 32;
    fence.mbarrier_init.release.cluster;
    READY:
    fence.proxy.async.shared::cta;
    bar.sync 0;
    ld.shared.b32 %r20, [%r2+512];
    and.b32 %r5, %r1, 3;
    shl.b32 %r5, %r5, 21;
    add.s32 %r21, %r20, %r5;      // this warp's quarter
    mov.b64 %q5, {matrix_descriptor(0, 128, 128)};
"""
EPILOGUE = """
    bar.sync 0;
    @%p0 bra END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;
    END:
    ret;"""

FILL = "tcgen05.st.sync.aligned.32x32b.x4.b32 [%r21], {%r0, %r0, %r0, %r0};"
STORED = "tcgen05.wait::st.sync.aligned;"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r30, %r31, %r32, %r33}, [%r21];"
LOADED = "tcgen05.wait::ld.sync.aligned;"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
COPY = "@!%p1 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r20], %q5;"
COMMIT = "@!%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%r2+520];"
DONE = "{ WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r2+520], 0;\n@!%p3 bra WAIT; }"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r2+528];"
RELAXED_ARRIVE = "mbarrier.arrive.relaxed.cluster.shared.b64 %q9, [%r2+528];"
ARRIVED = "{ WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r2+528], 0;\n@!%p3 bra WAIT; }"
RELAXED_WAIT = ARRIVED.replace("parity.shared", "parity.relaxed.cluster.shared")
BARRIER = "bar.sync 1;"


def run(first: list[str], second: list[str], options: Options, end: str = EPILOGUE) -> None:
    """Warp 0 runs ``first``, warp 4, which reaches the same quarter, ``second``; warps 1 to 3 have nothing to do."""
    join = "\n".join((PROLOGUE, "setp.eq.u32 %p4, %r1, 4;", "@%p4 bra SECOND;", "@%p0 bra IDLE;"))
    body = "\n".join((join, *first, "bra JOINED;", "SECOND:", *second, "bra JOINED;", "IDLE:"))
    idle = [line for line in first if line == BARRIER]
    launch("\n".join((body, *idle, "JOINED:", end)), [], block=160, shared=1024, options=options)


def check(first: list[str], second: list[str], right: bool, options: Options, end: str = EPILOGUE) -> None:
    if right:
        run(first, second, options, end)
        return
    with pytest.raises(HazardError, match=HAZARD):
        run(first, second, options, end)


def without(lines: list[str], index: int) -> list[str]:
    return lines[:index] + lines[index + 1 :]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> dict:
    return MODES[request.param]


@pytest.fixture
def plain(mode: dict) -> Options:
    return Options(**mode)


@pytest.fixture
def strict(mode: dict) -> Options:
    return Options(**mode, strict_tensor_waits=True)


PRODUCE, CONSUME = [COPY, COMMIT], [DONE, AFTER, LOAD, LOADED]


def test_a_load_needs_the_commit_of_what_it_loads(plain: Options) -> None:
    check(PRODUCE, CONSUME, True, plain)
    check(PRODUCE, without(CONSUME, 0), False, plain)
    check([COPY, ARRIVE, COMMIT], [ARRIVED, *without(CONSUME, 0)], False, plain)


def test_a_commit_tells_of_its_own_lane_only(plain: Options) -> None:
    other = COMMIT.replace("!%p1", "%p5")
    check([COPY, "setp.eq.u32 %p5, %r3, 1;", other], CONSUME, False, plain)


def test_a_commit_tells_nothing_of_what_its_issuer_did_since_the_copy(plain: Options) -> None:
    write, read = "st.shared.b32 [%r2+600], %r0;", "ld.shared.b32 %r9, [%r2+600];"
    check([write, "bar.warp.sync -1;", *PRODUCE], [DONE, read], True, plain)
    check([COPY, write, COMMIT], [DONE, read], False, plain)


def test_same_warp_waits_for_its_own_copies_too(plain: Options) -> None:
    check([*PRODUCE, *CONSUME], [], True, plain)
    check([*PRODUCE, *without(CONSUME, 0)], [], False, plain)


def test_copies_of_a_lane_come_in_order(plain: Options) -> None:
    other = COPY.replace("@!%p1", "@%p5")
    set_other = "setp.eq.u32 %p5, %r3, 1;"
    check([COPY, *PRODUCE], CONSUME, True, plain)
    check([COPY, set_other, other, COMMIT], [], False, plain)


RELEASE, OVERWRITE = [FILL, STORED, LOAD, LOADED, BEFORE, ARRIVE], [ARRIVED, AFTER, COPY, COMMIT, DONE]


def test_a_copy_may_overwrite_only_what_was_loaded_before(plain: Options) -> None:
    check(OVERWRITE, RELEASE, True, plain)
    check(without(OVERWRITE, 0), RELEASE, False, plain)
    check(OVERWRITE, [*without(RELEASE, 5)[:2], ARRIVE, LOAD], False, plain)


def test_stores_count_once_waited_for(plain: Options) -> None:
    check([FILL, STORED, BARRIER], [BARRIER, LOAD], True, plain)
    check([FILL, BARRIER, STORED], [BARRIER, LOAD], False, plain)
    check([FILL, STORED, LOAD], [], True, plain)
    check([FILL, LOAD], [], False, plain)


@pytest.mark.parametrize("left_out", [3, 4], ids=["wait::ld", "fence before"])
def test_strict_releases(left_out: int, plain: Options, strict: Options) -> None:
    check(OVERWRITE, RELEASE, True, strict)
    check(OVERWRITE, without(RELEASE, left_out), True, plain)
    check(OVERWRITE, without(RELEASE, left_out), False, strict)


def test_strict_fences_after_waits(plain: Options, strict: Options) -> None:
    check(PRODUCE, CONSUME, True, strict)
    check(PRODUCE, without(CONSUME, 1), True, plain)
    check(PRODUCE, without(CONSUME, 1), False, strict)
    check(OVERWRITE, RELEASE, True, strict)
    check(without(OVERWRITE, 1), RELEASE, False, strict)


def test_the_fence_of_a_commit_reaches_beyond_who_waits_for_it(strict: Options) -> None:
    pass_on, load = [*PRODUCE, DONE, ARRIVE], [ARRIVED, AFTER, LOAD, LOADED]
    check(pass_on, load, True, strict)
    check(pass_on, without(load, 1), False, strict)


def test_a_fence_does_not_stand_in_for_another_warps(strict: Options) -> None:
    check([ARRIVED, BEFORE, *OVERWRITE[1:]], without(RELEASE, 4), False, strict)


def test_relaxed_synchronisation_needs_the_fences(plain: Options, strict: Options) -> None:
    release = [RELAXED_ARRIVE if line == ARRIVE else line for line in RELEASE]
    overwrite = [RELAXED_WAIT if line == ARRIVED else line for line in OVERWRITE]
    for options in (plain, strict):
        check(overwrite, release, True, options)
        check(overwrite, without(release, 4), False, options)
        check(without(overwrite, 1), release, False, options)


def test_memory_is_given_back_after_all_loads(plain: Options) -> None:
    early = EPILOGUE.replace("bar.sync 0;", "")
    check([FILL, STORED, BARRIER, "bar.sync 0;"], [BARRIER, LOAD, "bar.sync 0;"], True, plain, early_for_all(early))
    with pytest.raises((HazardError, MemoryFaultError), match="release of tensor memory|never written|allocated are"):
        run([FILL, STORED, BARRIER], [BARRIER, LOAD], plain, early)


def early_for_all(end: str) -> str:
    """Warps without work join the barrier, too."""
    return "setp.lt.u32 %p6, %r1, 1;\nsetp.gt.u32 %p7, %r1, 3;\n@%p6 bra GO;\n@%p7 bra GO;\nbar.sync 0;\nGO:\n" + end


def test_memory_given_back_has_no_history(strict: Options) -> None:
    again = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+544], 32;"
    release = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;"
    check([FILL, STORED, release, again, BARRIER], [BARRIER, FILL, STORED], True, strict)


def test_a_last_commit_that_nobody_waits_for(plain: Options) -> None:
    """Its operations are known to be over by an earlier one; whether that is enough at the end is an option."""
    program = [COPY, COMMIT, DONE, COMMIT.replace("520", "528")]
    with pytest.raises(HazardError, match="ended without waiting for an arrival of tcgen05 mma"):
        run(program, [], plain)
    run(program, [], replace(plain, strict_exit=False))
    with pytest.raises(HazardError, match="before its tensor-core operations were waited for|release of"):
        run([COPY, COMMIT], [], replace(plain, strict_exit=False))
