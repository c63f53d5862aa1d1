"""Cluster launch control: clusters that run take over the work of those that have not begun."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator import HazardError, Options
from tests.sm100.emulator.launch import Launch
from tests.sm100.support.snippets import launch

MODES = [Options(), *(Options("random", seed) for seed in range(1, 5)), Options("starved", 1, "tma_load")]
modes = pytest.mark.parametrize("options", MODES, ids=lambda options: f"{options.mode} {options.seed}")

PROLOGUE = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic; mov.u32 %r2, %cluster_ctarank;
    mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.y; mov.u32 %r5, 0; mov.u32 %r6, %nctaid.x; ld.param.b64 %q0, [p0];
    .reg .b128 response;
    setp.ne.u32 %p0, %r0, 0; setp.ne.u32 %p1, %r2, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r1+16], 1; fence.mbarrier_init.release.cluster;
    READY: barrier.cluster.arrive; barrier.cluster.wait;
"""
COUNT = """mad.lo.s32 %r7, %r4, %r6, %r3; mad.wide.u32 %q1, %r7, 4, %q0;
    @!%p0 red.global.add.u32 [%q1], 1;"""
"""One more for this CTA's index."""
REQUEST = (
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{}.b128 [%r1], [%r1+16];".format
)
EXPECT = "@!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+16], 16;"
WAIT = "{ L: mbarrier.try_wait.parity.shared.b64 %p3, [%r1+16], %r5; @!%p3 bra L; } xor.b32 %r5, %r5, 1;"
READ = "ld.shared.b128 response, [%r1]; clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p4, response;"
TAKE = """clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r3, %r4, %r8, %r9}, response;
    add.s32 %r3, %r3, %r2;"""
MEET = "fence.proxy.async.shared::cta; barrier.cluster.arrive; barrier.cluster.wait;"
"""Before the next response may overwrite this one, in any CTA."""
END = "barrier.cluster.arrive; barrier.cluster.wait; ret;"


def loop(request: str) -> str:
    return f"""AGAIN: {COUNT}
    {EXPECT} {MEET} {request} {WAIT} {READ}
    @!%p4 bra DONE;
    {TAKE}
    bra AGAIN;
    DONE: {END}"""


def run(body: str, options: Options, grid: int = 12, cluster: int = 1) -> tuple[np.ndarray, Launch]:
    counts = np.zeros(grid, np.uint32)
    found = launch(
        f"{PROLOGUE}{body}", [counts], block=32, shared=64, options=options, grid=grid, cluster=cluster
    )  # fmt: skip
    return counts, found


@modes
def test_each_cluster_is_run_once(options: Options) -> None:
    counts, found = run(loop(f"@!%p0 {REQUEST('')}"), options)
    assert (counts == 1).all()
    # Each cluster that runs makes requests until one fails.
    assert found.statistics.engine_operations["launch_control"] == 12
    begun = found.statistics.by_opcode()["mbarrier.init.shared.b64"]
    assert begun == 1 if options.mode == "immediate" else begun <= 12


def test_requests_may_fail_although_clusters_are_left() -> None:
    begun = [run(loop(f"@!%p0 {REQUEST('')}"), Options("random", seed))[1].statistics.by_opcode() for seed in range(4)]
    assert any(counts["mbarrier.init.shared.b64"] > 1 for counts in begun)


@modes
def test_a_response_may_go_to_every_cta_of_the_cluster(options: Options) -> None:
    """One CTA asks; each takes its own CTA of the cluster that is given."""
    counts, _ = run(loop(f"@%p1 bra ASKED; @!%p0 {REQUEST('.multicast::cluster::all')} ASKED:"), options, cluster=2)
    assert (counts == 1).all()


@modes
def test_parts_of_an_index(options: Options) -> None:
    parts = """clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r3, response;
        clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r4, response;"""
    counts, _ = run(loop(f"@!%p0 {REQUEST('')}").replace(TAKE, parts), options)
    assert (counts == 1).all()


@modes
def test_a_response_is_waited_for(options: Options) -> None:
    body = f"{EXPECT} {MEET} @!%p0 {REQUEST('')} {READ} {WAIT} {END}"
    with pytest.raises(HazardError, match="without being ordered after its write|never written"):
        run(body, options)


@modes
def test_no_request_is_under_way_at_the_end(options: Options) -> None:
    with pytest.raises(HazardError, match="release of shared memory|under way"):
        run(f"{EXPECT} {MEET} @!%p0 {REQUEST('')} {END}", options)


def test_nothing_is_asked_for_once_a_request_has_failed() -> None:
    ask = f"{EXPECT} {MEET} @!%p0 {REQUEST('')} {WAIT} {READ}"
    run(f"{ask} {END}", Options(), grid=1)
    with pytest.raises(HazardError, match="after a response that was seen to have failed"):
        run(f"{ask} {MEET} {ask.replace('L:', 'M:').replace('bra L', 'bra M')} {END}", Options(), grid=1)


def test_values_of_128_bits_are_moved() -> None:
    body = """mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic; ld.param.b64 %q0, [p0];
    shl.b32 %r2, %r0, 4; add.s32 %r1, %r1, %r2; cvt.u64.u32 %q1, %r2; add.s64 %q0, %q0, %q1;
    .reg .b128 value, other;
    ld.global.b128 value, [%q0]; setp.gt.u32 %p0, %r0, 7;
    mov.b128 other, value;
    mov.b128 {%q2, %q3}, value;
    @%p0 mov.b128 other, {%q3, %q2};
    st.shared.b128 [%r1], other; ld.shared.b128 value, [%r1]; st.global.b128 [%q0], value; ret;"""
    values = np.random.default_rng(1).integers(0, 2**63, (32, 2), dtype=np.uint64)
    found = values.copy()
    launch(body, [found], shared=512)
    expected = np.where(np.arange(32)[:, None] > 7, values[:, ::-1], values)
    assert np.array_equal(found, expected)
