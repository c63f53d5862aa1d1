"""Threads beside the front end's event loop, for work that grows with a request, and the clients that wait for it.

``tokenizers`` and ``deepseek-recipe`` release the GIL while they tokenise, so the loop goes on meanwhile. Long bodies
have threads of their own: short ones do not wait behind them.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

LONG_BODY_BYTES = 2**18
"""Bodies above this go to :data:`LONG`; tokenising as many bytes takes 0.2 s."""

LONG_WORKERS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Few threads, since a text of 31 MB takes 34 s and gigabytes of memory, and short texts need a core, too."""

SHORT = ThreadPoolExecutor(4, "short-text")
LONG = ThreadPoolExecutor(LONG_WORKERS, "long-text")


class ClientLeft(ValueError):
    """The client has hung up; a :class:`ValueError`, since SGLang ends a request at one without a traceback."""


class ClientGone(Exception):
    """:class:`ClientLeft` for handlers of SGLang that log a traceback at a :class:`ValueError`."""


@dataclass
class Client:
    """The client of the request that a task answers.

    Args:
        receive: the ASGI channel, of which the body has been read.
        body_bytes: the body's length.
    """

    receive: Callable[[], Awaitable[Any]]
    body_bytes: int
    _departure: asyncio.Task[None] | None = None

    def departure(self) -> asyncio.Task[None]:
        """A task that ends when the client hangs up."""
        if self._departure is None:
            self._departure = asyncio.create_task(self._wait())
        return self._departure

    async def _wait(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def served(self) -> None:
        """Stop to wait for the client's departure."""
        if self._departure is not None:
            self._departure.cancel()


_client: contextvars.ContextVar[Client | None] = contextvars.ContextVar("nvfp4_sgl_client", default=None)


def answering(client: Client) -> None:
    """Count the work of this task, and of those that it starts, as work for ``client``."""
    _client.set(client)


async def in_worker(function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)`` in a thread; in this one where there is no client, as in an engine without a server.

    Raises:
        ClientLeft: the client has hung up; the work is dropped if it has not begun, else its result is.
    """
    client = _client.get()
    if client is None:
        return function(*arguments)
    executor = LONG if client.body_bytes > LONG_BODY_BYTES else SHORT
    work = asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
    try:
        awaited: set[asyncio.Future[Any]] = {work, client.departure()}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientLeft("the client has hung up")
    finally:
        work.cancel()


def run_to_end(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of the coroutine ``function(*arguments)``, which waits for nothing and so needs no event loop."""
    coroutine = function(*arguments)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError(f"{function}: expected a coroutine that waits for nothing")
