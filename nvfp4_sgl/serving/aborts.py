"""Aborts a request by its own name (``rid``), and no other.

SGLang's scheduler aborts every request whose name begins with the one that is given. When a client with the name ``a``
hung up, requests of others ended: names that the server gives are hexadecimal.

Two seconds after the end of a stream SGLang aborts what has its name by then. That may be another request: a later one,
or the first of two of one name, when the second was refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.background import BackgroundTask

from nvfp4_sgl.serving.requests import serves_our_model
from nvfp4_sgl.serving.sglang import front_end, scheduling


def abort_request(original: Callable[..., None], scheduler: Any, asked: Any) -> None:
    """Hook around the scheduler's abort, of all requests or of one: names that only begin alike are hidden from it."""
    others = set() if asked.abort_all else {one for one in scheduling.requests(scheduler) if one.rid != asked.rid}
    names = {one: one.rid for one in others}
    try:
        for one in others:
            one.rid = ""  # begins with nothing
        original(scheduler, asked)
    finally:
        for one, name in names.items():
            one.rid = name


def abort_after_stream(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Hook around what SGLang does when the stream of ``request`` has ended: abort what is left of this request."""
    if not serves_our_model():
        return original(manager, request)

    async def abort() -> None:
        front_end.abort_own(manager, request)

    return BackgroundTask(abort)
