"""Which paths are answered, and to whom: the table as pure functions, and a real server that goes on."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from nvfp4_sgl.serving.endpoints import (
    MAX_BODY_BYTES,
    NOT_ON_CPU,
    PATHS,
    Access,
    Kind,
    Refusal,
    described,
    is_deeper,
    kind_of,
    refuse_body,
    refuse_path,
)
from nvfp4_sgl.serving.guard import Guard, first_error
from tests.support.golden import Golden
from tests.support.server import ADMIN_KEY, Server

OPEN, KEYED = Access(), Access(admin_key="secret")
ADMINISTRATIVE = [path for path, kind in PATHS.items() if kind is Kind.ADMINISTRATIVE]
NOT_OFFERED = {
    "/api/chat": {"model": "tiny", "messages": []},
    "/begin_weight_update": {"weight_names": 5},
    "/encode": {"text": "x"},
    "/invocations": [1],
    "/open_session": {"capacity_of_str_len": 5},
    "/release_memory_occupation": {},
    "/set_internal_state": {"server_args": {}},
    "/start_expert_distribution_record": {},
    "/update_weights_from_tensor": {},
    "//flush_cache": {},
    "/flush_cache/": {},
}
"""Paths of SGLang that no key opens, and what they could be asked."""


# --- the table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ADMINISTRATIVE)
def test_administrative_paths_need_their_key(path: str) -> None:
    assert refuse_path(path, b"", OPEN).status == 403
    assert "--admin-api-key" in refuse_path(path, b"Bearer secret", OPEN).message
    for header in (b"", b"Bearer", b"Bearer ", b"Bearer secre", b"Bearer secret2", b"Basic secret", b"secret"):
        assert refuse_path(path, header, KEYED).status == 401
    assert refuse_path(path, b"bearer secret", KEYED) is None


def test_paths_that_no_key_opens() -> None:
    assert kind_of("/v1/models/tiny") is Kind.READ
    for path in NOT_OFFERED:
        assert refuse_path(path, b"Bearer secret", KEYED).status == 404


def test_profiler_on_a_cpu() -> None:
    assert refuse_path("/start_profile", b"Bearer secret", Access("secret", cpu=True)).status == 400
    assert refuse_path("/start_profile", b"Bearer secret", Access("secret", cpu=False)) is None


@pytest.mark.parametrize("path", ["/generate", "/flush_cache", "/nowhere", "/health"])
def test_header_beyond_ascii(path: str) -> None:
    assert refuse_path(path, "Bearer ä".encode(), KEYED).status == 401


def test_bodies() -> None:
    assert refuse_body(b' \n{"a": 1}') is None
    assert refuse_body(b"{" + b" " * (MAX_BODY_BYTES - 1)) is None
    assert refuse_body(b"{" + b" " * MAX_BODY_BYTES).status == 413
    for body in (b"", b"[{}]", b'"{"', b"\xff{"):
        assert refuse_body(body).status == 400


def test_depth_of_bodies() -> None:
    """Brackets count outside strings only."""
    text = rb'{"a": [{"b": []}, {}], "c": "[[[\"[[[", "d": [' + b"{}," * 200 + b'"]]}}"]}'
    assert [is_deeper(text, bound) for bound in (2, 3, 4, 5)] == [True, True, False, False]
    assert [is_deeper(text.decode(), bound) for bound in (2, 3, 4, 5)] == [True, True, False, False]
    assert refuse_body(b'{"a":' * 121 + b"1" + b"}" * 121).status == 400
    assert refuse_body(b'{"a":' * 120 + b"1" + b"}" * 120) is None
    assert refuse_body(b'{"prompt": "' + b"[{" * 10**5 + b'"}') is None
    assert "brackets" in refuse_body(b'{"prompt": ["' + b"[]," * 10**6 + b"1]}").message


def test_size_of_bodies() -> None:
    """What would hold up the front end while it is parsed; brackets in strings cost little."""
    assert refuse_body(b'{"input_ids": [' + b"1," * 2**22 + b"1]}") is None
    assert "commas" in refuse_body(b'{"input_ids": [' + b"1," * (2**22 + 1) + b"1]}").message
    assert refuse_body(b'{"messages": [' + b"{}," * (2**15 - 3) + b"{}]}") is None
    assert "32769 objects and arrays" in refuse_body(b'{"messages": [' + b"{}," * (2**15 - 2) + b"{}]}").message


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (b'data: {"error": {"message": "no", "code": 400}}\n\ndata: [DONE]\n\n', Refusal(400, "no")),
        (b'data: {"meta_info": {"finish_reason": {"status_code": 503, "message": "x"}}}\n\n', Refusal(503, "x")),
        (b'data: {"meta_info": {"finish_reason": {"type": "length"}}}\n\n', None),
        (b'data: {"meta_info": {"finish_reason": null}}\n\n', None),
        (b'data: {"choices": [{"text": "error"}]}\n\n', None),
        (b"data: {half an event", None),
        (b"event: ping\n\n", None),
        (b"data: [DONE]\n\n", None),
        (b'data: {"error": {"code": "400"}}\n\n', None),
    ],
)
def test_first_error(chunk: bytes, expected: Refusal | None) -> None:
    assert first_error(chunk) == expected


# --- the middleware ---------------------------------------------------------------------------------------------


def ask(
    guard: Guard, path: str, *parts: bytes, method: str = "POST", **headers: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """What a guarded application answers, and the kinds of message that were left unread."""
    incoming: list[dict[str, Any]] = [{"type": "http.request", "body": part, "more_body": True} for part in parts[:-1]]
    incoming += [{"type": "http.request", "body": parts[-1]}] if parts else []
    incoming += [{"type": "http.disconnect"}]
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(guard({"type": "http", "method": method, "path": path, "headers": given}, receive, send))
    return sent, [message["type"] for message in incoming]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with its request's body."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def test_a_body_is_not_read_without_the_key() -> None:
    guard = Guard(echo, Access(api_key="secret"), lambda: False)
    for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        sent, unread = ask(guard, "/generate", b'{"text"', b': "x"}', **header)
        assert sent[0]["status"] == 401 and unread == ["http.request", "http.request", "http.disconnect"]
    sent, _ = ask(guard, "/generate", b'{"text"', b': "x"}', authorization="Bearer secret")
    assert sent[0]["status"] == 200 and sent[1]["body"] == b'{"text": "x"}'


def test_the_free_call_is_not_spent_by_strangers() -> None:
    guard = Guard(echo, Access(api_key="secret"), lambda: False)
    assert ask(guard, "/freeze_gc", b"")[0][0]["status"] == 403
    assert ask(guard, "/freeze_gc", b"", authorization="Bearer secret")[0][0]["status"] == 200
    assert ask(guard, "/freeze_gc", b"", authorization="Bearer secret")[0][0]["status"] == 403


def test_headers() -> None:
    guard = Guard(echo, Access(), lambda: False)
    assert ask(guard, "/generate", b"{}", content_encoding="identity")[0][0]["status"] == 200
    assert ask(guard, "/generate", b"{}", content_encoding="gzip")[0][0]["status"] == 415
    twice = {"authorization": "Bearer a", "Authorization": "Bearer b"}
    scope = [(name.lower().encode(), value.encode()) for name, value in twice.items()]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("read")

    asyncio.run(guard({"type": "http", "method": "POST", "path": "/generate", "headers": scope}, receive, send))
    assert sent[0]["status"] == 400


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_a_body_is_json_by_its_content_type(kind: str) -> None:
    guard = Guard(echo, Access(), lambda: False)
    assert ask(guard, "/generate", b"{}", content_type=kind)[0][0]["status"] == 200


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain; charset=utf-8", "application"])
def test_another_content_type_is_named(kind: str) -> None:
    sent, _ = ask(Guard(echo, Access(), lambda: False), "/v1/chat/completions", b"{}", content_type=kind)
    assert sent[0]["status"] == 415
    message = json.loads(sent[1]["body"])["error"]["message"]
    assert message == f"Content-Type: found {kind!r}; expected application/json"


@pytest.mark.parametrize("access", [OPEN, KEYED, Access("secret", cpu=True), Access(api_key="other")], ids=str)
def test_the_document_lists_what_is_answered(access: Access) -> None:
    """The document lists the paths of SGLang that are answered, and those that a key opens only with that key."""
    given = {path: {"get": {"operationId": path}} for path in (*PATHS, *NOT_OFFERED, "/v1/models/{model}")}
    found = described({"openapi": "3.1.0", "paths": given}, access)
    expected = {"/v1/models/{model}"} | {
        path
        for path, kind in PATHS.items()
        if kind is not Kind.ADMINISTRATIVE or (access.admin_key and not (access.cpu and path in NOT_ON_CPU))
    }
    assert set(found["paths"]) == expected and found["openapi"] == "3.1.0"
    assert "operationId" not in found["paths"]["/tokenize"]["get"] and given["/v1/tokenize"]["get"]["operationId"]


def stream_of(*chunks: bytes) -> Any:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return application


def test_body_arrives_whole_and_a_disconnect_after_it() -> None:
    sent, left = ask(Guard(echo, OPEN, lambda: False), "/generate", b'{"text"', b': "x"}')
    assert sent[0]["status"] == 200 and sent[1]["body"] == b'{"text": "x"}' and left == ["http.disconnect"]


def test_body_that_is_too_long_is_not_read_to_its_end() -> None:
    half = b"{" + b" " * (MAX_BODY_BYTES // 2)
    sent, left = ask(Guard(echo, OPEN, lambda: False), "/generate", half, half, half, half)
    assert sent[0]["status"] == 413 and len(left) == 3


def test_compressed_body() -> None:
    assert ask(Guard(echo, OPEN, lambda: False), "/generate", b"{}", content_encoding="gzip")[0][0]["status"] == 415


def test_client_that_hangs_up() -> None:
    assert ask(Guard(echo, OPEN, lambda: False), "/generate")[0] == []


def test_draining() -> None:
    """New work is refused, reading goes on."""
    guard = Guard(echo, KEYED, lambda: True)
    assert ask(guard, "/generate", b"{}")[0][0]["status"] == 503
    assert ask(guard, "/v1/models", b"", method="GET")[0][0]["status"] == 200


def test_stream_that_begins_with_an_error() -> None:
    chunks = (b'data: {"error": {"message": "too long", "code": 400}}\n\n', b"data: [DONE]\n\n")
    sent, _ = ask(Guard(stream_of(*chunks), OPEN, lambda: False), "/generate", b"{}")
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 400 and json.loads(sent[1]["body"])["error"]["message"] == "too long"


def test_stream_that_ends_with_an_error() -> None:
    chunks = (b'data: {"text": "a"}\n\n', b'data: {"error": {"message": "late", "code": 400}}\n\n')
    sent, _ = ask(Guard(stream_of(*chunks), OPEN, lambda: False), "/generate", b"{}")
    assert sent[0]["status"] == 200 and [message["body"] for message in sent[1:]] == [*chunks, b""]


def test_sglang_freezes_its_garbage_once() -> None:
    guard = Guard(echo, OPEN, lambda: False)
    assert [ask(guard, "/freeze_gc", b"")[0][0]["status"] for _ in range(3)] == [200, 403, 403]
    assert ask(Guard(echo, KEYED, lambda: False), "/freeze_gc", b"")[0][0]["status"] == 401


def test_websocket() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Guard(echo, OPEN, lambda: False)({"type": "websocket", "path": "/v1/realtime"}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


# --- a real server ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(serve, checkpoint) -> Iterator[Server]:
    """The server, whose answers must be the same after all of this."""
    server: Server = serve(checkpoint)
    before = Golden.ask(server)
    yield server
    before.assert_same(Golden.ask(server))


def status(server: Server, path: str, body: Any, authorization: str | None = None) -> tuple[int, str]:
    """Status and text that ``POST path`` answers."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": authorization} if authorization else {})
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.server
@pytest.mark.parametrize("path", ADMINISTRATIVE)
def test_server_refuses_without_the_key(path: str, server: Server) -> None:
    for header in (None, "Bearer wrong", "Bearer \xe4"):
        code, text = status(server, path, {}, header)
        assert code == 401 and "error" in json.loads(text)


