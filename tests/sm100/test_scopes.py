"""Scopes: what the CTA's does not order between CTAs of a cluster, and accesses whose scopes miss one another.

Source: PTX ISA, memory consistency model (morally strong operations, release and acquire patterns), ``mbarrier``.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator import HazardError, Options
from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.support.snippets import launch

MODES = [Options(), Options("random", 1)]
modes = pytest.mark.parametrize("options", MODES, ids=["immediate", "random"])
RACE = "without being ordered after"

PROLOGUE = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, dynamic;
    xor.b32 %r3, %r1, 1; mapa.shared::cluster.u32 %r4, %r2, %r3;    // data of the other CTA
    and.b32 %r5, %r0, 31; shl.b32 %r5, %r5, 2; add.s32 %r6, %r2, %r5; add.s32 %r7, %r4, %r5;
    ld.param.b64 %q0, [p0];
    setp.ne.u32 %p0, %r1, 0; setp.ne.u32 %p1, %r0, 0; setp.gt.u32 %p2, %r0, 31;
    @%p2 bra READY;
    st.shared.b32 [%r6], %r0;
    @%p1 bra READY;
    st.shared.b32 [%r2+256], 0;
    mbarrier.init.shared.b64 [%r2+512], 32;
    fence.mbarrier_init.release.cluster;
    READY:
    barrier.cluster.arrive; barrier.cluster.wait;
"""
END = "barrier.cluster.arrive; barrier.cluster.wait; ret;"
"""What the first CTA does in the second one's memory is over before this ends."""


def check(first: str, second: str, options: Options, error: str | None, block: int = 32) -> None:
    """CTA 0 of a cluster of two runs ``first``, CTA 1 ``second``; %r6 is a lane's word, %r7 that of the other CTA."""

    def run() -> None:
        body = f"{PROLOGUE}\n@%p0 bra SECOND;\n{first}\nbra DONE;\nSECOND:\n{second}\nDONE:\n{END}"
        buffer = np.zeros(64, np.uint32)
        launch(body, [buffer], block=block, shared=1024, options=options, grid=2, cluster=2)

    if error is None:
        run()
        return
    with pytest.raises(HazardError, match=error):
        run()


STORE, LOAD = "st.shared::cluster.b32 [%r7], %r0;", "ld.shared.b32 %r9, [%r6];"
ARRIVE = "add.s32 %r10, %r4, 512; mbarrier.arrive{}.shared::cluster.b64 {}, [%r10];".format
WAIT = "L: mbarrier.try_wait.parity{}.shared.b64 %p3, [%r2+512], 0; @!%p3 bra L;".format
FENCE = "fence.acq_rel.{};".format

SIGNALS = {
    "no scope": (ARRIVE("", "_"), False),
    "CTA": (ARRIVE(".release.cta", "_"), False),
    "cluster": (ARRIVE(".release.cluster", "_"), True),
    "relaxed": (ARRIVE(".relaxed.cluster", "_"), False),
    "fence of the CTA": (FENCE("cta") + ARRIVE("", "_"), False),
    "fence of the cluster": (FENCE("cluster") + ARRIVE("", "_"), True),
    "fence of the GPU, relaxed": (FENCE("gpu") + ARRIVE(".relaxed.cluster", "_"), True),
    "membar of the CTA": ("membar.cta;" + ARRIVE("", "_"), False),
    "membar of the GPU": ("membar.gl;" + ARRIVE(".release.cta", "_"), True),
    "fence too late": (ARRIVE("", "_") + FENCE("cluster"), False),
}
WAITS = {
    "no scope": (WAIT(""), False),
    "CTA": (WAIT(".acquire.cta"), False),
    "cluster": (WAIT(".acquire.cluster"), True),
    "relaxed": (WAIT(".relaxed.cluster"), False),
    "fence of the CTA": (WAIT("") + FENCE("cta"), False),
    "fence of the cluster": (WAIT("") + FENCE("cluster"), True),
    "fence of the system, relaxed": (WAIT(".relaxed.cluster") + FENCE("sys"), True),
    "fence too early": (FENCE("cluster") + WAIT(""), False),
}


