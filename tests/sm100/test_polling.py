"""Clusters that wait for one another, and warps that write the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator import DeadlockError, HazardError, Options
from tests.sm100.support.snippets import launch

# Each CTA counts itself in, waits until all have come, and stores what it saw.
TOGETHER = """ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1];
mov.u32 %r0, %ctaid.x; mov.u32 %r1, %tid.x; mov.u32 %r2, %nctaid.x; mov.u32 %r4, dynamic;
setp.eq.u32 %p0, %r1, 0;
@%p0 atom.acq_rel.gpu.global.add.u32 %r3, [%q0], 1;
WAIT:
@%p0 {look};
@%p0 st.shared.b32 [%r4], %r3;
bar.sync 0;
ld.shared.b32 %r5, [%r4];
bar.sync 0;
setp.lt.u32 %p1, %r5, %r2;
@%p1 bra WAIT;
mad.wide.u32 %q1, %r0, 4, %q1;
@%p0 st.global.b32 [%q1], %r5;
ret;"""
LOOKS = ["atom.acquire.gpu.global.add.u32 %r3, [%q0], 0", "ld.acquire.gpu.global.b32 %r3, [%q0]"]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("look", LOOKS)
def test_clusters_that_wait_for_one_another_run_together(look: str, backwards: bool) -> None:
    count, seen = np.zeros(1, np.uint32), np.zeros(7, np.uint32)
    options = Options(backwards=backwards)
    launch(TOGETHER.format(look=look), [count, seen], grid=7, block=96, shared=16, options=options)
    assert count.tolist() == [7] and seen.tolist() == [7] * 7


def test_more_than_have_a_place_wait_for_ever() -> None:
    count, seen = np.zeros(1, np.uint32), np.zeros(7, np.uint32)
    options = Options(resident=6, max_instructions=10_000)
    with pytest.raises(DeadlockError):
        launch(TOGETHER.format(look=LOOKS[0]), [count, seen], grid=7, block=96, shared=16, options=options)
    one_warp = TOGETHER.format(look=LOOKS[0]).replace("bar.sync 0;", "bar.warp.sync -1;")
    with pytest.raises(DeadlockError, match="polling"):
        launch(one_warp, [count * 0, seen], grid=7, shared=16, options=options)


def test_order_of_clusters() -> None:
    body = """ld.param.b64 %q0, [p0]; mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; mov.u32 %r1, %ctaid.x;
    @%p0 atom.exch.global.b32 %r2, [%q0], %r1; ret;"""
    for backwards, last in ((False, 4), (True, 0)):
        out = np.full(1, 77, np.uint32)
        launch(body, [out], grid=5, options=Options(backwards=backwards))
        assert out.tolist() == [last]


@pytest.mark.parametrize("equal_writes", [False, True])
def test_warps_that_write_the_same(equal_writes: bool) -> None:
    body = """mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; mov.u32 %r2, dynamic; mad.lo.u32 %r2, %r1, 4, %r2;
    {value}
    st.shared.b32 [%r2], %r3; ret;"""
    same, other = body.format(value="mov.u32 %r3, %r1;"), body.format(value="mov.u32 %r3, %r0;")
    options = Options(equal_writes=equal_writes)
    if equal_writes:
        launch(same, [], block=64, shared=128, options=options)
    else:
        with pytest.raises(HazardError, match="without being ordered after its write"):
            launch(same, [], block=64, shared=128, options=options)
    with pytest.raises(HazardError, match="without being ordered after its write"):
        launch(other, [], block=64, shared=128, options=options)
