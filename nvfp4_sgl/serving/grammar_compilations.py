"""Grammars that are being compiled, and the requests that wait for them.

:class:`Compilations` takes the place of the thread pool of SGLang's grammar backend. To abort a request, SGLang cancels
its future; when all requests of a compilation have gone, so has the compilation.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)

MAX_SECONDS = 8.0
"""Bound on one compilation, from when the request comes to the scheduler: clients have an answer within ten."""

AT_ONCE = 4
"""Grammars that are compiled at the same time."""


class Stopped(Exception):
    """A compilation that was stopped; no request waits for its grammar, which may be a good one."""


class Compilation:
    """One grammar that is being compiled, for one request or for several.

    Args:
        number: counted alike on all ranks.
        deadline: on the clock of :func:`time.monotonic`.
    """

    def __init__(self, number: int, deadline: float) -> None:
        self.number, self.deadline = number, deadline
        self.outcome: SimpleQueue[bytes] = SimpleQueue()
        """Where the first rank's outcome comes on another rank."""
        self.stopped = False
        self._waiting: list[Waiting] = []
        self._result: Callable[[], Any] | None = None
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    def join(self) -> Waiting:
        """Add a request; returns the future that it waits for."""
        with self._lock:
            waiting = Waiting(self)
            self._waiting.append(waiting)
            if self._result is not None:
                fulfil(waiting, self._result)
            return waiting

    def leave(self) -> None:
        """Remove an aborted request; stop if it was the last one."""
        with self._lock:
            if self._result is None and all(waiting.cancelled() for waiting in self._waiting):
                self._stop()

    def watch(self, connection: socket.socket) -> None:
        """Remember ``connection``, which :meth:`leave` closes."""
        with self._lock:
            self._connection = connection
            if self.stopped:
                self._stop()

    def finish(self, result: Callable[[], Any]) -> None:
        """Give all requests what ``result`` returns: an exception, or a grammar of its own to each."""
        with self._lock:
            self._result = result
            for waiting in self._waiting:
                fulfil(waiting, result)

    def has_any(self, waiting: Collection[Any]) -> bool:
        """Whether one of the futures ``waiting`` is of this compilation."""
        return any(one in self._waiting for one in waiting)

    def _stop(self) -> None:
        self.stopped = True
        self.outcome.put(b"")
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it has been closed at the other end
                self._connection.shutdown(socket.SHUT_RDWR)


class Waiting(Future[Any]):
    """The entry of a request in SGLang's queue of grammars."""

    def __init__(self, compilation: Compilation) -> None:
        super().__init__()
        self._compilation = compilation

    def cancel(self) -> bool:
        """Cancel, as any future; SGLang calls this to abort a request."""
        cancelled = super().cancel()
        self._compilation.leave()
        return cancelled


def fulfil(waiting: Waiting, result: Callable[[], Any]) -> None:
    """Give ``waiting`` what ``result`` returns, an exception to be raised or a grammar, unless it was cancelled."""
    with contextlib.suppress(InvalidStateError):
        value = result()
        if isinstance(value, Exception):
            waiting.set_exception(value)
        else:
            waiting.set_result(value)


class Compilations:
    """Replacement of the thread pool of SGLang's grammar backend, which calls ``submit``.

    Equal grammars that are asked for before the first of them is in SGLang's cache are compiled once.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE, "grammar")
        self._count = 0
        self._running: dict[Any, Compilation] = {}
        self._thread = threading.local()

    def submit(self, compile: Callable[..., Any], *key: Any) -> Waiting:
        """Call ``compile(*key)`` in a thread."""
        compilation = self._running.get(key)
        if compilation is None or compilation.stopped:
            compilation = Compilation(self._count, time.monotonic() + MAX_SECONDS)
            self._count += 1
            self._running[key] = compilation
            self._pool.submit(self._run, compilation, compile, key)
        return compilation.join()

    def _run(self, compilation: Compilation, compile: Callable[..., Any], key: Any) -> None:
        self._thread.compilation = compilation
        try:
            grammar = compile(*key)
        except Exception as raised:
            error = raised
            if isinstance(error, Stopped):
                logger.info("nvfp4_sgl: %s", error)
            compilation.finish(lambda: error)
        else:
            copies = itertools.chain([grammar], iter(grammar.copy, None))
            compilation.finish(lambda: next(copies))

    def current(self) -> Compilation:
        """The compilation that the calling thread works on."""
        found: Compilation = self._thread.compilation
        return found

    def numbered(self, number: int) -> Compilation | None:
        """The compilation of that number, unless its requests have gone."""
        return next((one for one in self._running.values() if one.number == number), None)

    def keep(self, waiting: Collection[Any]) -> None:
        """Drop compilations of which none of the futures ``waiting`` is in SGLang's queue any more."""
        self._running = {key: one for key, one in self._running.items() if one.has_any(waiting)}
