"""Processes that are ending are waited for: only then is it known how they have ended."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nvfp4_sgl.serving.process_ends import failed, is_ending

FORK = multiprocessing.get_context("fork")  # a fresh interpreter would import this package first
EXIT = {"x86_64": 60, "aarch64": 93}[platform.machine()]
"""The system call that ends a thread."""


def linger(end: Any) -> None:
    """End the main thread, and the process when told: nobody can ask how it has ended before its last thread has."""

    def kill() -> None:
        end.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill).start()
    ctypes.CDLL(None).syscall(EXIT, 0)


def started(target: Callable[..., None], *arguments: object) -> Any:
    process = FORK.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


@pytest.fixture
def end() -> Any:
    return FORK.Event()


@pytest.fixture
def ending(end: Any) -> Iterator[Any]:
    """A process that is ending, and does not before ``end`` is set."""
    process = started(linger, end)
    deadline = time.monotonic() + 60
    while not is_ending(process):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    yield process
    end.set()
    process.join(60)


def test_a_process_that_is_ending_is_waited_for(end: Any, ending: Any) -> None:
    running = started(time.sleep, 600)
    try:
        assert ending.exitcode is None and not is_ending(running)
        threading.Timer(0.3, end.set).start()
        found = failed([("scheduler_0", running), ("scheduler_1", ending)], seconds=60)
        assert found == [("scheduler_1", -signal.SIGKILL)]
        assert not is_ending(ending)
    finally:
        running.kill()


def test_no_longer_than_it_may_take(ending: Any) -> None:
    assert failed([("scheduler_0", ending)], seconds=0.1) == []


def test_one_that_runs_or_has_ended_well_is_not_named() -> None:
    running, well = started(time.sleep, 600), started(time.sleep, 0)
    well.join(60)
    assert failed([("scheduler_0", running), ("detokenizer", well)]) == []
    running.kill()
