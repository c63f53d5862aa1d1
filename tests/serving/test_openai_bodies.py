"""Bodies of OpenAI's and Anthropic's paths on a live server: what the tables take is answered, the rest is 400."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nvfp4_sgl.serving.fields import chat, messages, responses
from nvfp4_sgl.serving.fields.bodies import BODIES
from nvfp4_sgl.serving.fields.objects import not_taken, samples, taken
from tests.support import client_bodies, posting
from tests.support.client_bodies import HELLO, WEATHER
from tests.support.server import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

CHAT, COMPLETION, RESPONSE, MESSAGE, COUNT = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)

BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 2, "temperature": 0},
    COMPLETION: {"prompt": "The quick", "max_tokens": 2, "temperature": 0},
    RESPONSE: {"input": "hi", "max_output_tokens": 2, "temperature": 0},
    MESSAGE: {"model": "tiny", "messages": HELLO, "max_tokens": 2, "temperature": 0},
    COUNT: {"model": "tiny", "messages": HELLO},
}

TOOLS: dict[str, Any] = {
    CHAT: [{"type": "function", "function": {"name": "x", "parameters": WEATHER}}],
    RESPONSE: [{"type": "function", "name": "x"}],
    MESSAGE: [{"name": "x", "input_schema": WEATHER}],
    COUNT: [{"name": "x", "input_schema": WEATHER}],
}

WITH: dict[str, dict[str, Any]] = {
    "min_tokens": {"max_tokens": 4},
    "seed": {"temperature": 1},
    "max_completion_tokens": {"max_tokens": None},
    "return_flat_raw_output_top_logprobs": {"return_meta_info": True, "stream": False},
    "return_meta_info": {"stream": False},
    "continue_final_message": {"messages": [*HELLO, {"role": "assistant", "content": "a"}]},
}
"""What some fields need beside them."""

OF_THE_MODEL = {
    "ebnf": "a string, which is a grammar or not",
    "json_schema": "the same",
    "logprobs": "bounded by the vocabulary",
    "min_tokens": "bounded by max_tokens",
    "output_config": "has a schema, which is one or not",
    "response_format": "the same",
    "rid": "one for each prompt",
    "extra_key": "the same",
    "cache_salt": "the same",
    "top_logprobs": "bounded by the vocabulary, and of no use alone",
    "best_of": "must be n",
    "tools": "have schemas",
}
"""Fields of which a table knows the type only: what its samples are answered with, and why that may be 400."""


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of an answer."""
    answer = posting.post(server, path, body)
    return answer.status, answer.text


def good(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field of a path with each sample that its table takes; every other one in a stream."""
    streams = "stream" in BODIES[path]
    for name, field in BODIES[path].items():
        for place, value in enumerate(taken(field)):
            tools = {"tools": TOOLS[path]} if name == "tool_choice" else {}
            if path == RESPONSE and isinstance(value, dict) and value.get("type") == "custom":
                tools = {"tools": [{"type": "custom", "name": "x"}]}
            stream = {"stream": True} if streams and place % 2 else {}
            yield name, {**BASE[path], **stream, **WITH.get(name, {}), **tools, name: value}


def bad(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field of a path with each sample that its table refuses."""
    for name, field in BODIES[path].items():
        for value in not_taken(field):
            yield name, {**BASE[path], **WITH.get(name, {}), name: value}
    yield "no_such_field", {**BASE[path], "no_such_field": 1}


def is_well(server: Server, status: int, text: str, name: str, stream: bool) -> bool:
    """Whether an answer to a sample that the table takes is one that the table allows."""
    if name in OF_THE_MODEL and 400 <= status < 500:
        return True
    failed = stream and ("event: error" in text or "response.failed" in text)
    return status == 200 and not (failed and name not in OF_THE_MODEL)


@pytest.mark.parametrize("path", BASE)
def test_samples_of_every_field(path, server):
    with ThreadPoolExecutor(16) as threads:
        cases = list(good(path))
        answers = threads.map(lambda case: post(server, path, case[1]), cases)
        wrong = [
            (name, body, status, text[:300])
            for (name, body), (status, text) in zip(cases, answers, strict=True)
            if not is_well(server, status, text, name, bool(body.get("stream")))
        ]
        assert not wrong, "\n".join(map(str, wrong))
        cases = list(bad(path))
        answers = threads.map(lambda case: post(server, path, case[1]), cases)
        wrong = [
            (name, body, status, text[:300])
            for (name, body), (status, text) in zip(cases, answers, strict=True)
            if status != 400 or name not in text
        ]
        assert not wrong, "\n".join(map(str, wrong))
    assert server.is_ready()


USER = {"role": "user", "content": "hi"}


def chats() -> Iterator[dict[str, Any]]:
    """Chats with each sample of a message, where such a message can stand."""
    for sample in chat.MESSAGE.inside:
        message: dict[str, Any] = {**sample, **({"content": "a"} if sample.get("prefix") else {})}
        role = message["role"]
        calls = [{"id": "x", **call} for call in message.get("tool_calls") or ()]
        message |= {"tool_calls": calls} if calls else {}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "y"} for call in calls]
        function = {"name": "f", "arguments": "{}"}
        called = {"role": "assistant", "tool_calls": [{"id": message.get("tool_call_id"), "function": function}]}
        before: list[Any] = [USER, called] if role == "tool" else [USER] if role == "assistant" else []
        after = [] if message.get("prefix") or role == "tool" else [*results, USER]
        tools: list[Any] = message.get("tools") or []
        if len(calls) + len(tools) < 2:  # several of one name cannot be told apart
            yield {**BASE[CHAT], "messages": [*before, message, *after]}


