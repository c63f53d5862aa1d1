"""The table of each path that takes a body, and the one function that checks a body against it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NoReturn

from nvfp4_sgl.serving.fields.field import Table, object_fault
from nvfp4_sgl.serving.fields.generate import GENERATE

BODIES: Mapping[str, Table] = {
    "/generate": GENERATE,
}
"""Fields of the body, by path."""


def body_fault(path: str, body: bytes) -> str | None:
    """Why a body is refused, or ``None``. NaN and infinities, which Python reads, are no JSON."""
    table = BODIES.get(path)
    if table is None:
        return None
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return f"body: expected JSON; {error}"
    return object_fault(table, parsed)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"found {name}, which is no number of JSON")
