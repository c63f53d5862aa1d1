"""The HTTP paths that a server of our model answers, and to whom: one table, and pure functions over it.

Every path of SGLang is of one :class:`Kind`; a path that is not in :data:`PATHS` is not offered. Administrative paths
are off unless the server has ``--admin-api-key``; then they take that key and no other.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """The purposes of paths."""

    READ = "says what is running"
    INFERENCE = "takes a JSON object and computes"
    ADMINISTRATIVE = "acts on other people's requests or on the server"


UPDATE_WEIGHTS = "/update_weights_from_disk"

PATHS: Mapping[str, Kind] = {
    **dict.fromkeys(
        (
            "/",
            "/docs",
            "/get_model_info",
            "/get_server_info",
            "/health",
            "/health_generate",
            "/metrics",
            "/metrics/",
            "/model_info",
            "/openapi.json",
            "/ping",
            "/ready",
            "/server_info",
            "/v1/loads",
            "/v1/models",
        ),
        Kind.READ,
    ),
    **dict.fromkeys(
        (
            "/detokenize",
            "/generate",
            "/parse_function_call",
            "/separate_reasoning",
            "/tokenize",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/detokenize",
            "/v1/embeddings",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/responses",
            "/v1/score",
            "/v1/tokenize",
        ),
        Kind.INFERENCE,
    ),
    **dict.fromkeys(
        (
            "/abort_request",
            "/configure_logging",
            "/continue_generation",
            "/flush_cache",
            "/freeze_gc",
            "/pause_generation",
            "/start_profile",
            "/stop_profile",
            UPDATE_WEIGHTS,
        ),
        Kind.ADMINISTRATIVE,
    ),
}
"""Every path that is answered. What SGLang has beyond these would update weights from elsewhere than a checkpoint, free
memory that it does not manage, or fetch what a client names."""

READ_BELOW = ("/v1/models/",)
"""Prefixes of further paths of :attr:`Kind.READ`."""

NOT_ON_CPU = frozenset({"/start_profile", "/stop_profile"})
"""Paths that need an accelerator: SGLang's profiler ends the scheduler where the platform is not its own."""

MAX_BODY_BYTES = 32 * 2**20
"""Bound on a request's body: a prompt of 2**20 token ids, seven digits each, and as much again."""

MAX_BODY_DEPTH = 120
"""Bound on objects and arrays within each other in a body: the chat encoder takes 128 and adds a few of its own."""

MAX_BODY_BRACKETS = 2**19
"""Bound on opening brackets in a body, strings included: each may be an object, and parsing millions takes seconds."""

MAX_BODY_COMMAS = 2**22
"""Bound on commas in a body, strings included: parsing so many token ids takes 0.4 s, and all else waits."""

MAX_BODY_CONTAINERS = 2**15
"""Bound on objects and arrays in a body: SGLang takes a second to make its requests of so many, and nothing else runs
meanwhile."""


@dataclass(frozen=True)
class Refusal:
    """An answer instead of SGLang's."""

    status: int
    message: str

    @property
    def kind(self) -> str:
        """``type`` of the error, as OpenAI names it."""
        return {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "service_unavailable"
        )

    def as_json(self, path: str = "") -> dict[str, object]:
        """The body of the answer to a request to ``path``: Anthropic's paths have a shape of their own.

        That to an update of weights has what SGLang answers to one that is refused, too.
        """
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {"type": self.kind, "message": self.message}}
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.status}
        refused = {"success": False, "message": self.message, "num_paused_requests": 0}
        return {"error": error} | (refused if path == UPDATE_WEIGHTS else {})


@dataclass(frozen=True)
class Access:
    """The server's settings that decide access: ``--admin-api-key``, CPU or GPU, ``--api-key``."""

    admin_key: str | None = None
    cpu: bool = False
    api_key: str | None = None


def kind_of(path: str) -> Kind | None:
    """The kind of ``path``, ``None`` if it is not offered."""
    return PATHS.get(path) or (Kind.READ if path.startswith(READ_BELOW) else None)


ALIASES = {"/detokenize": "/v1/detokenize", "/tokenize": "/v1/tokenize"}
"""Paths that SGLang's document leaves out, and those that do the same."""


