"""Copies between global and shared memory: what arrives, edges and reductions included."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator.engines import Options
from tests.sm100.emulator.errors import DeadlockError, HazardError, MemoryFaultError, UnsupportedError
from tests.sm100.support.raw_tensor_map import raw_map
from tests.sm100.support.snippets import LANES, launch

MODES = [Options(), Options("random", 1)]
modes = pytest.mark.parametrize("options", MODES, ids=["immediate", "random"])

PROLOGUE = """mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic;
    ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1];
    setp.ne.s32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r1+2048], 1; fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;
    READY: bar.sync 0;
    """
WAIT = "L: mbarrier.try_wait.parity.shared.b64 %p1, [%r1+2048], 0; @!%p1 bra L;"
STORED = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"


def aligned(values: np.ndarray, to: int = 128) -> np.ndarray:
    """A copy that begins at a multiple of ``to``."""
    room = np.zeros(values.nbytes + to, np.uint8)
    start = -room.ctypes.data % to
    copy = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


@modes
def test_bulk_copies_there_and_back(options: Options) -> None:
    source = aligned(np.random.default_rng(1).integers(0, 2**32, 64, dtype=np.uint32))
    target = aligned(np.zeros(64, np.uint32))
    body = f"""{PROLOGUE}
    @%p0 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1+2048], 256;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%q0], 256, [%r1+2048];
    LOADED: {WAIT}
    @%p0 ret;
    cp.async.bulk.global.shared::cta.bulk_group [%q1+16], [%r1+16], 240;
    {STORED} ret;"""
    launch(body, [source, target], shared=4096, options=options)
    assert np.array_equal(target, np.where(np.arange(64) < 4, 0, source))


@pytest.mark.parametrize(("offset", "size"), [(4, 16), (0, 8)])
def test_bulk_copies_are_aligned(offset: int, size: int) -> None:
    body = f"{PROLOGUE} @%p0 ret; cp.async.bulk.global.shared::cta.bulk_group [%q1], [%r1+{offset}], {size}; ret;"
    with pytest.raises(MemoryFaultError, match="multiples of 16"):
        launch(body, [aligned(np.zeros(64)), aligned(np.zeros(64))], shared=4096)


@modes
@pytest.mark.parametrize("size", [4, 8, 16])
def test_copies_of_elements(size: int, options: Options) -> None:
    """Lane i copies ``size`` bytes, of which only the first i % (size + 1) come from global memory."""
    source = aligned(np.random.default_rng(2).integers(1, 256, (LANES, size), dtype=np.uint8))
    target = aligned(np.zeros((LANES, size), np.uint8))
    register = {4: "b32 %r5", 8: "v2.b32 {%r5, %r6}", 16: "v4.b32 {%r5, %r6, %r7, %r8}"}[size]
    kind, names = register.split(" ", 1)
    body = f"""{PROLOGUE}
    mul.lo.s32 %r2, %r0, {size}; add.s32 %r3, %r1, %r2; cvt.u64.u32 %q2, %r2; add.s64 %q3, %q0, %q2;
    add.s64 %q4, %q1, %q2; rem.u32 %r4, %r0, {size + 1};
    cp.async.ca.shared.global [%r3], [%q3], {size}, %r4;
    cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.{kind} {names}, [%r3]; st.global.{kind} [%q4], {names}; ret;"""
    launch(body, [source, target], shared=4096, options=options)
    assert np.array_equal(target, np.where(np.arange(size) < (np.arange(LANES) % (size + 1))[:, None], source, 0))


@modes
def test_copies_of_elements_arrive_on_an_mbarrier_that_does_not_expect_them(options: Options) -> None:
    """Without noinc, an arrival is added when the copies are issued, so the phase still needs the one counted."""
    source, target = aligned(np.arange(LANES, dtype=np.uint32)), aligned(np.zeros(LANES, np.uint32))
    body = f"""{PROLOGUE}
    shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2; cvt.u64.u32 %q2, %r2; add.s64 %q3, %q0, %q2; add.s64 %q4, %q1, %q2;
    cp.async.ca.shared.global [%r3], [%q3], 4;
    cp.async.mbarrier.arrive.shared.b64 [%r1+2048];
    @!%p0 mbarrier.arrive.shared.b64 _, [%r1+2048];
    {WAIT}
    xor.b32 %r3, %r3, 4; ld.shared.b32 %r5, [%r3]; st.global.b32 [%q4], %r5;
    cp.async.wait_all; ret;"""
    launch(body, [source, target], shared=4096, options=options)
    assert target.tolist() == [lane ^ 1 for lane in range(LANES)]


def store_body(operation: str, size: int) -> str:
    """Fill shared memory from p1 (``size`` bytes) and store the box at (16, 1) through the map p2."""
    return f"""{PROLOGUE} ld.param.b64 %q5, [p2];
    @%p0 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1+2048], {size};
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%q1], {size}, [%r1+2048];
    LOADED: {WAIT}
    @%p0 ret;
    mov.u32 %r2, 16; mov.u32 %r3, 1;
    {operation} [%q5, {{%r2, %r3}}], [%r1];
    {STORED} ret;"""


REDUCE = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.{}.tile.bulk_group"
KINDS = {"u32": (2, np.uint32), "s32": (3, np.int32), "f16": (6, np.float16), "f32": (7, np.float32)}


@modes
@pytest.mark.parametrize(("operation", "name"), [
    ("add", "f32"), ("add", "f16"), ("add", "u32"), ("min", "s32"), ("max", "u32"), ("max", "f16"), ("xor", "u32"),
])  # fmt: skip
def test_tensor_reductions_touch_only_what_is_inside(operation: str, name: str, options: Options) -> None:
    kind, dtype = KINDS[name]
    size = np.dtype(dtype).itemsize
    random = np.random.default_rng(3)
    values = [random.integers(-50 if name[0] != "u" else 0, 50, shape).astype(dtype) for shape in ((5, 24), (8, 16))]
    tensor, box = aligned(values[0]), aligned(values[1])
    flat = 24 * size
    raw = raw_map(kind, [24, 5], [flat], [16, 8], address=tensor.ctypes.data)
    before = tensor.copy()
    buffers = [tensor, box, aligned(np.frombuffer(raw, np.uint8))]
    launch(store_body(REDUCE.format(operation), box.nbytes), buffers, shared=4096, options=options)
    combine = {"add": np.add, "min": np.minimum, "max": np.maximum, "xor": np.bitwise_xor}[operation]
    expected = before.copy()
    expected[1:, 16:] = combine(before[1:, 16:], box[:4, :8])
    assert np.array_equal(tensor, expected)


@modes
def test_each_lane_reduces(options: Options) -> None:
    tensor, box = aligned(np.zeros((5, 24), np.float32)), aligned(np.ones((8, 16), np.float32))
    raw = raw_map(7, [24, 5], [96], [16, 8], address=tensor.ctypes.data)
    body = store_body(REDUCE.format("add"), box.nbytes).replace("@%p0 ret;", "")
    launch(body, [tensor, box, aligned(np.frombuffer(raw, np.uint8))], shared=4096, options=options)
    assert tensor.sum() == tensor[1:, 16:].sum() == LANES * 4 * 8


@pytest.mark.parametrize(("operation", "kind"), [("add", 0), ("min", 7), ("inc", 3)])
def test_tensor_reductions_that_do_not_exist_are_refused(operation: str, kind: int) -> None:
    tensor = aligned(np.zeros((8, 64), np.float32))
    raw = raw_map(kind, [64, 4], [256], [16, 4], address=tensor.ctypes.data)
    buffers = [tensor, aligned(np.zeros(256, np.uint32)), aligned(np.frombuffer(raw, np.uint8))]
    with pytest.raises(UnsupportedError, match=" of \\."):
        launch(store_body(REDUCE.format(operation), 1024), buffers, shared=4096)


@modes
def test_bulk_reductions(options: Options) -> None:
    source, target = (aligned(np.arange(64, dtype=np.float32) * factor) for factor in (0.5, 2))
    body = f"""{PROLOGUE}
    @%p0 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1+2048], 256;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%q0], 256, [%r1+2048];
    LOADED: {WAIT}
    @%p0 ret;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%q1], [%r1], 256;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%q1], [%r1], 128;
    {STORED} ret;"""
    launch(body, [source, target], shared=4096, options=options)
    assert target.tolist() == [2 * i + 0.5 * i * (2 if i < 32 else 1) for i in range(64)]


@pytest.mark.parametrize(("kind", "registers"), [
    ("v8.b32", "%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27"), ("v4.b64", "%q20, %q21, %q22, %q23"),
])  # fmt: skip
def test_loads_and_stores_of_32_bytes(kind: str, registers: str) -> None:
    source = aligned(np.arange(8 * LANES, dtype=np.uint32))
    target = aligned(np.zeros(8 * LANES, np.uint32))
    body = f"""{PROLOGUE} mad.wide.u32 %q3, %r0, 32, %q0; xor.b32 %r2, %r0, 1; mad.wide.u32 %q4, %r2, 32, %q1;
    ld.global.{kind} {{{registers}}}, [%q3]; st.global.{kind} [%q4], {{{registers}}}; ret;"""
    launch(body, [source, target], shared=4096)
    assert np.array_equal(target.reshape(-1, 2, 8)[:, ::-1].ravel(), source)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices(count: int, transposed: bool) -> None:
    """Four matrices, one after the other in shared memory; the first ``count`` are loaded and stored back elsewhere."""
    source = aligned(np.random.default_rng(5).integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16))
    registers, target = aligned(np.zeros((LANES, 4), np.uint32)), aligned(np.zeros((4, 8, 8), np.uint16))
    names = ", ".join(f"%r{20 + i}" for i in range(count))
    suffix = ".trans" if transposed else ""
    body = f"""{PROLOGUE} ld.param.b64 %q2, [p2]; mov.u32 %r20, 0; mov.u32 %r21, 0; mov.u32 %r22, 0; mov.u32 %r23, 0;
    shl.b32 %r2, %r0, 4; add.s32 %r3, %r1, %r2; cvt.u64.u32 %q3, %r2; add.s64 %q4, %q0, %q3; add.s64 %q5, %q1, %q3;
    ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%q4]; st.shared.v4.b32 [%r3], {{%r4, %r5, %r6, %r7}}; bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 {{{names}}}, [%r3];
    st.global.v4.b32 [%q5], {{%r20, %r21, %r22, %r23}};
    st.shared.v4.b32 [%r3+1024], {{%r4, %r5, %r6, %r7}};
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x{count}.shared.b16 [%r3+1024], {{{names}}};
    bar.warp.sync -1;
    add.s64 %q6, %q2, %q3;
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3+1024]; st.global.v4.b32 [%q6], {{%r4, %r5, %r6, %r7}}; ret;"""
    launch(body, [source, registers, target], shared=4096)
    wanted = np.where(np.arange(4)[:, None, None] < count, source.transpose(0, 2, 1) if transposed else source, source)
    assert np.array_equal(target, wanted)
    for lane in range(LANES):
        for number in range(count):
            row, column = lane // 4, lane % 4 * 2
            pair = [wanted[number, row, column], wanted[number, row, column + 1]]
            assert registers[lane, number] == int(pair[0]) | int(pair[1]) << 16


def test_shared_memory_of_another_cta() -> None:
    """Each CTA stores its rank plus one into the other's shared memory and adds its own."""
    target = np.zeros(2, np.uint32)
    body = """mov.u32 %r0, %cluster_ctarank; xor.b32 %r1, %r0, 1; mov.u32 %r2, dynamic; add.s32 %r3, %r0, 1;
    mapa.shared::cluster.u32 %r4, %r2, %r1;
    getctarank.shared::cluster.u32 %r6, %r4;
    elect.sync _|%p0, -1;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%p0 st.shared::cluster.b32 [%r4], %r3;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    ld.shared.b32 %r5, [%r2]; mad.lo.s32 %r5, %r6, 10, %r5;
    ld.param.b64 %q0, [p0]; mad.wide.u32 %q0, %r0, 4, %q0;
    @%p0 st.global.b32 [%q0], %r5; ret;"""
    launch(body, [target], grid=2, cluster=2, shared=64)
    assert target.tolist() == [12, 1]


