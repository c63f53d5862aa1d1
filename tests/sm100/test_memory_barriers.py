"""mbarriers beyond arrive and wait by parity: states, transactions, invalidation; and bar.arrive."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator.engines import Options
from tests.sm100.emulator.errors import DeadlockError, HazardError
from tests.sm100.support.snippets import LANES, launch

PROLOGUE = """mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic; ld.param.b64 %q0, [p0];
    setp.ne.s32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r1], {count}; fence.mbarrier_init.release.cluster;
    READY: bar.sync 0;
    """


def run(body: str, count: int = LANES, block: int = LANES, options: Options | None = None) -> np.ndarray:
    """Lanes' words of p0; ``{out}`` in the body stores %r9 there."""
    out = np.zeros(block, np.uint32)
    store = "mad.wide.u32 %q9, %r0, 4, %q0; st.global.b32 [%q9], %r9;"
    launch(
        f"{PROLOGUE.format(count=count)}{body.format(out=store)} ret;", [out], block=block, shared=64, options=options
    )
    return out


def test_states_tell_the_arrivals_that_were_pending() -> None:
    body = """mbarrier.arrive.shared.b64 %q1, [%r1]; mbarrier.pending_count.b64 %r9, %q1; {out}"""
    assert run(body).tolist() == list(range(LANES, 0, -1))


def test_a_state_is_waited_for_until_its_phase_is_over() -> None:
    body = """mbarrier.arrive.shared.b64 %q1, [%r1];
    L: mbarrier.test_wait.shared.b64 %p1, [%r1], %q1; @!%p1 bra L;
    mov.u32 %r9, 1; {out}"""
    for options in (Options(), Options("random", 1)):
        assert run(body, 2 * LANES, 2 * LANES, options).tolist() == [1] * 2 * LANES
    with pytest.raises(DeadlockError, match="to end phase 0"):
        run(body, LANES + 1)


def test_a_state_of_an_older_phase_must_not_be_waited_for() -> None:
    wait = "{{ L: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], {parity}; @!%p1 bra L; }}"
    body = f"""mbarrier.arrive.shared.b64 %q1, [%r1]; {wait.replace("{parity}", "0")}
    mbarrier.arrive.shared.b64 %q2, [%r1]; {wait.replace("{parity}", "1")}
    mbarrier.test_wait.shared.b64 %p1, [%r1], %q1;"""
    with pytest.raises(HazardError, match="phase 0 of an mbarrier in phase 2"):
        run(body)
    run(body.replace("%q1;", "%q2;"))


def test_transactions_without_a_copy() -> None:
    body = """@!%p0 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 96;
    bar.warp.sync -1;
    mbarrier.arrive.shared.b64 _, [%r1];
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; selp.b32 %r9, 1, 0, %p1;
    @!%p0 mbarrier.complete_tx.relaxed.cta.shared.b64 [%r1], 96;
    bar.warp.sync -1;
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; selp.b32 %r8, 2, 0, %p1;
    add.s32 %r9, %r9, %r8; {out}"""
    assert run(body).tolist() == [2] * LANES


def test_an_invalidated_barrier_is_none() -> None:
    arrive = "mbarrier.arrive.shared.b64 _, [%r1];"
    again = "@!%p0 mbarrier.inval.shared.b64 [%r1]; bar.warp.sync -1; {}"
    run(again.format("@!%p0 mbarrier.init.shared.b64 [%r1], 32; bar.warp.sync -1; " + arrive))
    with pytest.raises(HazardError, match="no mbarrier was initialised"):
        run(again.format(arrive))
    with pytest.raises(HazardError, match="mbarrier.inval at offset"):
        run(again.format("@!%p0 mbarrier.inval.shared.b64 [%r1];"))


def test_arrivals_of_several_at_once_and_too_many() -> None:
    wait = "L: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra L; mov.u32 %r9, 3; {out}"
    assert run(f"@!%p0 mbarrier.arrive.shared.b64 _, [%r1], 31; {wait}", 31).tolist() == [3] * LANES
    with pytest.raises(HazardError, match="arrival of 5 where 4 of 4"):
        run("@!%p0 mbarrier.arrive.shared.b64 _, [%r1], 5;", 4)


def test_a_warp_that_only_arrives_does_not_wait() -> None:
    """Warp 0 writes and arrives; warp 1 waits for it and reads."""
    body = """setp.gt.u32 %p2, %r0, 31; mad.lo.s32 %r2, %r0, 4, %r1;
    @%p2 bra SECOND;
    st.shared.b32 [%r2+16], %r0; bar.arrive 1, 64; mov.u32 %r9, 7; bra END;
    SECOND: bar.sync 1, 64; ld.shared.b32 %r9, [%r2+-112];
    END: {out}"""
    out = np.zeros(2 * LANES, np.uint32)
    store = "mad.wide.u32 %q9, %r0, 4, %q0; st.global.b32 [%q9], %r9;"
    for options in (Options(), Options("random", 1), Options("random", 2)):
        text = f"{PROLOGUE.format(count=1)}{body.format(out=store)} ret;"
        launch(text, [out], block=2 * LANES, shared=256, options=options)
        assert out.tolist() == [7] * LANES + list(range(LANES))
