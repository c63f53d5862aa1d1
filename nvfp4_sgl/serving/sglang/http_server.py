"""SGLang's HTTP server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from nvfp4_sgl.serving.sglang.ledger import find


def is_healthy() -> bool:
    """Whether ``/health`` answers 200, in the process that serves it."""
    state = find("global_state")
    return str(getattr(state.tokenizer_manager.server_status, "name", "")) == "Up"


def http_application() -> Any:
    """SGLang's HTTP application, a FastAPI one."""
    return find("http_application")


def filter_openapi(choose: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let ``/openapi.json`` and ``/docs`` have what ``choose`` makes of the document that FastAPI writes."""
    app = http_application()
    original = app.openapi
    app.openapi = lambda: choose(original())


def wrap_http_application(wrapper: Callable[[Any], Any]) -> None:
    """Put ``wrapper(application)`` in front of every middleware of SGLang's HTTP application, added or to be added.

    But for CORS, which goes in front of that: a browser shows no answer that lacks its headers.
    """
    app = http_application()
    build = app.build_middleware_stack

    def stack() -> Any:
        cors = [entry for entry in app.user_middleware if entry.cls is CORSMiddleware]
        app.user_middleware = [entry for entry in app.user_middleware if entry.cls is not CORSMiddleware]
        application = wrapper(build())
        for entry in reversed(cors):
            application = entry.cls(application, *entry.args, **entry.kwargs)
        return application

    app.build_middleware_stack = stack


def json_response(answer: Any) -> Any:
    """The HTTP response that SGLang would make of ``answer``, a Pydantic model, made without the event loop."""
    return Response(answer.model_dump_json(), media_type="application/json")
