"""SGLang's tokenizer manager: requests before they reach the scheduler, and the processes behind it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from nvfp4_sgl.serving.sglang.ledger import find, module


def look_for_clients(seconds: float) -> None:
    """Make the front end check at this interval whether the client of a waiting request has left."""
    vars(module("tokenizer_manager"))["_REQUEST_STATE_WAIT_TIMEOUT"] = seconds


def abort_own(manager: Any, request: Any) -> None:
    """Have ``manager`` abort what is unfinished of ``request``, an expanded ``GenerateReqInput``, and no namesake."""
    names = [request.rid] if request.is_single else request.rid
    for index, name in enumerate(names):
        state = manager.rid_to_state.get(name)
        if state is not None and state.obj is (request if request.is_single else request[index]):
            manager.abort_request(name)


def watched_processes(handler: Any) -> list[tuple[str, Any]]:
    """Name and ``multiprocessing`` process of a server's processes; names are ``scheduler_RANK`` and ``detokenizer``.

    Args:
        handler: SGLang's ``SignalHandler``.
    """
    watchdog = handler.tokenizer_manager._subprocess_watchdog
    if watchdog is None:
        return []
    return list(zip(watchdog._names, watchdog._processes, strict=True))


def limit_shutdown(manager: Any, seconds: int) -> None:
    """Have uvicorn wait at most ``seconds`` for clients once SGLang has drained all requests and ended its processes.

    It would wait for ever for a client that has sent half a request, or reads no more.

    Args:
        manager: SGLang's ``TokenizerManager``, before the HTTP server is made.
    """
    set_stop_hook = manager.set_server_stop_hook

    def set_limited(stop: Callable[[], None]) -> None:
        config = inspect.getclosurevars(stop).nonlocals["server"].config

        def stop_in_time() -> None:
            config.timeout_graceful_shutdown = seconds
            stop()

        set_stop_hook(stop_in_time)

    manager.set_server_stop_hook = set_limited


def stop_watching(manager: Any) -> None:
    """Let processes end from now on: SGLang's watchdog takes those that the launcher kills for crashed.

    Args:
        manager: SGLang's ``TokenizerManager``.
    """
    if manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()


def transport_fault(message: Any) -> str | None:
    """Why the scheduler could not read ``message`` to it, or ``None``; its times are pickled when it is sent."""
    decode, encode = find("msgpack_decode"), find("msgpack_encode")
    try:
        decode(encode(msgspec.structs.replace(message, time_stats=None)))
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as error:
        return str(error)
    return None


def serves_chats(serving: Any) -> bool:
    """Whether a handler of OpenAI's requests is the one of chats."""
    return isinstance(serving, find("OpenAIServingChat"))


def chat_fault(chat: Any, request: Any) -> str | None:
    """Why SGLang's handler of chats refuses ``request``, or ``None``."""
    fault: str | None = chat._validate_request(request)
    return fault


def converted_chat(chat: Any, request: Any, raw: Any) -> Any:
    """``request`` as SGLang's handler of chats sends it on, rendered and tokenised."""
    return chat._convert_to_internal_request(request, raw)


def use_no_template(manager: Any) -> None:
    """Have SGLang's ``TemplateManager`` as it is for a checkpoint without a template."""
    manager._jinja_template_content_format = "string"
