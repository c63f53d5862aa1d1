"""The fences that tensor memory needs where its roles meet over mbarriers."""

from __future__ import annotations

import cutlass.cute as cute


def fence_before_signal() -> None:
    """Orders this thread's tcgen05 operations before a following arrive (PTX ISA, tcgen05.fence)."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_wait() -> None:
    """Orders this thread's following tcgen05 operations after a preceding wait."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