def described(schema: Mapping[str, Any], access: Access) -> dict[str, Any]:
    """An OpenAPI document with the paths alone that a server answers, to callers who have its keys.

    Args:
        schema: of SGLang's application, with everything that it has.
    """
    key = f"Bearer {access.admin_key}".encode()
    paths = {path: item for path, item in schema["paths"].items() if is_answered(path, key, access)}
    for path, same in ALIASES.items():
        if same in paths:
            methods = {method: {**one} for method, one in paths[same].items()}
            for one in methods.values():
                one.pop("operationId", None)  # of one path alone
            paths[path] = methods
    return {**schema, "paths": paths}


def is_answered(path: str, key: bytes, access: Access) -> bool:
    """Whether a caller with all keys gets an answer to ``path``, in which a name in braces stands for one part."""
    return refuse_path(path, key, Access(access.admin_key, access.cpu)) is None


def refuse_path(path: str, authorization: bytes, access: Access) -> Refusal | None:
    """Why a request to ``path`` with that ``Authorization`` header is not passed on, or ``None``."""
    if not authorization.isascii():
        return Refusal(401, "Authorization: expected ASCII characters only")
    kind = kind_of(path)
    if kind is None:
        return Refusal(404, f"{path}: not offered for this model")
    if kind is Kind.INFERENCE and access.api_key is not None and not has_key(authorization, access.api_key):
        # SGLang says so, too, but behind this: a body is read before.
        return Refusal(401, f"{path}: send the server's --api-key as a bearer token")
    if kind is not Kind.ADMINISTRATIVE:
        return None
    if access.admin_key is None:
        return Refusal(403, f"{path}: administrative, and off; start the server with --admin-api-key to use it")
    if not has_key(authorization, access.admin_key):
        return Refusal(401, f"{path}: administrative; send the server's --admin-api-key as a bearer token")
    if access.cpu and path in NOT_ON_CPU:
        return Refusal(400, f"{path}: not available on a CPU")
    return None


def refuse_body(body: bytes) -> Refusal | None:
    """Why a body that must be a JSON object is refused, or ``None``; what is inside it is SGLang's to parse."""
    if len(body) > MAX_BODY_BYTES:
        return Refusal(413, f"body: found more than {MAX_BODY_BYTES} bytes; send a shorter prompt or fewer of them")
    if not body.lstrip(b" \t\r\n").startswith(b"{"):
        return Refusal(400, f"body: expected a JSON object, found {body[:40].decode(errors='replace')!r}")
    if (found := opening_brackets(body)) > MAX_BODY_BRACKETS:
        return Refusal(400, f"body: found {found} opening brackets; expected {MAX_BODY_BRACKETS} or fewer")
    if (found := body.count(b",")) > MAX_BODY_COMMAS:
        return Refusal(400, f"body: found {found} commas; expected {MAX_BODY_COMMAS} or fewer; send several requests")
    if opening_brackets(body) > MAX_BODY_DEPTH:
        levels = level_sizes(body, MAX_BODY_DEPTH)
        if len(levels) > MAX_BODY_DEPTH:
            return Refusal(400, f"body: found objects and arrays more than {MAX_BODY_DEPTH} deep; expected less")
        if (found := sum(levels)) > MAX_BODY_CONTAINERS:
            return Refusal(400, f"body: found {found} objects and arrays; expected {MAX_BODY_CONTAINERS} or fewer")
    return None


def opening_brackets(text: bytes) -> int:
    """An upper bound of the objects and arrays of a JSON text."""
    return text.count(b"{") + text.count(b"[")


def is_deeper(text: bytes | str, bound: int) -> bool:
    """Whether the objects and arrays of a JSON text nest more than ``bound`` deep.

    ``False`` for what is no JSON, or deeper than any parser goes: whoever parses it next refuses it.
    """
    encoded = text.encode(errors="replace") if isinstance(text, str) else text
    return opening_brackets(encoded) > bound and len(level_sizes(encoded, bound)) > bound


def level_sizes(text: bytes, most: int) -> list[int]:
    """The number of objects and arrays on each level of a JSON text, of which ``most + 1`` are looked at.

    Empty for what is no JSON, or deeper than any parser goes: whoever parses it next refuses it.
    """
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return []
    sizes: list[int] = []
    level = [root] if type(root) in (dict, list) else []
    while level and len(sizes) <= most:
        sizes.append(len(level))
        children = (container.values() if type(container) is dict else container for container in level)
        level = [child for values in children for child in values if type(child) in (dict, list)]
    return sizes


def has_key(authorization: bytes, key: str) -> bool:
    """Whether an ``Authorization`` header holds the bearer token ``key``."""
    scheme, _, token = authorization.partition(b" ")
    return scheme.lower() == b"bearer" and secrets.compare_digest(token, key.encode())