@pytest.mark.parametrize(("rank", "used"), [(1, True), (2, False), (300, False)])
def test_a_rank_that_the_cluster_lacks_gives_an_address_that_may_not_be_used(rank: int, used: bool) -> None:
    """Lanes that do not go on to use it compute the address, too."""
    target = np.zeros(2, np.uint32)
    body = f"""mov.u32 %r0, %cluster_ctarank; mov.u32 %r2, dynamic; setp.eq.u32 %p1, %r0, 0;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mapa.shared::cluster.u32 %r4, %r2, {rank};
    elect.sync _|%p0, -1; and.pred %p2, %p0, %p1;
    {{use}} st.shared::cluster.b32 [%r4], 7;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    setp.eq.u32 %p3, %r0, 1; and.pred %p3, %p3, %p0;
    ld.param.b64 %q0, [p0]; mov.u32 %r5, 5; @%p3 st.global.b32 [%q0+4], %r5; ret;"""
    launch(body.format(use="setp.eq.u32 %p4, %r0, 9; @%p4"), [target], grid=2, cluster=2, shared=64)
    assert target.tolist() == [0, 5]
    if used:
        launch(body.format(use="@%p2"), [target], grid=2, cluster=2, shared=64)
        return
    with pytest.raises(MemoryFaultError, match=f"rank {min(rank, 255)} of 2 CTAs"):
        launch(body.format(use="@%p2"), [target], grid=2, cluster=2, shared=64)


