"""Lanes of a warp: what one of them hands on, and accesses of several to the same shared memory.

Source: PTX ISA, ``bar.warp.sync``; CUDA programming guide, ``__syncwarp`` and independent thread scheduling.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.sm100.emulator import HazardError, Options
from tests.sm100.support.snippets import launch

MODES = [Options(), Options("random", 1)]
pytestmark = pytest.mark.parametrize("options", MODES, ids=["immediate", "random"])
RACE = "without being ordered after"
LANES = "by another lane without bar.warp.sync since"

PROLOGUE = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic; and.b32 %r2, %r0, 31; shl.b32 %r3, %r2, 2;
    add.s32 %r4, %r1, %r3;                                  // this lane's word
    xor.b32 %r5, %r3, 4; add.s32 %r5, %r1, %r5;             // its neighbour's
    ld.param.b64 %q0, [p0];
    setp.ne.u32 %p0, %r2, 0; setp.gt.u32 %p1, %r0, 31; setp.gt.u32 %p2, %r2, 15;
    @%p1 bra READY;
    @%p0 bra READY;
    st.shared.b32 [%r1+256], 0;
    mbarrier.init.shared.b64 [%r1+512], 1; mbarrier.init.shared.b64 [%r1+520], 32;
    fence.mbarrier_init.release.cluster;
    READY:
    bar.sync 0;
"""
STORE, LOAD, OTHER = "st.shared.b32 [%r4], %r0;", "ld.shared.b32 %r9, [%r4];", "ld.shared.b32 %r9, [%r5];"
SYNC = "bar.warp.sync -1;"
ARRIVE = "@!%p0 mbarrier.arrive.shared.b64 _, [%r1+512];"
WAIT = "{{ L: mbarrier.try_wait.parity.shared.b64 %p3, [%r1+{}], 0; @!%p3 bra L; }}".format


def check(first: str, second: str, options: Options, error: str | None) -> None:
    """Warp 0 runs ``first``, warp 1 ``second``."""

    def run() -> None:
        body = f"{PROLOGUE}\n@%p1 bra SECOND;\n{first}\nbra DONE;\nSECOND:\n{second}\nDONE:\nret;"
        launch(body, [np.zeros(64, np.uint32)], block=64, shared=1024, options=options)

    if error is None:
        run()
        return
    with pytest.raises(HazardError, match=error):
        run()


ARRIVALS = {
    "synchronised": (f"{STORE} {SYNC} {ARRIVE}", None),
    "not synchronised": (f"{STORE} {ARRIVE}", RACE),
    "synchronised too early": (f"{SYNC} {STORE} {ARRIVE}", RACE),
    "by a shuffle": (f"{STORE} shfl.sync.idx.b32 %r9, %r0, 0, 31, -1; {ARRIVE}", RACE),
    "by elect": (f"{STORE} elect.sync _|%p4, -1; {ARRIVE}", RACE),
    "by a barrier of the CTA": (f"{STORE} bar.sync 1, 32; {ARRIVE}", None),
    "with a fence": (f"{STORE} fence.acq_rel.gpu; {ARRIVE}", RACE),
    "fence, then synchronised": (f"{STORE} fence.acq_rel.gpu; {SYNC} {ARRIVE}", None),
    "half of them": (f"{STORE} @%p2 bra AFTER; bar.warp.sync 0xffff; {ARRIVE} AFTER:", RACE),
    "through an mbarrier": (f"{STORE} mbarrier.arrive.shared.b64 _, [%r1+520]; {WAIT(520)} {ARRIVE}", None),
}


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_a_lane_hands_on_what_the_others_have_synchronised(arrival: str, options: Options) -> None:
    give, error = ARRIVALS[arrival]
    check(give, f"{WAIT(512)} {LOAD}", options, error)


READS = {
    "synchronised": (f"{OTHER} {SYNC} {ARRIVE}", None),
    "not synchronised": (f"{OTHER} {ARRIVE}", RACE),
    "as a matrix": ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r6]; " + ARRIVE, RACE),
    "as a matrix, synchronised": (f"ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r9}}, [%r6]; {SYNC} {ARRIVE}", None),
    "its own": (f"@!%p0 {OTHER} {ARRIVE}", None),
}


@pytest.mark.parametrize("reads", READS)
def test_a_lane_hands_on_that_the_others_have_read(reads: str, options: Options) -> None:
    give, error = READS[reads]
    give = f"{STORE} {SYNC} and.b32 %r6, %r2, 7; shl.b32 %r6, %r6, 4; add.s32 %r6, %r1, %r6; {give}"
    overwrite = f"{WAIT(512)} add.s32 %r5, %r1, 4; @!%p0 st.shared.b32 [%r5], %r0;" if reads == "its own" else None
    check(give, overwrite or f"{WAIT(512)} {STORE}", options, error)
    check(give, overwrite or f"{WAIT(512)} {STORE}", replace(options, strict_reads=False), None)


