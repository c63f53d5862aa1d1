"""Accesses to shared memory must be ordered: each rule on a few instructions, kept and broken.

Source of the rules: PTX ISA, memory consistency model (causality order, proxies, asynchronous operations).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.sm100.emulator import HazardError, Options
from tests.sm100.support.snippets import launch
from tests.sm100.support.tensor_snippets import matrix_descriptor

MODES = [Options(), Options("random", 1), Options("random", 2)]
pytestmark = pytest.mark.parametrize("options", MODES, ids=["immediate", "random 1", "random 2"])
RACE = "without being ordered after"
PROXY = "without fence.proxy.async since"

PROLOGUE = """
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %warpid;
    mov.u32 %r2, dynamic;         // 128 bytes of data, flags at 256, mbarriers at 512
    shl.b32 %r3, %r0, 2;
    and.b32 %r3, %r3, 127;
    add.s32 %r3, %r2, %r3;        // this lane's word
    ld.param.b64 %q0, [p0];
    setp.ne.u32 %p0, %r1, 0;
    setp.ne.u32 %p1, %r0, 0;
    @%p0 bra READY;
    st.shared.b32 [%r3], %r0;
    @%p1 bra READY;
    st.shared.b32 [%r2+256], 0;
    mbarrier.init.shared.b64 [%r2+512], 1;
    mbarrier.init.shared.b64 [%r2+520], 32;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async;
    READY:
    bar.sync 0;
