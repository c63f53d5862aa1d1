"""Other people's kernels for bench_kernels: imported when they first run, so that what one of them lacks is
its own failure and no case's. Names of those that nvcc compiles at their first call say so."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.families import Peer, relative_error


def installed(*packages: str) -> bool:
    """Whether all of them could be imported, as far as their files tell."""
    return all(importlib.util.find_spec(package) is not None for package in packages)


def foreign(module: str, function: str) -> Callable[..., Any]:
    """``module.function`` (or a class's, with a dot), imported by its first call."""

    @functools.cache
    def load() -> Callable[..., Any]:
        found: Callable[..., Any] = operator.attrgetter(function)(importlib.import_module(module))
        return found

    return lambda *args, **kwargs: load()(*args, **kwargs)


def compared(
    run: Callable[[], Any], ours: Tensor, theirs: Tensor | None = None, *, limit: float = 0.01, part: bool = False
) -> Peer:
    """A peer whose result must be near ours.

    Args:
        run: the peer's op.
        ours: where the case's ``run`` leaves its result.
        theirs: where ``run`` leaves its own; ``None`` if it returns it.
    """
    return Peer(run, lambda: relative_error(run() if theirs is None else theirs, ours), limit, part)
