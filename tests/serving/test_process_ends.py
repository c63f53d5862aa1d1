"""Processes that are ending are waited for: only then is it known how they have ended."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

from nvfp4_sgl.serving.process_ends import failed, is_ending

LINGER_SECONDS = 0.5
EXIT = 60
"""The system call that ends a thread."""


def lingering() -> None:
    """End the main thread, and the process later: nobody can ask how it has ended before its last thread has."""

    def end() -> None:
        time.sleep(LINGER_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end).start()
    ctypes.CDLL(None).syscall(EXIT, 0)


def started(target: Callable[..., None], *arguments: object) -> multiprocessing.Process:
    # Forked: a fresh interpreter would import this package first.
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments, daemon=True)
    process.start()
    return process  # type: ignore[return-value]


def test_a_process_that_is_ending_is_waited_for() -> None:
    ending, running = started(lingering), started(time.sleep, 60)
    try:
        begun = time.monotonic()
        while not is_ending(ending):
            assert time.monotonic() < begun + 10
            time.sleep(0.005)
        assert ending.exitcode is None and not is_ending(running)
        assert failed([("scheduler_0", running), ("scheduler_1", ending)]) == [("scheduler_1", -signal.SIGKILL)]
        assert not is_ending(ending)
    finally:
        running.kill()


def test_no_longer_than_it_may_take() -> None:
    ending = started(lingering)
    while not is_ending(ending):
        time.sleep(0.005)
    assert failed([("scheduler_0", ending)], seconds=0.0) == []
    ending.join(10)
    assert failed([("scheduler_0", ending)], seconds=0.0) == [("scheduler_0", -signal.SIGKILL)]


def test_one_that_runs_or_has_ended_well_is_not_named() -> None:
    running, well = started(time.sleep, 60), started(time.sleep, 0)
    well.join(10)
    assert failed([("scheduler_0", running), ("detokenizer", well)]) == []
    running.kill()
