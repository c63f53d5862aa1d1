"""Semaphores of programs that wait for one another within a launch: int32 in global memory, zero between launches.

A program first raises a semaphore by ``tl.atomic_add`` with release semantics, after a barrier behind its stores. The
programs that wait for it count themselves out afterwards, and the last of these leaves zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import INTERPRETED


@triton.jit
def wait_for(semaphore, count):
    """Wait until a semaphore has been raised ``count`` times; then loads that bypass L1 see what was stored before.

    Every thread polls for itself, so that no broadcast is needed; loads queue less in L2 than atomic operations.
    """
    if INTERPRETED:
        while tl.atomic_add(semaphore, 0, sem="acquire", scope="gpu") < count:
            pass
    else:
        while (
            tl.inline_asm_elementwise(
                "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [semaphore.to(tl.int64)], dtype=tl.int32, is_pure=False,
                pack=1,
            )
            < count
        ):  # fmt: skip
            pass
        # Counting out may zero the semaphore, for which no thread may still be waiting.
        tl.debug_barrier()


@triton.jit
def count_out(semaphore, last):
    """Count this program out: it waits no longer. The program that finds the semaphore at ``last`` resets it to zero.

    One thread increments and none waits for the result: ``inc`` wraps around to zero by itself.
    """
    if INTERPRETED:
        if tl.atomic_add(semaphore, 1, sem="relaxed", scope="gpu") == last:
            tl.store(semaphore, 0)
    else:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first red.relaxed.gpu.global.inc.u32 [$1], $2;
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r",
            [semaphore, last],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
