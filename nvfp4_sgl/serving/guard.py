"""The one ASGI middleware in front of SGLang's HTTP application, for servers of our model only.

It refuses paths and bodies by :mod:`nvfp4_sgl.serving.endpoints` and :mod:`nvfp4_sgl.serving.fields`, answers 503 to
new requests while the server drains, and gives a stream that begins with an error the status of that error: SGLang has
sent status 200 before it knows. Only CORS stands in front of it, so that a browser may read what it says.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from nvfp4_sgl.errors import INTERRUPTED
from nvfp4_sgl.serving.endpoints import (
    MAX_BODY_BYTES,
    Access,
    Kind,
    Refusal,
    described,
    has_key,
    kind_of,
    refuse_body,
    refuse_path,
)
from nvfp4_sgl.serving.fields.bodies import BODIES, checked_body
from nvfp4_sgl.serving.fields.field import MODES
from nvfp4_sgl.serving.fields.limits import DRAFTING
from nvfp4_sgl.serving.http_port import ending
from nvfp4_sgl.serving.process_ends import failed
from nvfp4_sgl.serving.requests import advertise_length, serves_our_model
from nvfp4_sgl.serving.sglang import front_end, http_server, settings
from nvfp4_sgl.serving.tokenizing import limit_texts
from nvfp4_sgl.serving.workers import LONG_BODY_BYTES, Client, ClientGone, ClientLeft, answering, in_worker

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

DRAINING = Refusal(503, "the server is shutting down; it finishes what runs and takes nothing new")
FREEZE_GC = "/freeze_gc"

LAST_SECONDS = 3
"""Most seconds in which clients read their answers, once a server that was asked to end has given all."""

CLIENT_POLL_SECONDS = 0.4
"""How often a waiting request's client is looked for, so that what is done for one who has left ends within a second.
SGLang's four seconds are long for the compilation of a grammar."""


