"""Every request of docs/ask_it.md is sent as it stands, and its answer has the documented shape.

A shape is the fields that the page shows, their types, and the words of :data:`WORDS`; a server may send more fields.
A model of random weights ends no message at ``/v1/messages`` by itself, and chooses no keys of a free JSON object.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shutil
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.packaging.checkout import ROOT
from tests.support.documents import fences, table
from tests.support.server import Server
from tests.support.steering import steered

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

PAGE = (ROOT / "docs" / "ask_it.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:30000"
WORDS = ("object", "type", "role", "finish_reason", "name", "code", "message")
"""Fields of which the page shows the value that every model answers."""
CITY = {"role": "user", "content": "What is the capital of France?"}


@dataclass(frozen=True)
class Request:
    """A request of the page.

    Attributes:
        answer: the block that follows it; empty for Python, whose answers are comments.
    """

    line: int
    language: str
    text: str
    answer: str

    def __str__(self) -> str:
        return f"line {self.line}"


def requests() -> list[Request]:
    """The page's requests, in their order."""
    blocks = [*fences(PAGE), (0, "", "")]
    return [
        Request(line, language, text, blocks[place + 1][2] if language == "bash" else "")
        for place, (line, language, text) in enumerate(blocks)
        if language in ("bash", "python")
    ]


CURLS = [request for request in requests() if request.language == "bash"]
SCRIPTS = [request for request in requests() if request.language == "python"]


class Departs(Exception):
    """An answer that has not the documented shape; the message names the field."""


def compare(documented: Any, found: Any, where: str = "answer", *, free_keys: bool = False) -> None:
    """:class:`Departs` unless ``found`` has the shape of ``documented``."""
    if type(documented) is not type(found):
        raise Departs(f"{where}: expected {documented!r}, found {found!r}")
    match documented:
        case dict():
            for name, value in documented.items():
                if name not in found:
                    raise Departs(f"{where}.{name}: missing in {found!r}")
                if name in WORDS and isinstance(value, str) and value != found[name]:
                    raise Departs(f"{where}.{name}: expected {value!r}, found {found[name]!r}")
                compare(value, found[name], f"{where}.{name}", free_keys=free_keys)
        case list() | tuple():
            if len(found) < len(documented) or (found and not documented):
                raise Departs(f"{where}: expected {len(documented)} entries, found {len(found)}")
            for place, value in enumerate(documented):
                compare(value, found[place], f"{where}[{place}]", free_keys=free_keys)
        case str() if documented.startswith("{"):
            expected = {} if free_keys else json.loads(documented)
            compare(expected, json.loads(found), f"{where}, as JSON")
        case str() if documented and not found:
            raise Departs(f"{where}: expected text")


def events(text: str) -> Iterator[Any]:
    """What each event of a stream says."""
    for data in re.findall("^data: (.*)$", text, re.MULTILINE):
        yield data if data == "[DONE]" else json.loads(data)


def compare_streams(documented: str, found: str) -> None:
    """:class:`Departs` unless ``found`` begins and ends as ``documented``, and has all of its events in their order."""
    left, expected = list(events(found)), list(events(documented))
    compare(expected[0], left[0], "first event")
    for place, event in enumerate(expected):
        while left:
            with contextlib.suppress(Departs):
                compare(event, left.pop(0))
                break
        else:
            raise Departs(f"event {place}: expected {event!r} after the ones before it")
    if left:
        raise Departs(f"after the last documented event: {left!r}")


