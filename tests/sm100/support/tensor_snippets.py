"""Runs a few tcgen05 instructions on given shared and tensor memory and returns what tensor memory holds then."""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.engines import Options
from tests.sm100.emulator.memory import SHARED_BASE
from tests.sm100.support.snippets import launch

THREADS = 128
CHUNK = 8
"""Columns moved at a time."""


def registers(first: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(CHUNK)) + "}"


def tensor_body(code: str, ctas: int, size: int, columns: int, *, every_warp: bool = False) -> str:
    """PTX of a kernel: fill shared and tensor memory, run ``code``, store tensor memory.

    Reads %r1, the rank in the cluster, %r21, the thread's index, %r3, the begin of ``size`` + 16 bytes of shared memory
    aligned to 1024, and the addresses %q0 of the bytes that go there, %q2 of tensor memory's contents before and %q4 of
    those after; arguments as of :func:`run_tensor_code`.
    """
    assert size % (16 * THREADS) == 0 and columns % CHUNK == 0
    steps = range(0, columns, CHUNK)
    kind = f"cta_group::{ctas}"
    multicast = ".multicast::cluster" if ctas == 2 else ""
    destinations = ", %h0" if ctas == 2 else ""
    quads = [f"{{{', '.join(f'%r{40 + i + j}' for j in range(4))}}}" for i in (0, 4)]
    fill = "".join(
        f"ld.global.v4.b32 {quads[0]}, [%q3+{4 * c}];\nld.global.v4.b32 {quads[1]}, [%q3+{4 * c + 16}];\n"
        f"tcgen05.st.sync.aligned.32x32b.x{CHUNK}.b32 [%r23+{c}], {registers(40)};\n"
        for c in steps
    )
    dump = "".join(
        f"tcgen05.ld.sync.aligned.32x32b.x{CHUNK}.b32 {registers(40)}, [%r23+{c}];\ntcgen05.wait::ld.sync.aligned;\n"
        f"st.global.v4.b32 [%q4+{4 * c}], {quads[0]};\nst.global.v4.b32 [%q4+{4 * c + 16}], {quads[1]};\n"
        for c in steps
    )
    guarded = code if every_warp else f"setp.ne.s32 %p1, %r22, 0;\n@%p1 bra AFTER;\n{code}"
    return f"""
    shl.b32 %r2, %r1, 7; or.b32 %r22, %r2, %r21;
    mul.lo.s32 %r4, %r21, 16; add.s32 %r5, %r3, %r4;
    mad.wide.u32 %q0, %r1, {size}, %q0; cvt.u64.u32 %q1, %r4; add.s64 %q1, %q0, %q1;
    {
        "".join(
            f"ld.global.v4.b32 {quads[0]}, [%q1+{at}]; st.shared.v4.b32 [%r5+{at}], {quads[0]};"
            for at in range(0, size, 16 * THREADS)
        )
    }
    fence.proxy.async.shared::cta;
    setp.ge.s32 %p0, %r21, 32;
    @%p0 bra READY;
    tcgen05.alloc.{kind}.sync.aligned.shared::cta.b32 [%r3+{size}], 512;
    tcgen05.relinquish_alloc_permit.{kind}.sync.aligned;
    setp.ne.s32 %p0, %r21, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r3+{size + 8}], 1;
    fence.mbarrier_init.release.cluster;
    READY:
    bar.warp.sync -1;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    ld.shared.b32 %r20, [%r3+{size}];
    and.b32 %r6, %r21, 96; shl.b32 %r6, %r6, 16; add.s32 %r23, %r20, %r6;
    mad.wide.u32 %q3, %r22, {4 * columns}, %q2; mad.wide.u32 %q4, %r22, {4 * columns}, %q4;
    {fill}
    tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    tcgen05.fence::after_thread_sync;
    add.s32 %r7, %r3, {size + 8};
    mov.b16 %h0, 3;
    {guarded}
    {"bar.warp.sync -1; tcgen05.wait::st.sync.aligned; setp.ne.s32 %p1, %r22, 0; @%p1 bra AFTER;" if every_warp else ""}
    tcgen05.commit.{kind}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [%r7]{destinations};
    AFTER:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r3+{size + 8}], 0;
    @!%p2 bra AFTER;
    bar.warp.sync -1;
    tcgen05.fence::after_thread_sync;
    {dump}
    tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    setp.ge.s32 %p0, %r21, 32;
    @%p0 bra DONE;
    tcgen05.dealloc.{kind}.sync.aligned.b32 %r20, 512;
    DONE:"""


def run_tensor_code(
    code: str, shared: np.ndarray, cells: np.ndarray, options: Options | None = None, *, every_warp: bool = False
) -> np.ndarray:
    """Tensor memory after ``code``.

    Args:
        code: run by the first thread of the first CTA (or, with ``every_warp``, by all warps); %r20 is the tensor
            memory's begin, %r21 the thread's index.
        shared: u8 [CTAs, bytes], the first bytes of each CTA's shared memory (from offset ``SHARED_BASE`` on).
        cells: u32 [CTAs, 128, columns], what tensor memory holds before.
    """
    ctas, size = shared.shape
    columns = cells.shape[2]
    result = np.ascontiguousarray(cells, np.uint32).copy()
    body = f"""
    mov.u32 %r21, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r3, dynamic;
    ld.param.b64 %q0, [p0]; ld.param.b64 %q2, [p1]; mov.b64 %q4, %q2;
    {tensor_body(code, ctas, size, columns, every_warp=every_warp)}
    ret;"""
    launch(
        body,
        [np.ascontiguousarray(shared), result],
        options=options,
        block=THREADS,
        grid=ctas,
        cluster=ctas,
        shared=size + 16,
    )
    return result


def matrix_descriptor(offset: int, leading: int, stride: int) -> int:
    """Descriptor of an operand without swizzle whose first byte is at ``offset`` of the given shared memory."""
    return (SHARED_BASE + offset) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46


def core_matrices(rows: np.ndarray) -> np.ndarray:
    """u8 [rows, bytes] in the layout without swizzle: blocks of 8 rows by 16 bytes, along the rows first.

    Its descriptor has stride 128 (from 8 rows to the next) and leading 16·rows (from 16 bytes to the next).
    """
    count, width = rows.shape
    return np.ascontiguousarray(rows.reshape(count // 8, 8, width // 16, 16).transpose(2, 0, 1, 3)).ravel()
