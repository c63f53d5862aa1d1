"""Convert a checkpoint in processes that are killed, over and over: ``python -m tests.support.killed_conversion``.

Arguments: the source and a directory to work in. Prints a line of JSON: how many events an undisturbed conversion has,
and of each death whether the directory was a checkpoint afterwards. Exits with 1 if a resumed conversion differs.

A process of its own, which has no threads when it forks.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.convert import shard
from nvfp4_sgl.convert.options import Options
from nvfp4_sgl.convert.run import convert
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.files import UNFINISHED

OPTIONS = Options(shard_size=1_500_000)


def nothing() -> None:
    """An event that is let pass."""


_event: Callable[[], None] = nothing
"""Called before each write of a tensor or of JSON, each fsync, each renaming and each removal."""


def watch() -> None:
    """Have :data:`_event` called."""

    def told(function: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            _event()
            return function(*args, **kwargs)

        return call

    shard._write = told(shard._write)
    for name in ("fsync", "unlink", "rmdir"):
        setattr(os, name, told(getattr(os, name)))
    Path.replace = told(Path.replace)  # type: ignore[method-assign]
    json.dumps = told(json.dumps)


def conversion(source: Path, target: Path, event: Callable[[], None] = nothing) -> None:
    """Convert, with ``event`` as :data:`_event`."""
    global _event
    _event = event
    with contextlib.redirect_stdout(io.StringIO()):
        convert(source, target, OPTIONS, device=torch.device("cpu"), jobs=2)
    _event = nothing


def in_child(work: Callable[[], None]) -> int:
    """What a forked process that does ``work`` ends with, as ``os.waitstatus_to_exitcode`` says it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(source: Path, target: Path, moment: int) -> int:
    count = 0

    def event() -> None:
        nonlocal count
        count += 1
        if count >= moment:
            os.kill(os.getpid(), signal.SIGKILL)

    return in_child(lambda: conversion(source, target, event))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()}


def is_checkpoint(directory: Path) -> bool:
    """Whether it is one; else the refusal must say what to do."""
    try:
        verify(directory)
    except ConfigError as error:
        known = ("an unfinished conversion", "run the same 'nvfp4-sgl convert' command again")
        assert not directory.exists() or not any(directory.iterdir()) or all(k in str(error) for k in known), error
        return False
    return True


def main(source: Path, root: Path) -> int:
    whole = root / "whole"
    seen: list[int] = []
    torch.set_num_threads(1)  # no thread is left behind to be forked
    watch()
    conversion(source, whole, lambda: seen.append(1))
    events, expected = len(seen), contents(whole)
    chosen = {1, 2, 3, 4, *range(events - 16, events + 1), *random.Random(5).sample(range(5, events - 16), 8)}
    deaths = {}
    for moment in sorted(chosen):
        target = root / f"killed-{moment}"
        assert killed_at(source, target, moment) == -signal.SIGKILL, moment
        deaths[moment] = is_checkpoint(target)
        if deaths[moment]:
            assert {n: b for n, b in contents(target).items() if not n.startswith(UNFINISHED)} == expected, moment
        assert in_child(partial(conversion, source, target)) == 0, moment
        assert contents(target) == expected, moment
        shutil.rmtree(target)
    # Again and again: each run gets somewhat further than the one before.
    runs, target = 0, root / "often"
    while killed_at(source, target, 40 + 60 * runs) == -signal.SIGKILL:
        runs += 1
        assert runs < 100
    assert contents(target) == expected and runs >= 3
    print(json.dumps({"events": events, "deaths": deaths, "runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
