"""docs/ask_it.md: each answer is one that its request allows, and each table row's message names a field of its row."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.packaging.checkout import ROOT
from tests.support.documents import fences, table

PAGE = (ROOT / "docs" / "ask_it.md").read_text(encoding="utf-8")
TOOLS = "get_weather"
"""Part of the script whose answer calls a tool."""


def exchanges(page: str) -> list[tuple[Any, str]]:
    """(body, answer) of each curl: its ``-d``, and the block behind it."""
    blocks = list(fences(page))
    found = []
    for (_, language, command), (_, _, answer) in pairwise(blocks):
        if language == "bash":
            words = shlex.split(command.replace("\\\n", " "))
            found.append((json.loads(words[words.index("-d") + 1]), answer))
    return found


def disagreements(body: Any, answer: str) -> Iterator[str]:
    """What a request does not allow in its answer."""
    if body.get("stream"):
        events = re.findall("^data: (.*)$", answer, re.MULTILINE)
        if len(events) < 3 or events[-1] != "[DONE]":
            yield "expected a stream that ends with [DONE]"
        usage = [event for event in events if '"usage"' in event]
        if len(usage) != bool(body.get("stream_options", {}).get("include_usage")):
            yield "usage: expected in one event if include_usage asks for it"
        return
    found = json.loads(answer)
    for choice in found.get("choices", ()):
        yield from content_faults(body, choice["message"]["content"])
    meta = found.get("meta_info", {})
    most = body.get("sampling_params", {}).get("max_new_tokens")
    if meta and len(meta.get("output_token_logprobs", ())) != most:
        yield f"output_token_logprobs: expected {most}"
    if meta and ("logprob_start_len" in body) != ("input_token_logprobs" in meta):
        yield "input_token_logprobs: expected if logprob_start_len asks for them"
    unknown = found.get("error", {}).get("message", "").partition(":")[0]
    if unknown and unknown not in body:
        yield f"error: expected a field of the request, found {unknown}"


def content_faults(body: Any, content: str) -> Iterator[str]:
    """How a message's text departs from the grammar that its request asks for."""
    form = body.get("response_format", {})
    try:
        if form.get("type") == "json_schema":
            jsonschema.validate(json.loads(content), form["json_schema"]["schema"])
        elif form and not isinstance(json.loads(content), dict):
            yield f"content: expected a JSON object, found {content}"
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        yield f"content: expected what response_format asks for, found {content}: {error}"
    if "regex" in body and not re.fullmatch(body["regex"], content):
        yield f"content: expected {body['regex']}, found {content}"


def comments(script: str) -> dict[str, Any]:
    """The value that a comment says of each expression of a script."""
    return {match[1]: ast.literal_eval(match[2]) for match in re.finditer(r"^(\S.*?)  # (.+)$", script, re.MULTILINE)}


def call_faults(script: str) -> Iterator[str]:
    """How the call that a script's comments show departs from the tool that the script declares."""
    names: dict[str, Any] = {}
    for statement in ast.parse(script).body:
        if isinstance(statement, ast.Assign) and not any(isinstance(node, ast.Call) for node in ast.walk(statement)):
            try:
                exec(ast.unparse(statement), names)
            except NameError:
                continue  # of an answer
    said = comments(script)
    ((_, name),) = (one for one in said.items() if one[0].endswith("function.name"))
    ((_, arguments),) = (one for one in said.items() if one[0].endswith("function.arguments)"))
    (tool,) = (tool["function"] for tool in names["request"]["tools"])
    if name != tool["name"]:
        yield f"name: expected {tool['name']}, found {name}"
    if not jsonschema.Draft202012Validator(tool["parameters"]).is_valid(arguments):
        yield f"arguments: expected those of {tool['parameters']}, found {arguments}"


@pytest.mark.parametrize(("body", "answer"), exchanges(PAGE))
def test_an_answer_is_one_that_its_request_allows(body: Any, answer: str) -> None:
    assert not list(disagreements(body, answer))


def test_a_call_is_one_that_its_tool_allows() -> None:
    (script,) = (text for _, language, text in fences(PAGE) if language == "python" and TOOLS in text)
    assert not list(call_faults(script))
    for wrong in (("'city': 'Rome'}", "'city': 'Oslo'}"), ("# 'get_weather'", "# 'weather'"), ("'city': 'Rome'", "")):
        assert wrong[0] in script and list(call_faults(script.replace(*wrong)))


def test_log_probabilities_are_as_many_as_asked_for() -> None:
    (script,) = (text for _, language, text in fences(PAGE) if language == "python" and "top_logprobs=" in text)
    said = comments(script)
    ((_, top),) = (one for one in said.items() if "top_logprobs" in one[0])
    assert len(top) == int(re.findall(r"top_logprobs=(\d+)", script)[0])
    assert top[0] == (said["first.token"], said["first.logprob"]) and all(value <= 0 for _, value in top)
    assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)


@pytest.mark.parametrize(("fields", "message"), table(PAGE, "errors"))
def test_a_message_names_a_field_of_its_row(fields: str, message: str) -> None:
    assert any(name in message for name in json.loads(fields.strip("`")))


RATING = {"type": "json_schema", "json_schema": {"schema": {"properties": {"stars": {"enum": [1, 2]}}}}}
GENERATE = {"sampling_params": {"max_new_tokens": 1}, "logprob_start_len": 0}


@pytest.mark.parametrize(
    ("body", "answer", "fault"),
    [
        ({"response_format": RATING}, '{"choices": [{"message": {"content": "{\\"stars\\": 3}"}}]}', "content"),
        ({"response_format": RATING}, '{"choices": [{"message": {"content": "3 stars"}}]}', "content"),
        ({"response_format": {"type": "json_object"}}, '{"choices": [{"message": {"content": "[]"}}]}', "content"),
        ({"regex": "(yes|no)"}, '{"choices": [{"message": {"content": "maybe"}}]}', "content"),
        ({"stream": True}, 'data: {}\ndata: {"usage": {}}\ndata: [DONE]\n', "usage"),
        ({"stream": True}, "data: {}\ndata: {}\ndata: {}\n", "expected a stream"),
        (GENERATE, '{"meta_info": {"input_token_logprobs": [], "output_token_logprobs": [1, 2]}}', "output_token"),
        (GENERATE, '{"meta_info": {"output_token_logprobs": [1]}}', "input_token"),
        ({"n": 2}, '{"error": {"message": "temprature: unknown field"}}', "error"),
    ],
)
def test_an_answer_that_is_not_allowed_is_seen(body: Any, answer: str, fault: str) -> None:
    (found,) = disagreements(body, answer)
    assert found.startswith(fault)