EXCHANGE = """mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mov.u32 %r3, dynamic;
    shl.b32 %r4, %r0, 4; add.s32 %r5, %r3, %r4;
    mapa.shared::cluster.u32 %r6, %r5, %r2; mapa.shared::cluster.u32 %r7, %r3, %r2; add.s32 %r8, %r7, 512;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r3+512], 1; fence.mbarrier_init.release.cluster;
    READY: barrier.cluster.arrive; barrier.cluster.wait;
    mad.lo.s32 %r10, %r1, 1000, %r0; add.s32 %r11, %r10, 100; add.s32 %r12, %r10, 200; add.s32 %r13, %r10, 300;
    """
SENT = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
EXPECTED = "@!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r3+512], {};".format
ARRIVED = "L: mbarrier.try_wait.parity{}.shared.b64 %p1, [%r3+512], 0; @!%p1 bra L;".format
STORED_BY_LANE = """ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r5];
    ld.param.b64 %q0, [p0]; mad.lo.s32 %r9, %r1, 32, %r0; mad.wide.u32 %q0, %r9, 16, %q0;
    st.global.v4.b32 [%q0], {%r20, %r21, %r22, %r23};
    barrier.cluster.arrive; barrier.cluster.wait; ret;"""


@pytest.mark.parametrize("options", [*MODES, Options("starved", 1, "st_async")], ids=["immediate", "random", "starved"])
@pytest.mark.parametrize("late", [False, True])
def test_asynchronous_stores_between_ctas(late: bool, options: Options) -> None:
    """Two CTAs give each other 16 bytes a lane, which may come before they are expected."""
    target = aligned(np.zeros((2, 32, 4), np.uint32))
    send = f"{SENT}.v4.b32 [%r6], {{%r10, %r11, %r12, %r13}}, [%r8];"
    both = (send, EXPECTED(512)) if late else (EXPECTED(512), send)
    launch(f"{EXCHANGE} {' '.join(both)} {ARRIVED('.acquire.cluster')} {STORED_BY_LANE}", [target], shared=1024,
           block=32, grid=2, cluster=2, options=options)  # fmt: skip
    expected = 1000 * (1 - np.arange(2))[:, None, None] + np.arange(32)[:, None] + 100 * np.arange(4)
    assert np.array_equal(target, expected)


