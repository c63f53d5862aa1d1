"""Runs wgmma instructions on given shared memory and registers of a warpgroup and returns the accumulators."""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.engines import Options
from tests.sm100.emulator.memory import SHARED_BASE
from tests.sm100.support.snippets import LANES, launch

THREADS = 128
UNWRITTEN = 2048
"""Bytes of shared memory after those given."""
READY = "fence.proxy.async.shared::cta; bar.sync 0;"
A_FIRST, FIRST = 60, 64
"""The first registers of A and of the accumulators."""
FENCE = "wgmma.fence.sync.aligned;\n"
COMMIT = "wgmma.commit_group.sync.aligned;\n"
WAIT = "wgmma.wait_group.sync.aligned 0;\n"


def descriptor(offset: int, leading: int = 0, stride: int = 0, layout: int = 0, base: int = 0) -> int:
    """Descriptor of an operand whose first byte is at ``offset`` of the given shared memory."""
    return (SHARED_BASE + offset) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | layout << 62


def vector(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def multiply(
    columns: int, a: int | None, b: int, *, kind: str = "bf16", keep: str = "%p1", rest: str = "1, 1, 0, 0"
) -> str:
    """One wgmma; ``a`` and ``b`` are descriptors, None for A in registers. %p1 is true."""
    types, depth = f"f32.{kind}" if "." in kind else f"f32.{kind}.{kind}", 16 if "f16" in kind else 32
    code = "" if a is None else f"mov.b64 %q20, {a};\n"
    left = vector(A_FIRST, 4) if a is None else "%q20"
    return (
        f"{code}mov.b64 %q21, {b};\nwgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{types} "
        f"{vector(FIRST, columns // 2)}, {left}, %q21, {keep}, {rest};\n"
    )


def kernel_body(code: str, columns: int, size: int, ready: str) -> str:
    """Fill shared memory and registers, run ``code`` by all warps, store the accumulators."""
    steps = range(0, columns // 2, 4)
    fill = "".join(f"ld.global.v4.b32 {vector(FIRST + at, 4)}, [%q4+{4 * at}];\n" for at in steps)
    dump = "".join(f"st.global.v4.b32 [%q4+{4 * at}], {vector(FIRST + at, 4)};\n" for at in steps)
    copies = "".join(
        f"ld.global.v4.b32 {{%r8,%r9,%r10,%r11}}, [%q2+{at}]; st.shared.v4.b32 [%r2+{at}], {{%r8,%r9,%r10,%r11}};\n"
        for at in range(0, size, 16 * THREADS)
    )
    return f"""
    mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic; setp.eq.u32 %p1, %r0, %r0; setp.ne.u32 %p2, %r0, %r0;
    shl.b32 %r3, %r0, 4; add.s32 %r2, %r1, %r3;
    ld.param.b64 %q2, [p0]; mad.wide.u32 %q2, %r0, 16, %q2;
    ld.param.b64 %q3, [p1]; mad.wide.u32 %q3, %r0, 16, %q3;
    ld.param.b64 %q4, [p2]; mad.wide.u32 %q4, %r0, {2 * columns}, %q4;
    {copies}
    {ready}
    ld.global.v4.b32 {vector(A_FIRST, 4)}, [%q3];
    {fill}
    {code}
    {dump}
    ret;"""


def run(
    code: str, shared: np.ndarray, fragments: np.ndarray | None, accumulators: np.ndarray,
    options: Options | None = None, *, target: str = "sm_90a", ready: str = READY,
) -> np.ndarray:  # fmt: skip
    """Accumulators f32 [128, columns / 2], by thread, after ``code``.

    Args:
        code: PTX that every warp runs; %r0 is the thread, %r1 where shared memory begins.
        shared: u8, the first bytes of shared memory; a multiple of 2048.
        fragments: u32 [128, 4], A's registers.
        accumulators: f32 [128, columns / 2] before.
        options: as ``launch`` takes them.
        target: the architecture.
        ready: what stands between the writes to shared memory and ``code``.
    """
    assert shared.size % (16 * THREADS) == 0
    result = np.ascontiguousarray(accumulators, np.float32).copy()
    held = np.zeros((THREADS, 4), np.uint32) if fragments is None else np.ascontiguousarray(fragments)
    body = kernel_body(code, 2 * accumulators.shape[1], shared.size, ready)
    launch(
        body, [np.ascontiguousarray(shared), held, result], options=options, block=THREADS,
        shared=shared.size + UNWRITTEN, target=target, registers=256,
    )  # fmt: skip
    return result


def accumulator_fragments(matrix: np.ndarray) -> np.ndarray:
    """[128, N / 2]: what each thread holds of [64, N], as the ISA says it element by element."""
    found = np.zeros((THREADS, matrix.shape[1] // 2), matrix.dtype)
    for thread in range(THREADS):
        warp, lane = divmod(thread, LANES)
        for i in range(found.shape[1]):
            row = 16 * warp + lane // 4 + (8 if i % 4 >= 2 else 0)
            found[thread, i] = matrix[row, i // 4 * 8 + lane % 4 * 2 + i % 2]
    return found


def operand_fragments(matrix: np.ndarray) -> np.ndarray:
    """u32 [128, 4]: what each thread holds of A, [64, K] of elements of 16 or 8 bits; as above."""
    wide = matrix.itemsize == 2
    found = np.zeros((THREADS, 8 if wide else 16), matrix.dtype)
    for thread in range(THREADS):
        warp, lane = divmod(thread, LANES)
        for i in range(found.shape[1]):
            if wide:
                row = lane // 4 + (0 if i in (0, 1, 4, 5) else 8)
                column = lane % 4 * 2 + (i & 1) + (0 if i < 4 else 8)
            else:
                row = lane // 4 + (0 if i < 4 or 8 <= i < 12 else 8)
                column = lane % 4 * 4 + (i & 3) + (0 if i < 8 else 16)
            found[thread, i] = matrix[16 * warp + row, column]
    return np.ascontiguousarray(found).view(np.uint32)
