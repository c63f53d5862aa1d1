"""Draws bodies for a path from its table of fields: valid, at the ends of a range, broken, and mixtures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from nvfp4_sgl.serving.endpoints import PATHS, Kind
from nvfp4_sgl.serving.fields.bodies import BODIES
from nvfp4_sgl.serving.fields.checks import is_int
from nvfp4_sgl.serving.fields.field import Field
from nvfp4_sgl.serving.fields.generate import SAMPLING_PARAMS
from tests.support.request_bodies import BASES, OPENAI_BASES, SAMPLING

MAX_FIELDS = 4
"""Bound on fields that are added to a valid body."""

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    2**70,
    -(2**63),
    1e308,
    "",
    "\u0000",
    "🚀",
    [],
    [[]],
    [None],
    [[1], 2],
    {},
    {"": None},
)
"""Values that no field was made for."""

LENGTHS = frozenset({"max_completion_tokens", "max_new_tokens", "max_output_tokens", "max_tokens"})
"""Fields whose other values, or absence, may have a server on a CPU compute for minutes."""

ALL_BASES = {**BASES, **OPENAI_BASES}
PATHS_DRAWN = tuple(path for path in ALL_BASES if PATHS[path] is Kind.INFERENCE)


def draw_value(draw: random.Random, field: Field) -> Any:
    """A value for a field: mostly one that it takes."""
    kind = draw.random()
    if field.check is not None and kind < 0.7:
        return draw.choice(field.check.inside)
    if field.check is not None and kind < 0.85:
        return draw.choice(field.check.outside)
    return draw.choice(ODD)


def is_slow(name: str, value: Any) -> bool:
    """Whether a value takes a server on a CPU too long for a test that sends hundreds."""
    return (name == "n" and value == 128) or (name in LENGTHS and (value is None or (is_int(value) and value > 2)))


def draw_body(draw: random.Random, path: str) -> dict[str, Any]:
    """A body of ``path``: a valid one with up to :data:`MAX_FIELDS` fields changed, added or left out."""
    body = dict(ALL_BASES[path])
    for _ in range(draw.randint(1, MAX_FIELDS)):
        within = path == "/generate" and draw.random() < 0.5
        table = SAMPLING_PARAMS if within else BODIES[path]
        name = draw.choice([*table, "no_such_field"])
        value = draw_value(draw, table[name]) if name in table else 1
        if is_slow(name, value):
            continue
        if within:
            body["sampling_params"] = {**SAMPLING, name: value}
        elif draw.random() < 0.1 and name not in LENGTHS:
            body.pop(name, None)
        else:
            body[name] = value
    if path == "/generate" and not body.get("sampling_params"):
        body["sampling_params"] = SAMPLING
    return body


def draw_requests(seed: int, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """``count`` paths and bodies; the same for the same ``seed``."""
    draw = random.Random(seed)
    for _ in range(count):
        path = draw.choice(("/generate", "/generate", *PATHS_DRAWN))
        yield path, draw_body(draw, path)