@modes
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("signal", SIGNALS)
def test_writes_to_another_cta_need_its_scope_on_both_sides(signal: str, wait: str, options: Options) -> None:
    (give, releases), (take, acquires) = SIGNALS[signal], WAITS[wait]
    check(f"{STORE}\n{give}", f"{take}\n{LOAD}", options, None if releases and acquires else RACE)


RESTRICTED = "fence.acquire.sync_restrict::shared::cluster.cluster;"
ONE_WAY = {
    "as they should": ("fence.release.cluster;", "fence.acquire.cluster;", None),
    "restricted to shared memory": ("fence.release.cluster;", RESTRICTED, None),
    "an acquiring one before the signal": ("fence.acquire.cluster;", "fence.acquire.cluster;", RACE),
    "a restricted one before the signal": (RESTRICTED, RESTRICTED, RACE),
    "a releasing one after the wait": ("fence.release.cluster;", "fence.release.cluster;", RACE),
}


@modes
@pytest.mark.parametrize("fences", ONE_WAY)
def test_fences_of_one_direction(fences: str, options: Options) -> None:
    before, after, error = ONE_WAY[fences]
    signal, wait = ARRIVE(".relaxed.cluster", "_"), WAIT(".relaxed.cluster")
    check(f"{STORE}\n{before}{signal}", f"{wait}{after}\n{LOAD}", options, error)


def test_a_fence_restricted_to_releases_is_refused_by_name() -> None:
    fence = "fence.release.sync_restrict::shared::cta.cluster;"
    with pytest.raises(UnsupportedError, match=r"fence\.release\.sync_restrict"):
        check(fence, "", Options(), None)


@modes
@pytest.mark.parametrize(("scope", "error"), [("", None), (".release.cta", RACE), (".relaxed.cluster", RACE)])
def test_reads_of_another_cta_are_over_when_an_arrival_without_a_scope_is(
    scope: str, error: str | None, options: Options
) -> None:
    """As kernels proven on hardware give buffers back; a scope that is written counts as it is written."""
    read, overwrite = "ld.shared::cluster.b32 %r9, [%r7];", "st.shared.b32 [%r6], %r0;"
    check(f"{read}\n{ARRIVE(scope, '_')}", f"{WAIT('')}\n{overwrite}", options, error)


@modes
def test_what_another_warp_knows_is_handed_on_by_a_barrier_of_the_cta(options: Options) -> None:
    """Warp 0 writes, warp 1 fences and arrives."""
    signal = f"@!%p2 bra DONE; {FENCE('cluster')} {ARRIVE('', '_')}"
    take = f"{WAIT('.acquire.cluster')} {LOAD}"
    check(f"@!%p2 {STORE} bar.sync 1; {signal}", f"bar.sync 1; {take}", options, None, 64)
    check(f"@!%p2 {STORE} {signal}", take, options, RACE, 64)


@modes
def test_the_fence_after_a_wait_is_that_of_the_warp_that_waited(options: Options) -> None:
    give = f"@%p2 bra DONE; {STORE} {FENCE('cluster')} {ARRIVE('', '_')}"
    waits = "@!%p2 bra WAITED; {} WAITED: bar.sync 1; {} @!%p2 {}".format
    check(give, waits(WAIT("") + FENCE("cluster"), "", LOAD), options, None, 64)
    check(give, waits(WAIT(""), FENCE("cluster"), LOAD), options, RACE, 64)