@modes
@pytest.mark.parametrize(
    ("nbytes", "wait", "error"),
    [(1024, ".acquire.cluster", DeadlockError), (512, ".relaxed.cluster", HazardError)],
)
def test_mistakes_with_asynchronous_stores(nbytes: int, wait: str, error: type[Exception], options: Options) -> None:
    """More bytes expected than come; nothing learned by the wait."""
    target = aligned(np.zeros((2, 32, 4), np.uint32))
    send = f"{SENT}.v4.b32 [%r6], {{%r10, %r11, %r12, %r13}}, [%r8];"
    with pytest.raises(error):
        launch(f"{EXCHANGE} {EXPECTED(nbytes)} {send} {ARRIVED(wait)} {STORED_BY_LANE}", [target], shared=1024,
               block=32, grid=2, cluster=2, options=options)  # fmt: skip


@pytest.mark.parametrize(
    ("instruction", "error"),
    [
        (f"{SENT}.v4.b32 [%r6+4], {{%r10, %r11, %r12, %r13}}, [%r8];", "misaligned"),
        (f"{SENT}.b32 [%r6], %r10, [%r3+512];", "with an mbarrier of another CTA"),
    ],
)
def test_asynchronous_stores_that_fault(instruction: str, error: str) -> None:
    with pytest.raises(MemoryFaultError, match=error):
        launch(f"{EXCHANGE} {instruction} ret;", [aligned(np.zeros(256, np.uint32))], shared=1024, block=32, grid=2,
               cluster=2)  # fmt: skip