@pytest.mark.server
@pytest.mark.parametrize("path", NOT_OFFERED)
def test_server_refuses_what_is_not_offered(path: str, server: Server) -> None:
    code, text = status(server, path, NOT_OFFERED[path], f"Bearer {ADMIN_KEY}")
    assert code == 404 and "not offered for this model" in text


@pytest.mark.server
@pytest.mark.parametrize("path", ["/update_weights_from_tensor", "/flush_cache", "/generate"])
def test_a_browser_may_read_a_refusal(path: str, server: Server) -> None:
    """As it may read SGLang's own answers; the question before, an OPTIONS, needs no key."""
    request = urllib.request.Request(server.url + path, b"[]", {"Origin": "https://example.org"})
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=60)
    assert refusal.value.headers.get_all("Access-Control-Allow-Origin") == ["https://example.org"]
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    request = urllib.request.Request(server.url + path, headers=asked, method="OPTIONS")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200 and answer.headers["Access-Control-Allow-Origin"] == "https://example.org"


@pytest.mark.server
def test_open_paths_are_those_of_sglang(server: Server) -> None:
    """The document lists what is answered and nothing else; the server under test is on a CPU and has an admin key."""
    known = set(server.get("/openapi.json")["paths"])
    undocumented = {"/docs", "/metrics", "/metrics/", "/openapi.json"}
    assert set(PATHS) - known == undocumented | NOT_ON_CPU
    assert known - set(PATHS) == {"/v1/models/{model}"}


@pytest.mark.server
def test_profiler_on_the_cpu_server(server: Server) -> None:
    assert status(server, "/start_profile", {}, f"Bearer {ADMIN_KEY}")[0] == 400


@pytest.mark.server
def test_header_beyond_ascii_at_an_open_path(server: Server) -> None:
    assert status(server, "/generate", {"input_ids": [30]}, "Bearer \xe4")[0] == 401


@pytest.mark.server
def test_length_that_is_said_for_models(server: Server) -> None:
    """The pool less two pages."""
    assert server.get("/v1/models")["data"][0]["max_model_len"] == 16384 - 2 * 256


@pytest.mark.server
def test_keys_are_not_printed(server: Server) -> None:
    for path in ("/server_info", "/model_info", "/v1/models"):
        assert ADMIN_KEY not in json.dumps(server.get(path))
    assert ADMIN_KEY not in server.text()
    assert "<redacted>" in server.get("/server_info")["launch_command"]