FLAG = "add.s32 %r10, %r4, 256; st.{}.shared::cluster.b32 [%r10], 1;".format
POLL = "L: ld.{}.shared.b32 %r11, [%r2+256]; setp.eq.u32 %p3, %r11, 0; @%p3 bra L;".format
FLAGS = {
    "cluster": (FLAG("release.cluster"), POLL("acquire.cluster"), None),
    "GPU": (FLAG("release.gpu"), POLL("acquire.gpu"), None),
    "CTA on both sides": (FLAG("release.cta"), POLL("acquire.cta"), RACE),
    "reader's CTA": (FLAG("release.cluster"), POLL("acquire.cta"), RACE),
    "fences": (FENCE("cluster") + FLAG("relaxed.cluster"), POLL("relaxed.cluster") + FENCE("cluster"), None),
    "narrow fence of the writer": (
        FENCE("cta") + FLAG("relaxed.cluster"), POLL("relaxed.cluster") + FENCE("cluster"), RACE
    ),
    "narrow fence of the reader": (
        FENCE("cluster") + FLAG("relaxed.cluster"), POLL("relaxed.cluster") + FENCE("cta"), RACE
    ),
    "volatile, fences": (FENCE("cluster") + FLAG("volatile"), POLL("volatile") + FENCE("gpu"), None),
}  # fmt: skip


@modes
@pytest.mark.parametrize("flag", FLAGS)
def test_flags_in_another_cta(flag: str, options: Options) -> None:
    give, take, error = FLAGS[flag]
    # One lane writes data and flag: nothing else is to be ordered.
    check(f"@%p1 bra DONE;\n{STORE}\n{give}", f"@%p1 bra DONE;\n{take}\n{LOAD}", options, error)


@modes
@pytest.mark.parametrize(("arrive", "error"), [
    ("arrive.release", None), ("arrive.relaxed", RACE),
])  # fmt: skip
@pytest.mark.parametrize("fence", ["", "cta", "cluster"])
def test_the_cluster_barrier(arrive: str, error: str | None, fence: str, options: Options) -> None:
    before = FENCE(fence) if fence else ""
    meet = f"barrier.cluster.{arrive}; barrier.cluster.wait;"
    if fence == "cluster":
        error = None
    check(f"{STORE} {before} {meet}", f"{meet} {LOAD}", options, error)


@modes
@pytest.mark.parametrize(("scopes", "right"), [
    ((".cluster", ".cluster"), True), (("", ".gpu"), True), ((".cta", ".cta"), False), ((".cluster", ".cta"), False),
])  # fmt: skip
@pytest.mark.parametrize("space", ["shared", "global"])
def test_atomics_race_unless_their_scopes_include_one_another(
    scopes: tuple[str, str], right: bool, space: str, options: Options
) -> None:
    texts = []
    for rank, scope in enumerate(scopes):
        place = "[%q0]" if space == "global" else "[%r2+256]" if rank else "[%r10]"
        where = "global" if space == "global" else "shared" if rank else "shared::cluster"
        texts.append(f"add.s32 %r10, %r4, 256; atom{scope}.{where}.add.u32 %r11, {place}, 1;")
    check(texts[0], texts[1], options, None if right else f"{RACE}|too narrow")


def test_clusters_need_the_scope_of_the_gpu() -> None:
    for scope, right in ((".gpu", True), ("", True), (".sys", True), (".cluster", False), (".cta", False)):
        buffer = np.zeros(1, np.uint32)
        body = f"ld.param.b64 %q0, [p0]; red{scope}.global.add.u32 [%q0], 1; ret;"
        if right:
            launch(body, [buffer], grid=2)
            assert buffer[0] == 64
            continue
        with pytest.raises(HazardError, match=rf"scope {scope} .* which CTA \(0, 0, 0\) accesses .*too narrow"):
            launch(body, [buffer], grid=2)
    # Reads do not conflict, and a CTA's own accesses may have its scope.
    launch("ld.param.b64 %q0, [p0]; ld.relaxed.cta.global.u32 %r0, [%q0]; ret;", [buffer], grid=2)
    launch("ld.param.b64 %q0, [p0]; red.cta.global.add.u32 [%q0], 1; ret;", [buffer])