def test_a_lane_hands_on_what_half_of_the_warp_has_synchronised(options: Options) -> None:
    give = f"@%p2 bra AFTER; {STORE} bar.warp.sync 0xffff; {ARRIVE} AFTER:"
    check(give, f"{WAIT(512)} @!%p2 {LOAD}", options, None)


def test_a_lane_hands_on_what_it_wrote_itself(options: Options) -> None:
    check(f"@!%p0 {STORE} {ARRIVE}", f"{WAIT(512)} @!%p0 {LOAD}", options, None)


def test_a_copy_issued_by_a_lane_reads_what_the_others_have_synchronised(options: Options) -> None:
    copy = "cp.async.bulk.global.shared::cta.bulk_group [%q0], [%r1], 128;"
    issue = f"@%p0 bra DONE; {copy} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    fence = "fence.proxy.async.shared::cta;"
    check(f"{STORE} {fence} {SYNC} {issue}", "", options, None)
    check(f"{STORE} {fence} {issue}", "", options, RACE)


BETWEEN = {
    "read of a neighbour's": (STORE, OTHER, False),
    "read of its own": (STORE, LOAD, True),
    "overwritten after a neighbour's read": (f"{STORE} {SYNC} {OTHER}", STORE, False),
    "overwritten after its own read": (f"{STORE} {SYNC} {LOAD}", STORE, True),
    "one for all": ("@!%p0 st.shared.b32 [%r1+256], %r0;", "ld.shared.b32 %r9, [%r1+256];", False),
    "atomics": ("atom.shared.add.u32 %r9, [%r1+256], 1;", "atom.shared.add.u32 %r9, [%r1+256], 1;", True),
    "matrix, then a lane": ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {%r0};", OTHER, False),
    "lanes, then a matrix": (STORE, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r6];", False),
    "matrix after matrix": (
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {%r0};",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r6];",
        True,
    ),
}


@pytest.mark.parametrize("synchronised", [False, True])
@pytest.mark.parametrize("case", BETWEEN)
def test_lanes_race_with_one_another(case: str, synchronised: bool, options: Options) -> None:
    before, after, ordered = BETWEEN[case]
    rows = "and.b32 %r6, %r2, 7; shl.b32 %r6, %r6, 4; add.s32 %r6, %r1, %r6;"
    error = None if ordered or synchronised else LANES
    check(f"{rows} {before} {SYNC if synchronised else ''} {after}", "", options, error)


def test_half_a_warp_is_synchronised_with_itself_only(options: Options) -> None:
    lower = "@%p2 bra AFTER; bar.warp.sync 0xffff; {} AFTER:".format
    check(f"{STORE} {lower(OTHER)}", "", options, None)
    far = "xor.b32 %r7, %r3, 64; add.s32 %r7, %r1, %r7;"
    check(f"{far} {STORE} {lower('ld.shared.b32 %r9, [%r7];')}", "", options, LANES)


def test_what_lanes_wrote_that_have_ended_is_in_order(options: Options) -> None:
    """They cannot synchronise any more, and a barrier counts them as arrived."""
    check(f"{STORE} @%p0 ret; {SYNC} {ARRIVE}", f"{WAIT(512)} @!%p0 {LOAD}", options, None)


def test_copies_issued_by_each_lane_read_what_it_wrote_itself(options: Options) -> None:
    """As a kernel proven on hardware does, whose threads write a row each and have it added to memory."""
    rows = "shl.b32 %r6, %r2, 4; add.s32 %r6, %r1, %r6; cvt.u64.u32 %q1, %r3; add.s64 %q1, %q0, 0;"
    write = "st.shared.v4.b32 [%r6], {%r0, %r0, %r0, %r0}; fence.proxy.async.shared::cta;"
    copy = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%q1], [{}], 16;".format
    end = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    check(f"{rows} {write} {copy('%r6')} {end}", "", options, None)
    check(
        f"{rows} {write.replace('fence.proxy.async.shared::cta;', '')} {copy('%r6')} {end}",
        "",
        options,
        "proxy|ordered after its write",
    )
    other = "xor.b32 %r6, %r6, 16;"
    check(f"{rows} {write} {other} {copy('%r6')} {end}", "", options, RACE)
    check(f"{rows} {write} {other} {SYNC} {copy('%r6')} {end}", "", options, None)