"""
"""Two warps; warp 0 has written the data."""
WAIT = "{{ WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [{0}], {1};\n@!%p3 bra WAIT; }}".format


def run_two_warps(first: str, second: str, options: Options, cluster: int = 1) -> np.ndarray:
    """Warp 0 runs ``first``, warp 1 ``second``; the buffer p0 of 128 bytes."""
    buffer = np.arange(32, dtype=np.uint32)
    body = f"{PROLOGUE}\n@%p0 bra SECOND;\n{first}\nbra DONE;\nSECOND:\n{second}\nDONE:\nret;"
    launch(body, [buffer], block=64, shared=1024, options=options, grid=cluster, cluster=cluster)
    return buffer


def check(first: str, second: str, options: Options, error: str | None, cluster: int = 1) -> None:
    """Run; ``error`` is what the report must say, None if the program is right."""
    if error is None:
        run_two_warps(first, second, options, cluster)
        return
    with pytest.raises(HazardError, match=error):
        run_two_warps(first, second, options, cluster)


LOAD, STORE = "ld.shared.b32 %r9, [%r3];", "st.shared.b32 [%r3], %r0;"
FLAG_LOOP = "{{ AGAIN: ld.{0}.shared.b32 %r8, [%r2+256];\nsetp.eq.u32 %p3, %r8, 0;\n@%p3 bra AGAIN; }}".format
HANDOVERS = {
    "nothing": ("", "", RACE),
    "bar.sync": ("bar.sync 1;", "bar.sync 1;", None),
    "bar.arrive": ("bar.arrive 1, 64;", "bar.sync 1, 64;", None),
    "bar.arrive the wrong way": ("bar.sync 1, 64;", "bar.arrive 1, 64;", RACE),
    "mbarrier": ("mbarrier.arrive.shared.b64 _, [%r2+520];", WAIT("%r2+520", 0), None),
    "mbarrier, not waited for": ("mbarrier.arrive.shared.b64 _, [%r2+520];", "", RACE),
    "mbarrier, relaxed": ("mbarrier.arrive.relaxed.cta.shared.b64 %q9, [%r2+520];", WAIT("%r2+520", 0), RACE),
    "mbarrier, relaxed after a fence": (
        "fence.acq_rel.cta;\nmbarrier.arrive.relaxed.cta.shared.b64 %q9, [%r2+520];",
        WAIT("%r2+520", 0),
        None,
    ),
    "cluster barrier": (
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;",
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;",
        None,
    ),
    "cluster barrier, relaxed": (
        "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;",
        "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;",
        RACE,
    ),
    "flag": ("st.release.cta.shared.b32 [%r2+256], 1;", FLAG_LOOP("acquire.cta"), None),
    "flag, relaxed reader": ("st.release.cta.shared.b32 [%r2+256], 1;", FLAG_LOOP("relaxed.cta"), RACE),
    "flag, relaxed reader and fence": (
        "st.release.cta.shared.b32 [%r2+256], 1;",
        FLAG_LOOP("relaxed.cta") + "fence.acq_rel.cta;",
        None,
    ),
    "flag, volatile": ("st.volatile.shared.b32 [%r2+256], 1;", FLAG_LOOP("volatile"), RACE),
    "flag, volatile, fences": (
        "membar.cta;\nst.volatile.shared.b32 [%r2+256], 1;",
        FLAG_LOOP("volatile") + "membar.cta;",
        None,
    ),
    "atomic": ("atom.acq_rel.cta.shared.add.u32 %r8, [%r2+256], 1;", FLAG_LOOP("acquire.cta"), None),
}


@pytest.mark.parametrize("handover", HANDOVERS)
@pytest.mark.parametrize(("before", "after"), [(STORE, LOAD), (LOAD, STORE), (STORE, STORE)], ids=["RAW", "WAR", "WAW"])
def test_warps_hand_data_over(before: str, after: str, handover: str, options: Options) -> None:
    give, take, error = HANDOVERS[handover]
    check(f"{before}\n{give}", f"{take}\n{after}", options, error)


def test_a_report_names_both_accesses(options: Options) -> None:
    with pytest.raises(HazardError) as caught:
        run_two_warps(STORE, "bar.sync 2, 32;\nld.shared.b32 %r9, [%r2];", options)
    message = str(caught.value)
    assert "shared memory of CTA (0, 0, 0) at 1024" in message
    assert "warp 0" in message and "warp 1" in message
    assert STORE.rstrip(";") in message and "ld.shared.b32 %r9, [%r2]" in message


def test_reads_race_with_no_reads(options: Options) -> None:
    check(LOAD, LOAD, options, None)
    check(f"{LOAD}\n{LOAD}\nbar.sync 1;\n{STORE}", f"{LOAD}\nbar.sync 1;", options, None)


def test_every_reader_counts(options: Options) -> None:
    check(f"{LOAD}\n{STORE}", LOAD, options, RACE)


def test_every_one_of_several_readers_counts(options: Options) -> None:
    """Volatile flags make warp 1 read after warp 0 and before its store, without ordering anything."""
    told = "{{ AGAIN: ld.volatile.shared.b32 %r8, [%r2+256];\nsetp.ne.u32 %p3, %r8, {0};\n@%p3 bra AGAIN; }}".format
    tell = "st.volatile.shared.b32 [%r2+256], {0};".format
    check(f"{LOAD}\n{tell(1)}\n{told(2)}\n{STORE}", f"{told(1)}\n{LOAD}\n{tell(2)}", options, RACE)


def test_neighbouring_bytes_do_not_race(options: Options) -> None:
    check("st.shared.b8 [%r2+16], %r0;", "st.shared.b8 [%r2+17], %r0;", options, None)


def test_atomics_race_only_with_plain_accesses(options: Options) -> None:
    atomic, plain = "atom.shared.add.u32 %r8, [%r2+256], 1;", "ld.shared.b32 %r8, [%r2+256];"
    check(atomic, atomic, options, None)
    check(atomic, plain, options, RACE)
    check(plain, atomic, options, RACE)


BULK_STORE = (
    "@%p1 bra DONE;\ncp.async.bulk.global.shared::cta.bulk_group [%q0], [%r2], 128;\ncp.async.bulk.commit_group;"
)
FENCE = "fence.proxy.async.shared::cta;"
WRITERS = {
    "fence of the writer": (f"{STORE}\n{FENCE}\nbar.sync 1;", "", None),
    "fence of the issuer": (f"{STORE}\nbar.sync 1;", FENCE, None),
    "fence for all spaces": (f"{STORE}\nfence.proxy.async;\nbar.sync 1;", "", None),
    "no fence": (f"{STORE}\nbar.sync 1;", "", PROXY),
    "fence too early": (f"{FENCE}\n{STORE}\nbar.sync 1;", "", PROXY),
    "fence for global memory": (f"{STORE}\nfence.proxy.async.global;\nbar.sync 1;", "", PROXY),
    "fence without a barrier": (f"{STORE}\n{FENCE}\n", "", RACE),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_asynchronous_reads_of_generic_writes_need_a_proxy_fence(writer: str, options: Options) -> None:
    """Warp 1 writes, warp 0 issues the copy."""
    write, before, error = WRITERS[writer]
    join = "bar.sync 1;" if "bar.sync" in write else ""
    check(f"{join}\n{before}\n{BULK_STORE}\ncp.async.bulk.wait_group 0;", write, options, error)


WAITS = {
    "read": ("cp.async.bulk.wait_group.read 0;", None),
    "finished": ("cp.async.bulk.wait_group 0;", None),
    "not waited for": ("", RACE),
    "one too few": ("cp.async.bulk.wait_group.read 1;", RACE),
}


@pytest.mark.parametrize("wait", WAITS)
def test_the_source_of_a_copy_is_free_once_its_group_is_waited_for(wait: str, options: Options) -> None:
    statement, error = WAITS[wait]
    issue = BULK_STORE.replace("bra DONE", "bra ISSUED")
    check(
        f"{FENCE}\n{issue}\n{statement}\nISSUED:\nbar.sync 1;\ncp.async.bulk.wait_group 0;",
        f"bar.sync 1;\n{STORE}",
        options,
        error,
    )


BULK_LOAD = (
    "@%p1 bra LOADED;\nmbarrier.arrive.expect_tx.shared.b64 _, [%r2+512], 128;\n"
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%q0], 128, [%r2+512];\nLOADED:"
)
END = WAIT("%r2+512", 0)


def test_what_a_copy_brings_is_there_once_its_mbarrier_completes(options: Options) -> None:
    load = f"{FENCE}\n{BULK_LOAD}\n{END}"
    check(f"{load}\n{LOAD}", "", options, None)
    check(load, f"{END}\n{LOAD}", options, None)
    check(load, LOAD, options, RACE)


def test_each_of_two_copies_is_waited_for(options: Options) -> None:
    other = BULK_LOAD.replace("[%r2],", "[%r2+768],").replace("LOADED", "OTHER").replace("+512", "+528")
    made = "@%p1 bra MADE;\nmbarrier.init.shared.b64 [%r2+528], 1;\nMADE:\nfence.proxy.async;"
    issue, waits = f"{made}\n{BULK_LOAD}\n{other}", (END, END.replace("+512", "+528"))
    check(f"{issue}\n{waits[0]}\n{waits[1]}\n{LOAD}", "", options, None)
    check(f"{issue}\n{waits[1]}\n{LOAD}\n{waits[0]}", "", options, RACE)


def test_a_copy_tells_nothing_of_what_its_issuer_did_since(options: Options) -> None:
    write, read = "st.shared.b32 [%r2+900], %r0;", "ld.shared.b32 %r9, [%r2+900];"
    check(f"{FENCE}\n{write}\nbar.warp.sync -1;\n{BULK_LOAD}", f"{END}\n{read}", options, None)
    check(f"{FENCE}\n{BULK_LOAD}\n{write}", f"{END}\n{read}", options, f"{RACE}|never written")


def test_a_copy_may_overwrite_only_what_was_read_and_written_before(options: Options) -> None:
    load = f"{BULK_LOAD}\n{END}"
    check(f"{FENCE}\nbar.sync 1;\n{load}", f"{LOAD}\nbar.sync 1;", options, None)
    check(f"{FENCE}\n{load}\nbar.sync 1;", f"{LOAD}\nbar.sync 1;", options, RACE)
    check(f"{FENCE}\nbar.sync 1;\n{load}", f"{STORE}\nbar.sync 1;", options, PROXY)
    check(f"bar.sync 1;\n{FENCE}\n{load}", f"{STORE}\nbar.sync 1;", options, None)


ELEMENT_COPY = "mad.wide.u32 %q1, %r0, 4, %q0;\ncp.async.ca.shared.global [%r3], [%q1], 4;"
ELEMENT_ENDS = {
    "group": ("cp.async.commit_group;\ncp.async.wait_group 0;\nbar.sync 1;", "bar.sync 1;", None),
    "everything": ("cp.async.wait_all;\nbar.sync 1;", "bar.sync 1;", None),
    "group not waited for": ("cp.async.commit_group;\nbar.sync 1;\ncp.async.wait_group 0;", "bar.sync 1;", RACE),
    "mbarrier": ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+520];\ncp.async.wait_all;", WAIT("%r2+520", 0), None),
    "mbarrier not waited for": ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+520];\ncp.async.wait_all;", "", RACE),
}


@pytest.mark.parametrize("end", ELEMENT_ENDS)
def test_copies_of_elements(end: str, options: Options) -> None:
    issuer, reader, error = ELEMENT_ENDS[end]
    check(f"{ELEMENT_COPY}\n{issuer}", f"{reader}\n{LOAD}", options, error)


HANDED = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+520];"
LEFT = {
    "a copy handed to an mbarrier": (f"{ELEMENT_COPY}\n{HANDED}", WAIT("%r2+520", 0), None),
    "of a committed group": (f"{ELEMENT_COPY}\n{HANDED}\ncp.async.commit_group;", WAIT("%r2+520", 0), None),
    "a copy after it": (f"{HANDED}\n{ELEMENT_COPY}", WAIT("%r2+520", 0), "exit while copies"),
    "one that nobody waits for": (f"{ELEMENT_COPY}\n{HANDED}", "", RACE),
}


@pytest.mark.parametrize("left", LEFT)
def test_a_thread_may_leave_copies_to_who_waits_for_their_mbarrier(left: str, options: Options) -> None:
    """By option; a CTA must know in any case that they are done."""
    issue, wait, error = LEFT[left]
    slow = Options("starved", options.seed, "cp_async")
    with pytest.raises(HazardError, match="exit while copies"):
        run_two_warps(issue, wait, slow)
    check(issue, f"{wait}\n{LOAD}" if error is None else wait, replace(slow, strict_copies=False), error)


def test_copies_of_elements_are_generic_writes(options: Options) -> None:
    copy = f"{ELEMENT_COPY}\ncp.async.wait_all;"
    end = f"{BULK_STORE}\ncp.async.bulk.wait_group 0;"
    check(f"{copy}\n{end}", "", options, PROXY)
    check(f"{copy}\n{FENCE}\n{end}", "", options, None)


TENSOR_COPY = f"""tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+768], 32;
    ld.shared.b32 %r20, [%r2+768];
    mov.b64 %q5, {matrix_descriptor(0, 64, 128)};
    @!%p1 tcgen05.cp.cta_group::1.4x256b [%r20], %q5;
    @!%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%r2+512];
    {WAIT("%r2+512", 0)}
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;"""


def test_tensor_copies_of_copied_elements(options: Options) -> None:
    copy = f"{ELEMENT_COPY}\ncp.async.wait_all;"
    check(f"{copy}\n{TENSOR_COPY}", "", options, None)
    check(f"st.shared.b32 [%r3], %r0;\nbar.warp.sync -1;\n{TENSOR_COPY}", "", options, PROXY)
    strict = replace(options, strict_tensor_waits=True)
    check(f"{copy}\n{TENSOR_COPY}", "", strict, PROXY)
    check(f"{copy}\n{FENCE}\n{TENSOR_COPY}", "", strict, None)


INITS = {
    "fence.mbarrier_init": ("fence.mbarrier_init.release.cluster;\nbar.sync 1;", "bar.sync 1;", None),
    "proxy fence": (f"{FENCE}\nbar.sync 1;", "bar.sync 1;", None),
    "fence.mbarrier_init and relaxed cluster barrier": (
        "fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait;",
        "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait;",
        None,
    ),
    "no fence": ("bar.sync 1;", "bar.sync 1;", "that takes fence.mbarrier_init or fence.proxy.async"),
    "no barrier": ("fence.mbarrier_init.release.cluster;", "bar.sync 2, 32;", "that takes|no mbarrier was initialised"),
}


@pytest.mark.parametrize("init", INITS)
def test_asynchronous_operations_need_an_mbarrier_whose_initialisation_they_see(init: str, options: Options) -> None:
    publish, learn, error = INITS[init]
    first = f"@%p1 bra MADE;\nmbarrier.init.shared.b64 [%r2+528], 1;\nMADE:\n{publish}"
    issue = BULK_LOAD.replace("512", "528").replace("%p1", "%p2").replace("[%r2]", "[%r2+768]").replace("128", "16")
    check(first, f"{learn}\nsetp.ne.u32 %p2, %r0, 32;\n{issue}\n{WAIT('%r2+528', 0)}", options, error)


REMOTE = """mov.u32 %r10, %cluster_ctarank;
    xor.b32 %r11, %r10, 1;
    mapa.shared::cluster.u32 %r12, %r3, %r11;"""
REMOTE_HANDOVERS = {
    "released": ("barrier.cluster.arrive.release;", None),
    "relaxed": ("barrier.cluster.arrive.relaxed;", RACE),
    "relaxed after a fence": ("fence.acq_rel.cluster;\nbarrier.cluster.arrive.relaxed;", None),
}


@pytest.mark.parametrize("handover", REMOTE_HANDOVERS)
def test_shared_memory_of_another_cta(handover: str, options: Options) -> None:
    arrive, error = REMOTE_HANDOVERS[handover]
    join = "barrier.cluster.arrive;\nbarrier.cluster.wait.acquire;"
    end = f"{arrive}\nbarrier.cluster.wait.acquire;"
    check(f"{join}\n{REMOTE}\nst.shared::cluster.b32 [%r12], %r0;\n{end}\n{LOAD}", f"{join}\n{end}", options, error, 2)


REMOTE_BARRIER = REMOTE.replace("%r3, %r11", "%r2, %r11")


def test_a_cta_ends_after_what_happens_in_its_memory(options: Options) -> None:
    store = BULK_STORE.replace("bra DONE", "bra ISSUED") + "\nISSUED:"
    check(f"{FENCE}\n{store}\ncp.async.bulk.wait_group.read 0;", "", options, None)
    check(f"{FENCE}\n{store}", "", options, "release of shared memory|exit while copies")
    check(f"{FENCE}\n{BULK_LOAD}", "", options, "release of shared memory|loads into shared memory under way")
    join = "barrier.cluster.arrive;\nbarrier.cluster.wait.acquire;"
    arrive = f"{join}\n{REMOTE_BARRIER}\nadd.s32 %r13, %r12, 520;\nmbarrier.arrive.shared::cluster.b64 _, [%r13];"
    check(f"{arrive}\n{WAIT('%r2+520', 0)}", join, options, None, 2)
    check(arrive, join, options, "ended without waiting for an arrival of CTA", 2)
    check(arrive, join, replace(options, strict_exit=False), None, 2)


def test_shared_memory_of_a_cta_that_may_not_have_begun(options: Options) -> None:
    store = f"{REMOTE_BARRIER}\nst.shared::cluster.b32 [%r12+900], %r0;"
    end = "barrier.cluster.arrive;\nbarrier.cluster.wait;"
    join = "barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;"
    check(f"{store}\n{end}", end, options, "before it is known to have begun", 2)
    check(f"{join}\n{store}\n{end}", f"{join}\n{end}", options, None, 2)


def test_an_mbarrier_must_not_run_ahead_of_who_waits(options: Options) -> None:
    """Three phases are over when warp 1 comes to wait for the first: by parity it might be the third."""
    arrive = "mbarrier.arrive.shared.b64 _, [%r2+520];\n" * 3
    wait = WAIT("%r2+520", 0)
    release, volatile = "st.release.cta.shared.b32 [%r2+256], 1;", "st.volatile.shared.b32 [%r2+256], 1;"
    check(f"{arrive}{release}", f"{FLAG_LOOP('acquire.cta')}\n{wait}", options, None)
    check(f"{arrive}{volatile}", f"{FLAG_LOOP('volatile')}\n{wait}", options, "neither waited for nor known")