def message_requests() -> Iterator[dict[str, Any]]:
    """Messages with each sample of a block."""
    for kind, table in messages.USER_BLOCKS.items():
        for block in samples(table, {"type": kind})[0]:
            called = {"type": "tool_use", "id": block.get("tool_use_id"), "name": "f", "input": {}}
            before = [USER, {"role": "assistant", "content": [called]}] if kind == "tool_result" else []
            yield {**BASE[MESSAGE], "messages": [*before, {"role": "user", "content": [block]}]}
    for kind, table in {"text": messages.TEXT_BLOCK, "thinking": messages.THINKING_BLOCK}.items():
        for block in samples(table, {"type": kind})[0]:
            yield {**BASE[MESSAGE], "messages": [USER, {"role": "assistant", "content": [block]}, USER]}
    for block in samples(messages.TOOL_USE, {"type": "tool_use"})[0]:
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "y"}
        answered = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        yield {**BASE[MESSAGE], "messages": [USER, *answered]}


def responses_requests() -> Iterator[dict[str, Any]]:
    """Responses with each sample of an item."""
    for item in responses.ITEM.inside:
        kind = item.get("type", "message")
        call = {"type": "function_call", "call_id": item.get("call_id"), "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": item.get("call_id"), "output": "y"}
        before = [USER, call] if kind.endswith("output") else [USER]
        after = [output] if kind.endswith("call") else [] if kind.endswith("output") else [USER]
        yield {**BASE[RESPONSE], "input": [*before, item, *after]}


@pytest.mark.parametrize("path", [CHAT, MESSAGE, RESPONSE])
def test_samples_of_messages(path, server):
    bodies = {CHAT: chats, MESSAGE: message_requests, RESPONSE: responses_requests}[path]()
    answers = posting.post_all(server, ((path, body) for body in bodies))
    wrong = [str(answer) for answer in answers if answer.status != 200]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("client", client_bodies.BODIES)
def test_what_clients_send(client, server):
    path, body = client_bodies.BODIES[client]
    bound = (
        {}
        if {"max_tokens", "max_completion_tokens"} & set(body)
        else {"max_output_tokens" if path == RESPONSE else "max_tokens": 3}
    )
    status, text = post(server, path, {"model": "a-name", **bound, **body})
    assert status == 200 and "event: error" not in text and "response.failed" not in text, text


# --- how many tokens -----------------------------------------------------------------------------------------------


