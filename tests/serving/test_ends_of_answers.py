"""Answers that end within a character or at a stop string, at every endpoint, streamed and not, on a server.

A grammar makes the model write a known text; which tokens it takes is up to the model.
"""

from __future__ import annotations

import itertools
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.full import but_for
from tests.support.server import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

PROMPT = "Say it."
REPLACEMENT = "\ufffd"
TEXT, SHORT_TEXT = "ab中🚀 c🚀d", "a中🚀"


def events(server: Server, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """The JSON of every event of a stream."""
    request = urllib.request.Request(
        server.url + path, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                yield json.loads(line[6:])


Ask = Callable[..., tuple[str, str]]
"""``ask(server, text, tokens, stops)``: what there is of ``text`` in an answer, and in its stream."""


def generate(server: Server, text: str, tokens: int, stops: list[str], **fields: Any) -> tuple[str, str]:
    params = {"temperature": 0, "max_new_tokens": tokens, "stop": stops, "regex": text, **fields}
    body = {"text": PROMPT, "sampling_params": params}
    pieces = [event["text"] for event in events(server, "/generate", body)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(pieces)), pieces
    return server.post("/generate", body)["text"], pieces[-1]


def completion(server: Server, text: str, tokens: int, stops: list[str], **fields: Any) -> tuple[str, str]:
    body = {"model": "default", "prompt": PROMPT, "temperature": 0, "max_tokens": tokens, "stop": stops, **fields}
    body["regex"] = text
    streamed = "".join(event["choices"][0]["text"] for event in events(server, "/v1/completions", body))
    return server.post("/v1/completions", body)["choices"][0]["text"], streamed


def chat(
    server: Server, text: str, tokens: int, stops: list[str], field: str = "content", **fields: Any
) -> tuple[str, str]:
    body = {"model": "default", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, **fields}
    body.update(max_tokens=tokens, stop=stops, regex=text)
    deltas = [choice["delta"] for event in events(server, "/v1/chat/completions", body) for choice in event["choices"]]
    message = server.post("/v1/chat/completions", body)["choices"][0]["message"]
    return message[field] or "", "".join(delta.get(field) or "" for delta in deltas)


def schema(text: str) -> dict[str, Any]:
    """Of ``{"t": text}`` and nothing else, whitespace included; these endpoints take no regular expression."""
    form = {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"], "additionalProperties": False}
    return {**form, "const": {"t": text}}


def held(json_text: str) -> str:
    """What there is of the text in the beginning of such an object."""
    found = re.match(r'\{"t": *"([^"]*)', json_text)
    return found[1] if found else ""


def responses(server: Server, text: str, tokens: int, stops: list[str]) -> tuple[str, str]:
    body = {"model": server.get("/v1/models")["data"][0]["id"], "input": PROMPT, "temperature": 0, "stop": stops}
    form = {"type": "json_schema", "name": "text", "schema": schema(text)}
    body.update(max_output_tokens=tokens, text={"format": form})
    deltas = [e["delta"] for e in events(server, "/v1/responses", body) if e["type"] == "response.output_text.delta"]
    items = [item for item in server.post("/v1/responses", body)["output"] if item["type"] == "message"]
    return held("".join(part["text"] for item in items for part in item["content"])), held("".join(deltas))


def messages(server: Server, text: str, tokens: int, stops: list[str]) -> tuple[str, str]:
    body = {"model": "default", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
    form = {"type": "json_schema", "schema": schema(text)}
    body.update(max_tokens=tokens, stop_sequences=stops, output_config={"format": form})
    deltas = [e["delta"].get("text", "") for e in events(server, "/v1/messages", body) if "delta" in e]
    content = server.post("/v1/messages", body)["content"]
    return held("".join(part["text"] for part in content)), held("".join(deltas))


ENDPOINTS: dict[str, Ask] = {
    "generate": generate,
    "completions": completion,
    "chat": chat,
    "responses": responses,
    "messages": messages,
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_answer_may_end_within_a_character(endpoint: str, server: Server) -> None:
    """All characters before are there, and U+FFFD for what there is of it."""
    ask, cut = ENDPOINTS[endpoint], 0
    for tokens in range(1, 30):
        text, streamed = ask(server, SHORT_TEXT, tokens, [])
        whole = text.removesuffix(REPLACEMENT)
        assert streamed == text and SHORT_TEXT.startswith(whole), (tokens, text, streamed)
        cut += whole != text
        if whole == SHORT_TEXT:
            break
    else:
        pytest.fail(f"not written in 30 tokens: {text}")
    assert cut, "no answer ended within a character"


STOPS = {
    "of several tokens": (["🚀"], "ab中"),
    "several": (["x", " c", "🚀 c", "🚀!"], "ab中"),
    "that overlap": (["🚀 c🚀d", "c🚀", "🚀d"], "ab中🚀 "),
    "at the start": (["ab中🚀"], ""),
    "that only begins": (["🚀 c🚁", "d!"], TEXT),
    "after half of it": (["🚀d", "🚀 cd"], "ab中🚀 c"),
}


STOPPED = list(itertools.product(ENDPOINTS, STOPS))
"""Every second one runs with ``--full`` alone: neighbours differ in the endpoint, or in the stop strings."""
EVERY_SECOND = [pair for pair in STOPPED if (list(ENDPOINTS).index(pair[0]) + list(STOPS).index(pair[1])) % 2]


@pytest.mark.parametrize(("endpoint", "case"), but_for(STOPPED, *EVERY_SECOND))
def test_no_stream_shows_a_part_of_a_stop_string(endpoint: str, case: str, server: Server) -> None:
    stops, expected = STOPS[case]
    assert ENDPOINTS[endpoint](server, TEXT, 60, stops) == (expected, expected)


@pytest.mark.parametrize("endpoint", ["generate", "completions", "chat"])
def test_a_stop_string_is_kept_on_demand(endpoint: str, server: Server) -> None:
    assert ENDPOINTS[endpoint](server, TEXT, 60, ["🚀 c", "🚀x"], no_stop_trim=True) == ("ab中🚀 c",) * 2


def test_reasoning_may_end_within_a_character_or_at_a_stop_string(server: Server) -> None:
    """Random weights write broken UTF-8."""
    fields: dict[str, Any] = {
        "field": "reasoning_content",
        "chat_template_kwargs": {"thinking": True},
        "ignore_eos": True,
    }
    for tokens in (4, 9, 30):
        text, streamed = chat(server, TEXT, tokens, [], **fields)
        assert text == streamed != ""
    pairs = (text[start : start + 2] for start in range(4, len(text) - 1))
    stop = next(pair for pair in pairs if REPLACEMENT not in pair)
    assert chat(server, TEXT, 30, [stop], **fields) == (text[: text.index(stop)],) * 2


def test_the_bytes_of_log_probabilities_are_those_of_the_tokens(server: Server) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "regex": TEXT}
    answer = server.post("/v1/chat/completions", {**body, "max_tokens": 60, "logprobs": True, "top_logprobs": 2})
    tokens = answer["choices"][0]["logprobs"]["content"]
    spelled = b"".join(bytes(token["bytes"]) for token in tokens)
    assert spelled.startswith(TEXT.encode()), spelled
    assert any(REPLACEMENT in token["token"] for token in tokens)
