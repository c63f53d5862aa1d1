"""What cannot be served is refused with a 4xx that says why, and the server goes on as if nothing had been."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.golden import Golden
from tests.support.server import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

VOCAB = 512
POOL_TOKENS = 16384
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"


@pytest.fixture(scope="module")
def server(serve, checkpoint) -> Iterator[Server]:
    """The server, whose answers must be the same after all of this."""
    server: Server = serve(checkpoint)
    before = Golden.ask(server)
    yield server
    before.assert_same(Golden.ask(server))


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": "tiny", "prompt": "The quick", "max_tokens": 3, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}
    return CHAT, body


def generate(**fields: Any) -> tuple[str, dict[str, Any]]:
    return GENERATE, {"input_ids": [30, 31], "sampling_params": {"max_new_tokens": 3}, **fields}


def sampling(**fields: Any) -> tuple[str, dict[str, Any]]:
    return GENERATE, {"input_ids": [30, 31], "sampling_params": {"max_new_tokens": 3, **fields}}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


def nested(levels: int) -> dict[str, Any]:
    """A schema of objects in objects, two brackets each."""
    return {"type": "object", "properties": {"a": nested(levels - 1)}} if levels else {"type": "string"}


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature below 0": ({"temperature": -1}, "temperature"),
    "temperature as text": ({"temperature": "hot"}, "temperature"),
    "temperature that is infinite in fp32": ({"temperature": 1e39}, "temperature"),
    "top_p above 1": ({"top_p": 2}, "top_p"),
    "top_p 0": ({"top_p": 0}, "top_p"),
    "top_k beyond int32": ({"top_k": 2**40}, "top_k"),
    "top_k below -1": ({"top_k": -2}, "top_k"),
    "min_p above 1": ({"min_p": 2}, "min_p"),
    "negative max_tokens": ({"max_tokens": -5}, "m"),
    "max_tokens beyond the context": ({"max_tokens": 10**8}, "max_tokens"),
    "min_tokens above max_tokens": ({"min_tokens": 10}, "min_new_tokens"),
    "no choices": ({"n": 0}, ""),
    "negative n": ({"n": -1}, "n: found -1"),
    "frequency_penalty": ({"frequency_penalty": 5}, "frequency_penalty"),
    "presence_penalty as text": ({"presence_penalty": "x"}, "presence_penalty"),
    "repetition_penalty": ({"repetition_penalty": -1}, "repetition_penalty"),
    "repetition_penalty that is 0 in fp32": ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    "repetition_penalty that may overflow": ({"repetition_penalty": 1e-30}, "repetition_penalty"),
    "seed as text": ({"seed": "x"}, "seed"),
    "stream as text": ({"stream": "maybe"}, "stream"),
    "stop as a number": ({"stop": 5}, "stop"),
    "too many stop strings": ({"stop": [str(n) for n in range(40)]}, "stop"),
    "stop_token_ids": ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    "stop_regex": ({"stop_regex": "["}, "stop_regex"),
    "logit_bias outside the vocabulary": ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
    "logit_bias of no token": ({"logit_bias": {"a": 1}}, ""),
    "logit_bias beyond fp32": ({"logit_bias": {"30": 1e39}}, "logit_bias"),
    "regex": ({"regex": "[a"}, "regex"),
    "grammar without a root": ({"ebnf": "x"}, "ebnf"),
    "unknown response format": ({"response_format": {"type": "xml"}}, "response_format"),
    "response format without its schema": ({"response_format": {"type": "json_schema"}}, "schema"),
    "adapter": ({"lora_path": "x"}, "LoRA"),
    "a billion choices": ({"n": 10**9}, "n: found 1000000000"),
    "seed": ({"seed": 5}, "seed: not honoured"),
    "bias on too many tokens": ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias: found 1025"),
    "long stop strings": ({"stop": ["a" * 5000]}, "stop: found 5000"),
    "regex that searches for ever": ({"stop_regex": "(a+)+b"}, "stop_regex"),
    "grammar of nothing": ({"ebnf": "root ::= root"}, "allows no token"),
    "grammar that comes to nothing": ({"ebnf": 'root ::= "a" b\nb ::= b', "top_p": 0.9}, "allows no token"),
    "long regex": ({"regex": "|".join(f"w{n}" for n in range(20000))}, "regex: found 128889 characters"),
    "deep regex": ({"regex": "(" * 9000 + "a" + ")" * 9000}, "regex"),
}
"""Fields that both OpenAI routes take, and a part of the answer."""

REFUSED: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    **{f"completion: {name}": (completion(**fields), part) for name, (fields, part) in PARAMETERS.items()},
    **{f"chat: {name}": (chat(**fields), part) for name, (fields, part) in PARAMETERS.items()},
    "max_tokens 0": (completion(max_tokens=0), "max_tokens"),
    "empty prompt": (completion(prompt=""), "empty"),
    "prompt of no ids": (completion(prompt=[]), "empty"),
    "no prompt": (completion(prompt=None), "prompt"),
    "prompt of ids and text": (completion(prompt=[30, "a"]), "prompt"),
    "id outside the vocabulary": (completion(prompt=[30, VOCAB]), f"token id {VOCAB}"),
    "negative id": (completion(prompt=[-1]), "token id -1"),
    "one bad prompt of two": (completion(prompt=[[30], [10**9]]), "token id 1000000000"),
    "id beyond int64": (completion(prompt=[2**70]), "prompt"),
    "text longer than the pool": (completion(prompt="a " * POOL_TOKENS), "exceeds the maximum"),
    "ids longer than the pool": (completion(prompt=[30] * POOL_TOKENS), "exceeds the maximum"),
    "ids longer than the context": (completion(prompt=[30] * (2**20 + 1)), "found 1048577 entries"),
    "more logprobs than the vocabulary": (completion(logprobs=VOCAB + 1), "top log-probabilities"),
    "negative logprobs": (completion(logprobs=-1), "logprobs: found -1"),
    "bad id in a stream": (completion(prompt=[VOCAB], stream=True), f"token id {VOCAB}"),
    "bad top_k in a stream": (completion(top_k=2**40, stream=True), "top_k"),
    "no messages": (chat(messages=[]), "messages: found 0 entries"),
    "messages as text": (chat(messages="x"), "messages"),
    "unknown role": (chat(messages=[{"role": "wizard", "content": "x"}]), "role"),
    "message without role": (chat(messages=[{"content": "x"}]), "role"),
    "picture": (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]),
        "image_url",
    ),
    "schema of an unknown type": (chat(response_format=schema({"type": "nonsense"})), "nonsense"),
    "schema with a dangling reference": (chat(response_format=schema({"$ref": "#/nowhere"})), "nowhere"),
    "schema of itself": (chat(response_format=schema({"$ref": "#"}), top_p=0.9), "allows no token"),
    "schema of itself in a stream": (
        chat(response_format=schema({"$ref": "#"}), top_p=0.9, stream=True),
        "allows no token",
    ),
    "schemas of each other": (
        chat(
            response_format=schema(
                {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
            )
        ),
        "allows no token",
    ),
    "deep schema": (chat(response_format=schema(nested(100))), "deep"),
    "schema as text": (chat(response_format=schema("x")), "schema"),
    "chat with more top_logprobs than the vocabulary": (chat(logprobs=True, top_logprobs=10**4), "log-probabilities"),
    "chat with negative top_logprobs": (chat(logprobs=True, top_logprobs=-1), "top_logprobs: found -1"),
    "required tool of none": (chat(tool_choice="required"), "ool"),
    "named tool that is not there": (
        chat(tools=tool(), tool_choice={"type": "function", "function": {"name": "g"}}),
        "'g' not found",
    ),
    "tool with a bad schema": (chat(tools=tool(parameters={"type": "nonsense"}), tool_choice="required"), "nonsense"),
    "unknown reasoning effort": (chat(reasoning_effort="enormous"), "reasoning_effort"),
    "native: no prompt": (generate(input_ids=None), "should be provided"),
    "native: no ids": (generate(input_ids=[]), "input_ids: found 0 entries"),
    "native: empty text": ((GENERATE, {"text": "", "sampling_params": {"max_new_tokens": 3}}), "no tokens"),
    "native: ids as text": (generate(input_ids=["a"]), "int"),
    "native: fractional id": (generate(input_ids=[30.5]), "int"),
    "native: id outside the vocabulary": (generate(input_ids=[VOCAB]), f"token id {VOCAB}"),
    "native: one bad prompt of two": (generate(input_ids=[[30], []]), "input_ids[1]: found 0 entries"),
    "native: longer than the pool": (generate(input_ids=[30] * POOL_TOKENS), "exceeds the maximum"),
    "native: top log-probabilities": (generate(return_logprob=True, top_logprobs_num=10**5), "top log-probabilities"),
    "native: start of log-probabilities": (generate(return_logprob=True, logprob_start_len=99), "logprob_start_len"),
    "native: log-probabilities of ids": (generate(return_logprob=True, token_ids_logprob=[VOCAB]), "token_ids_logprob"),
    "native: embeddings": (
        (GENERATE, {"input_embeds": [[0.0] * 256], "sampling_params": {"max_new_tokens": 3}}),
        "input_embeds",
    ),
    "native: embeddings in places": (generate(positional_embed_overrides=[1]), "positional_embed_overrides"),
    "native: unknown parameter": (sampling(unknown=1), "unknown"),
    "native: n": (sampling(n=-2), "n: found -2"),
    "native: a billion choices in a stream": (
        (GENERATE, {**sampling(n=10**9)[1], "stream": True}),
        "n: found 1000000000",
    ),
    "native: n of nothing": (sampling(n=None), "n: found None"),
    "native: seed": (sampling(sampling_seed=5), "seed: not honoured"),
    "native: beams": (sampling(beam_width=4), "beam_width"),
    "native: list of no parameters": (generate(sampling_params=[]), "sampling_params: found 0 entries"),
    "native: too many prompts": (generate(input_ids=[[30]] * 4097), "prompts times n: found 4097"),
    "native: names for one request": (generate(rid=["a", "b"]), "rid"),
    "native: top log-probabilities in a list": (generate(return_logprob=True, top_logprobs_num=[2]), "[2]"),
    "native: start of log-probabilities below -1": (
        generate(return_logprob=True, logprob_start_len=-2),
        "logprob_start_len: found -2",
    ),
    "native: tokens to pool": (
        generate(return_logprob=True, token_ids_logprob=[1], token_indices_to_pool=[999]),
        "token_indices_to_pool: set by /v1/score",
    ),
    "native: text and ids": (generate(text="x"), "text, input_ids: found both"),
    "native: names of too few": (generate(input_ids=[[30]] * 3, rid=["a", "b"]), "rid: found 2 entries"),
    "native: starts of too few": (
        generate(input_ids=[[30]] * 3, return_logprob=True, logprob_start_len=[0]),
        "logprob_start_len: found 1 entries",
    ),
    "native: one bad start of two": (
        generate(input_ids=[[30]] * 2, return_logprob=True, logprob_start_len=[0, 9]),
        "logprob_start_len: found 9",
    ),
    "native: parameters of too few": (generate(input_ids=[[30]] * 3, sampling_params=[{}]), "sampling_params: found 1"),
    "native: name of a health check": (generate(rid="HEALTH_CHECK_1"), "rid: found 'HEALTH_CHECK_1'"),
    "native: fractional max_new_tokens": (sampling(max_new_tokens=3.0), "max_new_tokens: found 3.0"),
    "native: parameters as if they were checked": (sampling(is_normalized=True), "is_normalized: set by SGLang"),
    "native: empty stop string": (sampling(stop=[""]), "stop[0]: found ''"),
    "completion: empty stop string": (completion(stop=["a", ""]), "stop"),
    "chat: empty stop string": (chat(stop=""), "stop"),
    "completion: min_tokens with stop": (completion(min_tokens=2, stop="a"), "min_new_tokens: does not delay stop"),
    "native: picture": (generate(image_data="x"), "image_data"),
    "native: another process's socket": (generate(http_worker_ipc="ipc://x"), "http_worker_ipc"),
    "native: longer than the pool in a stream": (
        generate(input_ids=[30] * POOL_TOKENS, stream=True),
        "exceeds the maximum",
    ),
    "longer than the pool in a stream": (completion(prompt=[30] * POOL_TOKENS, stream=True), "exceeds the maximum"),
    "native: bad id in a stream": (generate(input_ids=[VOCAB], stream=True), f"token id {VOCAB}"),
    "native: min_new_tokens": (sampling(min_new_tokens=50), "min_new_tokens"),
    "native: stop ids with min_new_tokens": (sampling(stop_token_ids=[-3], min_new_tokens=2), "stop_token_ids"),
    "native: deep schema": (
        sampling(json_schema=json.dumps(nested(70))),
        "json_schema: found objects and arrays more than 128 deep",
    ),
    "native: schema that is no JSON": (sampling(json_schema="{"), "json"),
    "native: unknown session": (generate(session_params={"id": "x"}), "session"),
    "embeddings of a generating model": (("/v1/embeddings", {"model": "tiny", "input": "x"}), "embedding"),
}


def refuse(server: Server, path: str, data: bytes) -> tuple[int, str]:
    """Status and text of a request that is expected to fail."""
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, server):
    (path, body), part = REFUSED[name]
    status, text = refuse(server, path, json.dumps(body).encode())
    assert 400 <= status < 500, text
    assert part in text


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "x " * POOL_TOKENS}], "max_tokens": 2}, "error"),
        ("/v1/responses", {"input": "x " * POOL_TOKENS, "max_output_tokens": 2}, "response.failed"),
    ],
)
def test_streams_that_begin_before_their_prompt_is_known_to_be_too_long(path, body, event, server):
    """The exception that docs/security.md makes of them: the error is an event."""
    model = server.get("/v1/models")["data"][0]["id"]
    status, text = refuse(server, path, json.dumps({"model": model, "stream": True, **body}).encode())
    assert status == 200 and f"event: {event}\n" in text and "exceeds the maximum" in text
    assert "exceeds the maximum" not in text.split("\n\n")[0]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
@pytest.mark.parametrize("data", [b"{", b"", b'{"model": "tiny"', b"\xff\xfe", b'{"prompt": "x", "temperature": NaN}'])
def test_what_is_no_json(path, data, server):
    assert refuse(server, path, data)[0] == 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
@pytest.mark.parametrize("data", [b"[]", b"null", b'"x"', b"5"])
def test_json_that_is_no_object(path, data, server):
    assert refuse(server, path, data)[0] == 400


def as_bytes(request: tuple[str, dict[str, Any]]) -> tuple[str, bytes]:
    return request[0], json.dumps(request[1]).encode()


@pytest.mark.parametrize(
    "body",
    [
        completion(logprobs=VOCAB),
        completion(prompt=[0, VOCAB - 1]),
        completion(logit_bias={str(VOCAB - 1): 1e30}, temperature=1e-5),
        completion(repetition_penalty=1e-20),
        # The same token over and over.
        completion(
            repetition_penalty=1e-20, frequency_penalty=-2, temperature=1e-6, top_k=5, max_tokens=300, ignore_eos=True
        ),
        completion(top_k=2**30),
        completion(temperature=1e30),
        completion(temperature=1e30, regex="[ab]+", top_k=5, min_tokens=1),
        completion(top_p=1e-300),
        completion(n=64, max_tokens=1),
        completion(logit_bias={str(n): 1 for n in range(VOCAB)}),
        completion(ebnf='root ::= "a" root'),
        completion(regex="(" * 128 + "a" + ")" * 128),
        chat(response_format=schema(nested(58))),
        sampling(json_schema=json.dumps(nested(63))),
        sampling(stop_token_ids=[VOCAB - 1], min_new_tokens=2),
    ],
    ids=lambda body: json.dumps(body[1])[:90],
)
def test_the_last_value_that_is_allowed(body, server):
    """Next to the refused ones lie values that work."""
    assert refuse(server, *as_bytes(body))[0] == 200