def events(text: str) -> list[dict[str, Any]]:
    """The data of the events of a stream."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_as_many_tokens_as_asked_for(tokens, server):
    """The model goes on, so each path answers exactly as many tokens, with and without a stream."""
    said = {"model": "default", "temperature": 0, "top_k": 1}
    for path, prompt, bound in (
        (CHAT, {"messages": HELLO}, "max_tokens"),
        (CHAT, {"messages": HELLO}, "max_completion_tokens"),
        (MESSAGE, {"messages": HELLO}, "max_tokens"),
        (COMPLETION, {"prompt": "hi"}, "max_tokens"),
        (RESPONSE, {"input": "hi"}, "max_output_tokens"),
    ):
        body = {**said, **prompt, bound: tokens}
        status, text = post(server, path, body)
        assert status == 200, text
        usage = json.loads(text)["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == tokens, (path, bound)
        options = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETION) else {}
        status, text = post(server, path, {**body, **options, "stream": True})
        assert status == 200, text
        last = [event.get("usage") or (event.get("response") or {}).get("usage") for event in events(text)]
        usage = [one for one in last if one][-1]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == tokens, (path, bound, "stream")


def test_a_response_takes_the_names_of_models_that_chats_take(server):
    for model in ({}, {"model": "default"}, {"model": "gpt-5"}, {"model": None}):
        status, text = post(server, RESPONSE, {"input": "hi", "max_output_tokens": 2, **model})
        answer = json.loads(text)
        assert status == 200 and answer["model"] == (model.get("model") or "default") and answer["store"] is False
    assert post(server, RESPONSE, {"input": "hi", "model": "tiny:adapter"})[0] == 404


# --- what fields do ------------------------------------------------------------------------------------------------


def answered(server: Server, **fields: Any) -> tuple[Any, Any, int]:
    """Content, reasoning and length of the prompt of a chat."""
    status, text = post(server, CHAT, {"messages": HELLO, "max_tokens": 8, "temperature": 0, **fields})
    assert status == 200, text
    answer = json.loads(text)
    message = answer["choices"][0]["message"]
    return message["content"], message["reasoning_content"], answer["usage"]["prompt_tokens"]


def test_every_word_for_thinking_does_the_same(server):
    switch: dict[str, Any]
    thinking = answered(server, chat_template_kwargs={"thinking": True}, reasoning_effort="low")
    plain = answered(server)
    assert thinking != plain and thinking[1]
    for switch in (
        {"enable_thinking": True},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"thinking": {"type": "enabled"}},
        {"thinking": True},
        {"reasoning": {"enabled": True}},
    ):
        assert answered(server, **switch, reasoning_effort="low") == thinking, switch
    for switch in (
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"reasoning_effort": "none"},
    ):
        assert answered(server, **switch) == plain, switch


def test_the_last_message_is_continued(server):
    """``prefix``, ``continue_final_message`` and Anthropic's last message of the assistant: the same prompt."""
    begun = [*HELLO, {"role": "assistant", "content": "a"}]
    expected = answered(server, messages=begun, continue_final_message=True)
    assert answered(server, messages=[HELLO[0], {**begun[1], "prefix": True}]) == expected
    body = {"model": "tiny", "messages": begun, "max_tokens": 8, "temperature": 0}
    status, text = post(server, MESSAGE, body)
    answer = json.loads(text)
    assert status == 200 and answer["content"][0]["text"] == expected[0]
    usage = answer["usage"]
    assert usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == expected[2]


def test_answers_can_be_sent_back(server):
    """What the server says, reasoning included, is the history of the next request as it is."""
    bound = {"temperature": 0, "model": "tiny"}
    again = {"role": "user", "content": "And?"}
    chat = {**bound, "messages": HELLO, "max_tokens": 4, "thinking": True}
    said = json.loads(post(server, CHAT, chat)[1])["choices"][0]["message"]
    status, text = post(server, CHAT, {**chat, "messages": [*HELLO, said, again]})
    assert said["reasoning_content"] and status == 200, text
    message = {**bound, "messages": HELLO, "max_tokens": 4, "thinking": {"type": "adaptive"}}
    said = json.loads(post(server, MESSAGE, message)[1])["content"]
    assert said[0]["type"] == "thinking"
    status, text = post(
        server, MESSAGE, {**message, "messages": [*HELLO, {"role": "assistant", "content": said}, again]}
    )
    assert status == 200, text
    response = {**bound, "input": HELLO, "max_output_tokens": 4, "include": ["reasoning.encrypted_content"]}
    for reasoning in ({}, {"reasoning": {"effort": "low", "summary": "auto"}}):
        said = json.loads(post(server, RESPONSE, {**response, **reasoning})[1])["output"]
        status, text = post(server, RESPONSE, {**response, **reasoning, "input": [*HELLO, *said, again]})
        assert said and status == 200, (said, text)


def test_a_message_says_which_stop_sequence_ended_it(server):
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0}
    words = re.findall("[A-Za-z]{3}", json.loads(post(server, MESSAGE, body)[1])["content"][0]["text"])
    body["stop_sequences"] = ["no such text", words[-1]]
    answer = json.loads(post(server, MESSAGE, body)[1])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", words[-1])
    ends = [
        event
        for event in events(post(server, MESSAGE, {**body, "stream": True})[1])
        if event["type"] == "message_delta"
    ]
    assert [end["delta"] for end in ends] == [{"stop_reason": "stop_sequence", "stop_sequence": words[-1]}]
    assert ends[0]["usage"]["output_tokens"] == answer["usage"]["output_tokens"]
    for stream in (False, True):
        text = post(server, MESSAGE, {**body, "stop_sequences": ["no such text"], "stream": stream})[1]
        assert '"stop_reason":"max_tokens"' in text and '"stop_sequence":"' not in text


def test_a_completion_echoes_its_prompt(server):
    body = {"prompt": "The quick", "max_tokens": 2, "temperature": 0}
    alone = json.loads(post(server, COMPLETION, body)[1])["choices"][0]["text"]
    assert json.loads(post(server, COMPLETION, {**body, "echo": True})[1])["choices"][0]["text"] == "The quick" + alone


def test_a_refused_message_has_anthropics_shape(server):
    status, text = post(server, MESSAGE, {"model": "tiny", "messages": HELLO, "max_tokens": 2, "no_such_field": 1})
    answer = json.loads(text)
    assert status == 400 and answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