class Guard:
    """ASGI application around ``application``.

    Args:
        draining: whether the server has been asked to stop.
    """

    def __init__(self, application: Application, access: Access, draining: Callable[[], bool]) -> None:
        self._application, self._access, self._draining = application, access, draining
        # SGLang itself asks for this path once, when the server is ready, and has no key of ours to send.
        self._may_freeze = access.admin_key is None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "lifespan":
            await self._application(scope, noting_the_end(receive), send)
        elif scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self._application(scope, receive, send)
        else:
            await self._http(scope, receive, send)

    def _is_own(self, authorization: bytes) -> bool:
        """Whether the caller may be SGLang itself, which sends ``--api-key`` if there is one."""
        return self._access.api_key is None or has_key(authorization, self._access.api_key)

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers = dict(scope["headers"])
        # SGLang takes the first of several, other servers the last.
        authorizations = [value for name, value in scope["headers"] if name == b"authorization"]
        authorization = authorizations[0] if authorizations else b""
        refusal = refuse_path(path, authorization, self._access)
        if len(authorizations) > 1:
            refusal = Refusal(400, f"Authorization: expected one, found {len(authorizations)}")
        elif path == FREEZE_GC and self._may_freeze and self._is_own(authorization):
            self._may_freeze, refusal = False, None
        if refusal is None and takes_body(path, scope["method"]):
            inference = kind_of(path) is Kind.INFERENCE
            if inference and self._draining():
                refusal = DRAINING
            elif headers.get(b"content-encoding", b"identity") != b"identity":
                refusal = Refusal(415, "Content-Encoding: not supported; send the body as it is")
            elif inference and not is_json(headers.get(b"content-type", b"application/json")):
                sent = headers.get(b"content-type", b"").decode(errors="replace")
                refusal = Refusal(415, f"Content-Type: found {sent[:80]!r}; expected application/json")
            else:
                try:
                    body = await read_body(receive)
                except asyncio.CancelledError:  # uvicorn has waited LAST_SECONDS for the rest
                    if not self._draining():
                        raise
                    await answer(send, DRAINING, path)
                    return
                if body is None:
                    return  # the client has hung up
                if inference:
                    await self._infer(path, body, scope, receive, send)
                    return
                if body:  # administrative paths may be sent none
                    refusal, body = checked_request(path, body)
                receive = replayed(body, receive)
        if refusal is not None:
            await answer(send, refusal, path)
        else:
            await self._application(scope, receive, send)

    async def _infer(self, path: str, body: bytes, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request that computes, unless its client hangs up first."""
        client = Client(receive, len(body))
        answering(client)
        try:
            long = LONG_BODY_BYTES < len(body) <= MAX_BODY_BYTES
            refusal, body = await in_worker(checked_request, path, body) if long else checked_request(path, body)
            if refusal is not None:
                await answer(send, refusal, path)
            else:
                await self._application(scope, replayed(body, receive), StreamStatus(send))
        except (ClientLeft, ClientGone):
            pass
        finally:
            client.served()


def checked_request(path: str, body: bytes) -> tuple[Refusal | None, bytes]:
    """Why a request with a body is not passed on, or ``None``, and the body to pass on."""
    refusal = refuse_body(body)
    if refusal is not None:
        return refusal, body
    fault, body = checked_body(path, body)
    return Refusal(400, fault) if fault is not None else None, body


def is_json(content_type: bytes) -> bool:
    """Whether a ``Content-Type`` is one with which SGLang parses a body: ``application/json``, or ``…+json``."""
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def takes_body(path: str, method: str) -> bool:
    """Whether a body is looked at. SGLang reads those of administrative paths whatever the method."""
    if kind_of(path) is Kind.INFERENCE:
        return method in ("POST", "PUT")
    return kind_of(path) is Kind.ADMINISTRATIVE and path in BODIES


async def read_body(receive: Receive) -> bytes | None:
    """The request's body, cut off once it is too long; ``None`` if the client hung up before its end."""
    parts, length, more = [], 0, True
    while more and length <= MAX_BODY_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        length, more = length + len(parts[-1]), message.get("more_body", False)
    return b"".join(parts)


def noting_the_end(receive: Receive) -> Receive:
    """A ``receive`` of the application's lifespan: sets :data:`~nvfp4_sgl.serving.http_port.ending` at its end."""

    async def noted() -> Message:
        message = await receive()
        if message["type"] == "lifespan.shutdown":
            ending.set()
        return message

    return noted


def replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that yields ``body`` first, then later events such as the client's disconnect."""
    message: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replay() -> Message:
        nonlocal message
        first, message = message, None
        return first if first is not None else await receive()

    return replay


async def answer(send: Send, refusal: Refusal, path: str = "") -> None:
    """Send ``refusal`` of a request to ``path`` as JSON."""
    body = json.dumps(refusal.as_json(path)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class StreamStatus:
    """``send`` that holds a stream's status back until its first event, and answers an error with its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._refused = False

    async def __call__(self, message: Message) -> None:
        if self._refused:
            return
        if message["type"] == "http.response.start" and is_event_stream(message):
            self._start = message
            return
        if self._start is not None and message["type"] == "http.response.body":
            start, self._start = self._start, None
            if (refusal := first_error(message.get("body", b""))) is not None:
                self._refused = True
                await answer(self._send, refusal)
                return
            await self._send(start)
        await self._send(message)


def is_event_stream(start: Message) -> bool:
    """Whether a response that starts so is a stream of server-sent events."""
    return dict(start.get("headers", ())).get(b"content-type", b"").startswith(b"text/event-stream")


def first_error(chunk: bytes) -> Refusal | None:
    """The error that a stream's first chunk holds, as SGLang's OpenAI routes and its native one write it."""
    if not chunk.startswith(b"data: {"):
        return None
    try:
        event = json.loads(chunk[6:].split(b"\n", 1)[0])
    except ValueError:
        return None
    error, finish = event.get("error"), (event.get("meta_info") or {}).get("finish_reason") or {}
    if isinstance(error, dict):
        status, message = error.get("code"), error.get("message")
    else:
        status, message = finish.get("status_code"), finish.get("message")
    return Refusal(int(status), str(message)) if isinstance(status, int) and 400 <= status < 600 else None


def name_the_dead(original: Callable[..., Any], handler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around the end of a server after a process failed: name the process, whichever noticed it."""
    if serves_our_model():
        for name, code in failed(front_end.watched_processes(handler)):
            rank = name.removeprefix("scheduler_")
            what = f"{name} (tensor-parallel rank {rank})" if rank.isdigit() else name
            how = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
            logger.error("nvfp4_sgl: process %s has ended with %s; the server ends", what, how)
    return original(handler, *args, **kwargs)


def serve_guarded(original: Callable[..., Any], server_args: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around SGLang's start of its HTTP server: put :class:`Guard` in front of every other middleware."""
    if serves_our_model():
        if settings.draft_algorithm() is not None:
            MODES.add(DRAFTING)
        advertise_length(manager)
        limit_texts(manager)
        front_end.limit_shutdown(manager, LAST_SECONDS)
        front_end.look_for_clients(CLIENT_POLL_SECONDS)
        access = Access(
            settings.resolved("admin_api_key"), settings.resolved("device") == "cpu", settings.resolved("api_key")
        )
        http_server.filter_openapi(lambda schema: described(schema, access))
        http_server.wrap_http_application(
            lambda application: Guard(application, access, lambda: manager.gracefully_exit)
        )
    try:
        return original(server_args, manager, *args, **kwargs)
    except KeyboardInterrupt:  # raised again by the HTTP server, once it has shut down
        if not serves_our_model():
            raise
        print("\nnvfp4-sgl: interrupted", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    finally:
        if serves_our_model():
            front_end.stop_watching(manager)
