"""Programmatic dependent launch: when a launch may begin beside the one before, and what it may touch till it waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.sm100.emulator import DeadlockError, HazardError, Options, emulated
from tests.sm100.emulator.stream import Stream
from tests.sm100.support.snippets import LANES, make_launch

OVERLAP = [Options(overlap=True), Options("random", 1, overlap=True), Options("random", 2, overlap=True)]
modes = pytest.mark.parametrize("options", OVERLAP, ids=["immediate", "random 1", "random 2"])

PROLOGUE = """mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.s32 %r0, %r1, 32, %r0;
    ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; ld.param.b64 %q2, [p2];
    mad.wide.u32 %q0, %r0, 4, %q0; mad.wide.u32 %q1, %r0, 4, %q1; mad.wide.u32 %q2, %r0, 4, %q2;
    """
TRIGGER, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
ADD = "ld.global.b32 %r3, [%q0]; add.s32 %r3, %r3, 1; st.global.b32 [%q1], %r3;"
DOUBLE = "ld.global.b32 %r4, [%q1]; shl.b32 %r4, %r4, 1; st.global.b32 [%q2], %r4;"
CONFLICT = "without griddepcontrol.wait"


def run(*bodies: str, options: Options, programmatic: bool = True) -> list[np.ndarray]:
    """Launch the kernels, two CTAs each, one after the other; the three buffers, each lane having a word of each."""
    buffers = [np.arange(2 * LANES, dtype=np.uint32) * 10**i for i in range(3)]
    stream = Stream(options)
    for body in bodies:
        launch = make_launch(f"{PROLOGUE}{body} ret;", buffers, options=options, grid=2, stream=stream)
        stream.submit(launch, programmatic)
    stream.synchronize()
    return buffers


def check(first: str, second: str, options: Options, right: bool, programmatic: bool = True) -> None:
    if not right:
        with pytest.raises(HazardError, match=CONFLICT):
            run(first, second, options=options, programmatic=programmatic)
        return
    source, middle, target = run(first, second, options=options, programmatic=programmatic)
    assert np.array_equal(middle, source + 1)
    assert np.array_equal(target, middle * 2)


@modes
def test_what_the_launch_before_writes_must_be_waited_for(options: Options) -> None:
    check(f"{TRIGGER} {ADD}", f"{WAIT} {DOUBLE}", options, True)
    check(f"{TRIGGER} {ADD}", DOUBLE, options, False)
    check(f"{TRIGGER} {ADD}", f"{DOUBLE} {WAIT}", options, False)
    # Not even what was written before the trigger, or by a launch that has ended.
    check(f"{ADD} {TRIGGER}", DOUBLE, options, False)
    check(ADD, DOUBLE, options, False)


@modes
def test_what_the_launch_before_reads_must_not_be_written(options: Options) -> None:
    read_late = f"{TRIGGER} ld.global.b32 %r5, [%q2]; {ADD}"
    check(read_late, f"{WAIT} {DOUBLE}", options, True)
    early = "mov.u32 %r6, 1; st.global.b32 [%q2], %r6;"
    check(read_late, f"{early} {WAIT} {DOUBLE}", options, False)
    check(f"{TRIGGER} {ADD}", f"{early} {WAIT} {DOUBLE}", options, True)


@modes
def test_both_may_read(options: Options) -> None:
    check(f"{TRIGGER} {ADD}", f"ld.global.b32 %r5, [%q0]; {WAIT} {DOUBLE}", options, True)


@modes
def test_only_programmatic_launches_begin_early(options: Options) -> None:
    check(f"{TRIGGER} {ADD}", DOUBLE, options, True, programmatic=False)


def test_without_overlap_launches_follow_one_another() -> None:
    check(f"{TRIGGER} {ADD}", DOUBLE, Options(), True)


@modes
def test_a_wait_covers_only_the_launch_before(options: Options) -> None:
    nothing = TRIGGER
    with pytest.raises(HazardError, match=CONFLICT):
        run(f"{TRIGGER} {ADD}", nothing, f"{WAIT} {DOUBLE}", options=options)
    run(f"{TRIGGER} {ADD}", f"{WAIT} {nothing}", f"{WAIT} {DOUBLE}", options=options)


@modes
def test_a_launch_that_waits_before_it_triggers_covers_those_before_it(options: Options) -> None:
    """The next one begins after them, whether it waits or not; not so if any CTA triggers first."""
    first, last = f"{TRIGGER} {ADD}", DOUBLE
    source, middle, target = run(first, f"{WAIT} {TRIGGER}", last, options=options)
    assert np.array_equal(middle, source + 1) and np.array_equal(target, middle * 2)
    of_one = f"setp.ne.u32 %p0, %r1, 0; @%p0 {TRIGGER} {WAIT} @!%p0 {TRIGGER}"
    for between in (f"{TRIGGER} {WAIT}", of_one, ""):
        with pytest.raises(HazardError, match=CONFLICT):
            run(first, between, last, options=options)


def test_the_later_launch_goes_first() -> None:
    """Until it must wait: what it stores before is there when the rest of the launch before runs."""
    flag = "mov.u32 %r6, 5; st.global.b32 [%q2], %r6;"
    seen = "ld.global.b32 %r7, [%q2]; st.global.b32 [%q1], %r7;"
    with pytest.raises(HazardError, match=r"read of 4 B at p2\+0, which launch 2 writes"):
        run(f"{TRIGGER} {seen}", f"{flag} {WAIT}", options=Options(overlap=True))


def test_a_deadlock_of_a_dependent_launch_is_reported() -> None:
    endless = "mbarrier.init.shared.b64 [%r9], 1; L: mbarrier.try_wait.parity.shared.b64 %p1, [%r9], 0; @!%p1 bra L;"
    stream = Stream(OVERLAP[0])
    stream.submit(make_launch("ret;", [], stream=stream, options=OVERLAP[0]), True)
    body = f"mov.u32 %r9, dynamic; {WAIT} elect.sync _|%p2, -1; @!%p2 bra END; {endless} END: ret;"
    with pytest.raises(DeadlockError, match="mbarrier at offset"):
        stream.submit(make_launch(body, [], stream=stream, options=OVERLAP[0], shared=64), True)


@modes
@pytest.mark.parametrize(("programmatic", "waits"), [(True, True), (True, False), (False, False)])
def test_kernels_launched_by_cutedsl(programmatic: bool, waits: bool, options: Options) -> None:
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]
    from cutlass.cute.runtime import from_dlpack

    from tests.sm100.support.dependent_kernels import compiled_add_then_double

    compiled = compiled_add_then_double(programmatic, waits, 128)
    source, middle, target = (torch.arange(128, dtype=torch.int32) for _ in range(3))

    def both() -> None:
        with emulated(options, reads=[source], writes=[middle, target]) as emulator:
            tensors = (from_dlpack(tensor, assumed_align=16) for tensor in (source, middle, target))
            emulator(compiled, *tensors, cuda.CUstream(0))
        assert len(emulator.statistics) == 2 and all(found.total for found in emulator.statistics)

    if programmatic and not waits:
        with pytest.raises(HazardError, match=CONFLICT):
            both()
        return
    both()
    assert torch.equal(target, 2 * (source + 1))
