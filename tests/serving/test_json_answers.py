"""Chats whose answer is JSON of any type, and not only an object or an array."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.chat import MODEL, client, joined, printable_bias

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

OBJECT = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
SCHEMAS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "enum": ({"enum": ["ab", "cd"]}, lambda value: value in ("ab", "cd")),
    "boolean": ({"type": "boolean"}, lambda value: value in (True, False)),
    "const": ({"const": 5}, lambda value: value == 5),
    "null": ({"type": "null"}, lambda value: value is None),
    "integer": ({"type": "integer", "minimum": 10, "maximum": 99}, lambda value: 10 <= value <= 99),
    "string": ({"type": "string", "maxLength": 3}, lambda value: isinstance(value, str) and len(value) <= 3),
    "anyOf": ({"anyOf": [{"type": "null"}, {"enum": [[1], "x"]}]}, lambda value: value in (None, [1], "x")),
    "array": ({"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2}, [None, None].__eq__),
    "object": (OBJECT, lambda value: isinstance(value["a"], bool) and len(value) == 1),
}


@pytest.fixture(scope="module")
def ask(serve, tiny_checkpoints) -> Any:
    """``ask(response_format, **fields)``: a greedy answer without whitespace."""
    checkpoint = tiny_checkpoints("nvfp4-full")
    api: Any = client(serve(checkpoint))
    bias = printable_bias(AutoTokenizer.from_pretrained(checkpoint), spaces=False)

    def complete(response_format: dict[str, Any], **fields: Any) -> Any:
        messages = [{"role": "user", "content": "Answer in json."}]
        given = {"model": MODEL, "messages": messages, "max_tokens": 60, "temperature": 0, "logit_bias": bias} | fields
        return api.chat.completions.create(response_format=response_format, **given)

    return complete


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_is_what_its_schema_says(name, ask):
    """Before, each but the array and the object was one space."""
    schema, fits = SCHEMAS[name]
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = ask(given).choices[0]
    assert choice.finish_reason == "stop" and fits(json.loads(choice.message.content)), choice
    assert joined(ask(given, stream=True), "content") == choice.message.content


def test_a_schema_that_is_not_strict_holds_too(ask):
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab"]}, "strict": False}}
    assert ask(given).choices[0].message.content == '"ab"'


def test_a_schema_of_anything(ask):
    """Cut off at the end, perhaps, but no spaces."""
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    assert ask(given, max_tokens=10).choices[0].message.content.strip()


def test_json_object(ask):
    assert ask({"type": "json_object"}, max_tokens=10).choices[0].message.content.startswith("{")
