"""The table of each path that takes a body, and the one function that checks and translates a body by it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from nvfp4_sgl.serving.fields import administrative, native
from nvfp4_sgl.serving.fields.chat import CHAT
from nvfp4_sgl.serving.fields.completions import COMPLETION
from nvfp4_sgl.serving.fields.field import Table, object_fault
from nvfp4_sgl.serving.fields.generate import GENERATE
from nvfp4_sgl.serving.fields.messages import COUNTED, MESSAGES, choice_fault
from nvfp4_sgl.serving.fields.responses import RESPONSE
from nvfp4_sgl.serving.fields.thinking import Contradiction
from nvfp4_sgl.serving.fields.translation import TRANSLATIONS, without_idle_seed

BODIES: Mapping[str, Table] = {
    "/generate": GENERATE,
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNTED,
    "/v1/responses": RESPONSE,
    "/tokenize": native.TOKENIZE,
    "/v1/tokenize": native.TOKENIZE,
    "/detokenize": native.DETOKENIZE,
    "/v1/detokenize": native.DETOKENIZE,
    "/v1/score": native.SCORE,
    "/v1/embeddings": native.EMBEDDINGS,
    "/parse_function_call": native.PARSE_FUNCTION_CALL,
    "/separate_reasoning": native.SEPARATE_REASONING,
    "/abort_request": administrative.ABORT_REQUEST,
    "/configure_logging": administrative.CONFIGURE_LOGGING,
    "/continue_generation": administrative.CONTINUE_GENERATION,
    "/flush_cache": administrative.NO_FIELDS,
    "/freeze_gc": administrative.NO_FIELDS,
    "/pause_generation": administrative.PAUSE_GENERATION,
    "/start_profile": administrative.START_PROFILE,
    "/stop_profile": administrative.NO_FIELDS,
    "/update_weights_from_disk": administrative.UPDATE_WEIGHTS,
}
"""Fields of the body, by path."""

RULES: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "/abort_request": administrative.abort_fault,
    "/v1/messages": choice_fault,
    "/v1/messages/count_tokens": choice_fault,
}
"""What a body whose fields are right must have besides."""

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Half a pair, escaped as JSON has characters beyond the first 65,536, or as bytes that are no UTF-8."""
HALF = re.compile(r"[\ud800-\udfff]")
"""What is left of a half without its other one when JSON is parsed."""

SEEDED = ("/v1/chat/completions", "/v1/completions")
"""Paths whose bodies may have a seed, as evaluations send it with every request."""


def body_fault(path: str, body: bytes) -> str | None:
    """Why a body is refused, or ``None``."""
    return checked_body(path, body)[0]


def checked_body(path: str, body: bytes) -> tuple[str | None, bytes]:
    """Why a body is refused, or ``None``; and the body for SGLang, rewritten only where it must be.

    NaN and infinities, which Python reads, are no JSON; of a key that is given twice, one value would be lost.
    """
    table = BODIES.get(path)
    if table is None:
        return None, body
    if (where := lone_surrogate(body)) is not None:
        return f"{where}; expected text that UTF-8 can hold: send the whole pair, or leave it out", body
    try:
        given = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_require_distinct)
    except (ValueError, RecursionError) as error:
        return f"body: expected JSON; {error}", body
    parsed = without_idle_seed(given) if path in SEEDED else given
    fault = object_fault(table, parsed)
    if fault is None and path in RULES:
        fault = RULES[path](parsed)
    if fault is not None or path not in TRANSLATIONS:
        return fault, body
    try:
        translated = TRANSLATIONS[path](parsed)
    except Contradiction as error:
        return str(error), body
    return None, body if translated == given else json.dumps(translated).encode()


def lone_surrogate(body: bytes) -> str | None:
    """The field, by its path, whose text has half a surrogate pair, which UTF-8 cannot hold."""
    if not SURROGATE.search(body):
        return None
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None  # the next parser reports it
    left: list[tuple[str, Any]] = [("", parsed)]
    while left:
        where, value = left.pop()
        match value:
            case str() if (half := HALF.search(value)) is not None:
                return f"{where or 'body'}: found the lone surrogate U+{ord(half[0]):04X} at character {half.start()}"
            case dict():
                if any(HALF.search(name) for name in value):
                    return f"{where or 'body'}: found a lone surrogate in the name of a field"
                left += [(f"{where}.{name}" if where else name, inner) for name, inner in value.items()][::-1]
            case list():
                left += [(f"{where}[{place}]", inner) for place, inner in enumerate(value)][::-1]
    return None


def _require_distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"found {name[:80]!r} twice in an object")
        found[name] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"found {name}, which is no number of JSON")
