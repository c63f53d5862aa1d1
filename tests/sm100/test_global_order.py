"""Clusters that read what others stored to global memory: ordered by release and acquire, or reported."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator import HazardError, Options
from tests.sm100.support.snippets import launch

# Every CTA stores its threads' values and counts itself in; the last to come adds up what all of them stored.
LAST_ADDS = """ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; ld.param.b64 %q2, [p2];
mov.u32 %r0, %ctaid.x; mov.u32 %r1, %tid.x; mov.u32 %r2, %nctaid.x; mov.u32 %r4, dynamic; mov.u32 %r5, %ntid.x;
setp.eq.u32 %p0, %r1, 0;
mad.lo.u32 %r6, %r0, %r5, %r1; mad.wide.u32 %q3, %r6, 4, %q1;
st.global.b32 [%q3], %r6;
{together}
{before}
@%p0 atom.{order}.{scope}.global.add.u32 %r3, [%q0], 1;
{after}
@%p0 add.u32 %r3, %r3, 1;
@%p0 st.shared.b32 [%r4], %r3;
bar.sync 0;
ld.shared.b32 %r3, [%r4];
setp.ne.u32 %p1, %r3, %r2;
@%p1 ret;
mov.u32 %r7, 0; mov.u32 %r8, 0;
ADD:
mad.lo.u32 %r6, %r8, %r5, %r1; mad.wide.u32 %q3, %r6, 4, %q1;
ld.global.b32 %r9, [%q3];
add.u32 %r7, %r7, %r9; add.u32 %r8, %r8, 1;
setp.lt.u32 %p2, %r8, %r2;
@%p2 bra ADD;
mad.wide.u32 %q3, %r1, 4, %q2;
st.global.b32 [%q3], %r7;
ret;"""
BLOCK, GRID = 64, 3


def add_up(
    order: str = "acq_rel", scope: str = "gpu", together: str = "bar.sync 0;", before: str = "", after: str = "",
    *, backwards: bool = False,
) -> list[int]:  # fmt: skip
    body = LAST_ADDS.format(order=order, scope=scope, together=together, before=before, after=after)
    buffers = [np.zeros(size, np.uint32) for size in (1, BLOCK * GRID, BLOCK)]
    launch(body, buffers, grid=GRID, block=BLOCK, shared=16, options=Options(backwards=backwards))
    return buffers[2].tolist()


EXPECTED = [sum(cta * BLOCK + thread for cta in range(GRID)) for thread in range(BLOCK)]


@pytest.mark.parametrize("backwards", [False, True])
def test_the_last_to_come_may_read_what_all_have_stored(backwards: bool) -> None:
    assert add_up(backwards=backwards) == EXPECTED
    fence = "fence.acq_rel.gpu;"
    assert add_up("relaxed", before=fence, after=fence, backwards=backwards) == EXPECTED


@pytest.mark.parametrize(
    "mistake",
    [
        {"order": "relaxed"},
        {"order": "release"},
        {"order": "acquire"},
        {"together": ""},
        {"order": "relaxed", "before": "fence.acq_rel.gpu;"},
        {"order": "relaxed", "after": "fence.acq_rel.gpu;"},
        {"order": "relaxed", "before": "fence.acq_rel.cta;", "after": "fence.acq_rel.cta;"},
    ],
    ids=str,
)
def test_what_orders_nothing(mistake: dict[str, str]) -> None:
    """Without the barrier the thread that counts a CTA in knows nothing of the other warp's store."""
    with pytest.raises(HazardError, match="read of global memory at .* without being ordered after the write"):
        add_up(**mistake)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["7", "%r0"])
def test_two_clusters_that_write_one_place(value: str) -> None:
    """The same value they may."""
    body = f"ld.param.b64 %q0, [p0]; mov.u32 %r0, %ctaid.x; mov.u32 %r1, {value}; st.global.b32 [%q0], %r1; ret;"
    out = np.zeros(1, np.uint32)
    if value == "7":
        launch(body, [out], grid=2)
        assert out.tolist() == [7]
    else:
        with pytest.raises(HazardError, match="write of global memory"):
            launch(body, [out], grid=2)


def test_knowledge_is_handed_on() -> None:
    """The first CTA tells the second, the second the third, which reads what the first stored."""
    body = """ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; mov.u32 %r0, %ctaid.x;
    setp.ne.u32 %p0, %r0, 0; mad.wide.u32 %q2, %r0, 4, %q0;
    @!%p0 st.global.b32 [%q1], 55;
    @!%p0 bra TELL;
    WAIT: ld.{how}.gpu.global.b32 %r1, [%q2+-4]; setp.eq.u32 %p1, %r1, 0; @%p1 bra WAIT;
    setp.eq.u32 %p2, %r0, 2;
    @%p2 ld.global.b32 %r2, [%q1];
    TELL: st.release.gpu.global.b32 [%q2], 1; ret;"""
    for how in ("acquire", "relaxed"):
        flags, value = np.zeros(3, np.uint32), np.zeros(1, np.uint32)
        if how == "acquire":
            launch(body.format(how=how), [flags, value], grid=3)
            assert flags.tolist() == [1, 1, 1]
        else:
            with pytest.raises(HazardError, match="read of global memory"):
                launch(body.format(how=how), [flags, value], grid=3)