@pytest.fixture(scope="module")
def address(server, tokenizer) -> Iterator[str]:
    """What the page's address stands for."""
    with steered(server, tokenizer) as url:
        yield url


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("request_", CURLS, ids=str)
def test_a_command_is_answered_as_documented(request_: Request, address: str) -> None:
    command = ["bash", "-c", request_.text.replace(ADDRESS, address)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    if request_.answer.startswith("data: "):
        compare_streams(request_.answer, found)
    else:
        compare(json.loads(request_.answer), json.loads(found), free_keys='"json_object"' in request_.text)


def clients(address: str) -> dict[str, Any]:
    """What all of the page's scripts import, and its two clients."""
    names: dict[str, Any] = {}
    for script in SCRIPTS:
        for statement in ast.parse(script.text.replace(ADDRESS, address)).body:
            made = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in ("client", "claude")
            if made or isinstance(statement, ast.Import | ast.ImportFrom):
                exec(ast.unparse(statement), names)
    return names


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_gets_what_its_comments_say(script: Request, address: str) -> None:
    names, said, compared = clients(address), io.StringIO(), 0
    comments = {
        token.start[0]: token.string.removeprefix("# ")
        for token in tokenize.generate_tokens(io.StringIO(script.text).readline)
        if token.type == tokenize.COMMENT
    }
    for statement in ast.parse(script.text.replace(ADDRESS, address)).body:
        if not (isinstance(statement, ast.Expr) and statement.lineno in comments):
            with contextlib.redirect_stdout(said):
                exec(ast.unparse(statement), names)
            continue
        expression = ast.unparse(statement)
        field = expression.rpartition(".")[2]
        documented = ast.literal_eval(comments.pop(statement.lineno))
        if documented == "end_turn":  # see above
            documented, field = "max_tokens", "type"
        compare({field: documented}, {field: eval(expression, names)}, expression)
        compared += 1
    assert not comments, f"not beside an expression: {comments}"
    assert compared or said.getvalue(), "nothing was answered"


@pytest.mark.parametrize(("fields", "thinks", "beginning"), table(PAGE, "thinking"))
def test_what_a_field_makes_of_the_prompt(fields: str, thinks: str, beginning: str, server, tokenizer) -> None:
    for field in re.findall("`(.*?)`", fields):
        body = {"messages": [CITY], "max_tokens": 1, "return_prompt_token_ids": True, **json.loads(field)}
        ids = server.post("/v1/chat/completions", body)["choices"][0]["prompt_token_ids"]
        prompt = tokenizer.decode(ids)
        assert prompt.endswith("<｜Assistant｜>" + {"no": "</think>", "yes": "<think>"}[thinks]), field
        assert ("Reasoning Effort" in prompt) == bool(beginning), field
        assert prompt.startswith("<｜begin▁of▁sentence｜>" + beginning.strip("`")), field


@pytest.mark.parametrize(("fields", "message"), table(PAGE, "errors"))
def test_a_documented_message(fields: str, message: str, server) -> None:
    error = post_error(server, {"messages": [CITY], **json.loads(fields.strip("`"))})
    assert error["code"] == 400 and error["message"] == message


def post_error(server: Server, body: dict[str, Any]) -> Any:
    import openai

    from tests.support.chat import client

    with pytest.raises(openai.BadRequestError) as raised:
        client(server).post("/chat/completions", body=body, cast_to=object)
    return raised.value.body


def test_every_request_and_table_is_found() -> None:
    assert len(CURLS) == PAGE.count("\ncurl ") >= 6 and len(SCRIPTS) == PAGE.count("```python") >= 7
    assert all(request.answer for request in CURLS)
    assert len(table(PAGE, "thinking")) == 5 and len(table(PAGE, "errors")) == 6


@pytest.mark.parametrize(
    "found",
    [
        {"role": "assistant", "content": "x", "n": 1},
        {"role": "assistant", "content": "x", "list": [{"a": 2}]},
        {"role": "user", "content": "x", "n": 1, "list": [{"a": 2}]},
        {"role": "assistant", "content": "", "n": 1, "list": [{"a": 2}]},
        {"role": "assistant", "content": None, "n": 1, "list": [{"a": 2}]},
        {"role": "assistant", "content": "x", "n": True, "list": [{"a": 2}]},
        {"role": "assistant", "content": "x", "n": 1, "list": []},
        {"role": "assistant", "content": "x", "n": 1, "list": [{"b": 2}]},
        {"role": "assistant", "content": "x", "n": 1, "list": [{"a": 2}], "json": "[]"},
        {"role": "assistant", "content": "x", "n": 1, "list": [{"a": 2}], "json": '{"b": 1}'},
    ],
)
def test_another_shape_is_seen(found: dict[str, Any]) -> None:
    documented = {"role": "assistant", "content": "y", "n": 5, "list": [{"a": 1}], "json": '{"a": 1}'}
    with pytest.raises(Departs):
        compare(documented, {"json": '{"a": 2}', **found})


@pytest.mark.parametrize("text", ["", 'data: {"a": 2}\n', 'data: {"b": 1}\ndata: {"a": 1}\n', 'data: {"a": 1}\n' * 3])
def test_another_stream_is_seen(text: str) -> None:
    with pytest.raises((Departs, IndexError)):
        compare_streams('data: {"a": 1}\n\ndata: {"b": 1}\n', text)
