"""Keeps Ctrl-C from a server's processes: the launcher alone ends at it, and ends them.

A terminal sends SIGINT to each process of its foreground group. SGLang's would end with a traceback each, and the
launcher might take that for a crash.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

from nvfp4_sgl.serving.arguments import serves_ours


def spare_children(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hook around the start of processes: they inherit the signals that this thread blocks."""
    with blocked() if serves_ours() else contextlib.nullcontext():
        return original(*args, **kwargs)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block SIGINT in this thread; one that comes meanwhile is delivered afterwards."""
    resource_tracker.ensure_running()  # its start, which the first process would bring, ends with SIGINT unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
