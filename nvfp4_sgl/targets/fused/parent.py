"""Processes that compile end with the one that started them: nobody else would end them, and they hold a lock."""

from __future__ import annotations

import ctypes
import os
import signal

SET_DEATH_SIGNAL = 1
"""Option of Linux's ``prctl``; a process that is forked from this one does not inherit it."""


def end_with(parent: int, death: signal.Signals = signal.SIGKILL) -> None:
    """Make Linux send ``death`` to this process when its parent ends; end now if ``parent`` has ended.

    Linux watches the parent's thread: the one that started this process must live as long as it is wanted.

    Args:
        parent: the number that the parent itself has told.

    Raises:
        OSError: Linux refuses it.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(SET_DEATH_SIGNAL, int(death), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # It may have ended before the call, which tells of later ends alone.
    if os.getppid() != parent:
        os.kill(os.getpid(), death)
