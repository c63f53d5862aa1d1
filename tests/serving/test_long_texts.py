"""A long text costs its own client time, and nobody else: the front end answers, hears SIGTERM, and drops work."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nvfp4_sgl.serving.workers import LONG_BODY_BYTES, LONG_WORKERS
from tests.serving.conftest import SLOW_SECONDS
from tests.support.server import Server, wait_for_none

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

LIMIT = (16384 - 2 * 256) * 29
"""What the pool can hold times the longest token."""
SHORT = {"max_new_tokens": 1}
BEGUN = "planted: a slow text"


def requests(text: str, model: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """A request of each kind whose prompt is ``text``."""
    chat = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    return {
        "generate": ("/generate", {"text": text, "sampling_params": SHORT}),
        "generate streamed": ("/generate", {"text": text, "sampling_params": SHORT, "stream": True}),
        "generate batch": ("/generate", {"text": ["a", text], "sampling_params": SHORT}),
        "completion": ("/v1/completions", {"model": model, "prompt": text, "max_tokens": 1}),
        "completion batch": ("/v1/completions", {"model": model, "prompt": ["a", text], "max_tokens": 1}),
        "chat": ("/v1/chat/completions", chat),
        "chat streamed": ("/v1/chat/completions", {**chat, "stream": True}),
        "chat of parts": ("/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": parts}]}),
        "messages": ("/v1/messages", chat),
        "messages streamed": ("/v1/messages", {**chat, "stream": True}),
        "count_tokens": ("/v1/messages/count_tokens", {"model": model, "messages": chat["messages"]}),
        "responses": ("/v1/responses", {"model": model, "input": text, "max_output_tokens": 8}),
        "tokenize": ("/tokenize", {"model": model, "prompt": text}),
        "tokenize batch": ("/v1/tokenize", {"model": model, "prompt": ["a", text]}),
        "tokenize chat": ("/tokenize", {"model": model, "messages": chat["messages"]}),
        "score": ("/v1/score", {"model": model, "query": text, "items": ["a", "b"], "label_token_ids": [30, 31]}),
    }


KINDS = sorted(requests("", ""))


def ask(server: Server, kind: str, text: str) -> tuple[int, str]:
    """Status and answer of a request of that kind."""
    path, body = requests(text, str(server.get("/v1/models")["data"][0]["id"]))[kind]
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def answers_during(server: Server, begun: int) -> int:
    """How many requests are answered while a slow text is tokenised, of which ``begun`` were before."""
    deadline = time.monotonic() + 30
    while server.text().count(BEGUN) == begun:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    end, count = time.monotonic() + 0.8 * SLOW_SECONDS, 0
    while True:
        server.get("/v1/models")
        if time.monotonic() > end:
            return count
        count += 1


@pytest.mark.parametrize("kind", KINDS)
def test_too_long_a_text_is_refused_untokenised(kind: str, watched: Server) -> None:
    code, answer = ask(watched, kind, " " * LIMIT + "x")
    assert code == 400 and f"expected {LIMIT} or fewer" in answer and "29 bytes of the longest token" in answer


def test_too_many_ids_are_refused_undecoded(watched: Server) -> None:
    assert watched.status("/detokenize", {"tokens": [40] * 15873}) == 400
    assert watched.status("/detokenize", {"tokens": [[40], [40] * 15873]}) == 400
    assert watched.post("/detokenize", {"tokens": [40] * 15872})["text"] == "0" * 15872


def test_a_batch_is_tokenised_as_its_texts_are(watched: Server) -> None:
    """In several pieces; and the front end answers meanwhile."""
    texts = ["a " * (LIMIT // 2), "", "The quick brown fox", " " * LIMIT, "b" * LIMIT, "end"]
    with ThreadPoolExecutor(1) as threads:
        start, waits = time.monotonic(), []
        running = threads.submit(watched.post, "/tokenize", {"prompt": texts})
        while not running.done():
            asked = time.monotonic()
            watched.get("/v1/models")
            waits.append(time.monotonic() - asked)
        assert max(waits) < (time.monotonic() - start) / 2
    answer = running.result()
    single = [watched.post("/tokenize", {"prompt": text}) for text in texts]
    assert answer["tokens"] == [one["tokens"] for one in single]
    assert answer["count"] == [one["count"] for one in single] and answer["count"][3] > 15872
    assert answer["max_model_len"] == single[0]["max_model_len"]


@pytest.mark.parametrize("kind", KINDS)
def test_others_are_answered_while_a_text_is_tokenised(kind: str, watched: Server) -> None:
    begun = watched.text().count(BEGUN)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, watched, kind, "a slow text")
        assert answers_during(watched, begun) >= 2
    code, answer = running.result()
    assert code == 200, answer


@pytest.mark.parametrize("kind", ["chat", "generate", "generate batch", "messages", "responses", "tokenize"])
def test_work_of_a_client_that_has_left_is_dropped(kind: str, watched: Server) -> None:
    """As many of them as there are threads have begun when their clients leave; without that all would."""
    model = str(watched.get("/v1/models")["data"][0]["id"])
    path, body = requests("slow" + " " * LONG_BODY_BYTES, model)[kind]
    before = watched.text().count(BEGUN)
    clients = [http.client.HTTPConnection("127.0.0.1", watched.port) for _ in range(6 * LONG_WORKERS)]
    for client in clients:
        client.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    time.sleep(SLOW_SECONDS / 3)
    for client in clients:
        client.close()
    assert watched.status("/tokenize", {"prompt": "a" * LONG_BODY_BYTES}) == 200, "it has waited for them"
    assert watched.text().count(BEGUN) - before <= len(clients) // 2
    assert "ClientLeft" not in watched.text(), "a traceback in the log, though nobody has done wrong"


def test_sigterm_is_heard_while_a_text_is_tokenised(watched: Server) -> None:
    """The request is finished, a new one refused, and the server ends."""
    texts = [f"slow {number}" + " " * LONG_BODY_BYTES for number in range(4)]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(watched.status, "/generate", {"text": texts, "sampling_params": SHORT})
        time.sleep(SLOW_SECONDS / 3)
        os.kill(watched.process.pid, signal.SIGTERM)
        time.sleep(SLOW_SECONDS / 3)
        assert watched.status("/generate", {"text": "a", "sampling_params": SHORT}) == 503
        assert not running.done()
        assert running.result() == 400, "too many tokens"
    assert not wait_for_none(watched.process.pid, 20)
    watched.process.wait(20)  # else the pool takes it for one that runs
