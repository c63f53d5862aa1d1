"""Grammars that take time and memory: each is answered in time, others decode on, and who leaves ends the work."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from nvfp4_sgl.serving.grammar_compilations import MAX_SECONDS
from nvfp4_sgl.serving.grammar_compiler import ALL_LEFT
from nvfp4_sgl.serving.grammar_process import CHILD_TITLE, MAX_BYTES, TITLE
from tests.support.server import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

ANSWER_SECONDS = MAX_SECONDS + 6
"""Bound on an answer where other tests share the machine; a quiet one takes two seconds less than ten."""
GAP_SECONDS = 3.0
"""Bound on the time between two tokens of another request, which are some 20 ms apart."""
LEAVE_SECONDS = 2.0
"""Bound on the time that a compilation goes on after its client; half of what SGLang takes to look for the client."""
GROWTH = 400 << 20
"""Bound on what the scheduler's memory grows by."""

SLOW = "a?" * 3000
"""Takes half a minute and more."""


def optional_rules(count: int) -> str:
    rules = "".join(f'a{n} ::= "x"?\n' for n in range(count))
    return f"root ::= {' '.join(f'a{n}' for n in range(count))}\n{rules}"


def words(count: int) -> list[str]:
    rng = random.Random(5)
    return ["".join(rng.choices("abcdef", k=12)) for _ in range(count)]


HOSTILE: dict[str, dict[str, Any]] = {
    "regex that takes 20 GB": {"regex": "a?" * 32767 + "z?"},
    "regex that takes half a minute": {"regex": SLOW},
    "repetitions in repetitions": {"regex": "((a{0,99}){0,99}){0,99}"},
    "rules that are all optional": {"ebnf": optional_rules(2000)},
}
MORE: dict[str, dict[str, Any]] = {
    "ambiguous rule": {"ebnf": 'root ::= root root | "a"'},
    "large enumeration": {"json_schema": json.dumps({"enum": words(4000)})},
    "regex in a schema": {"json_schema": json.dumps({"type": "string", "pattern": SLOW})},
    "long string": {"json_schema": json.dumps({"type": "string", "maxLength": 10**6})},
    "many optional properties": {
        "json_schema": json.dumps({"type": "object", "properties": {word: {"type": "string"} for word in words(1500)}})
    },
    "references in references": {
        "json_schema": json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    f"d{n}": {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/d{k}"} for k in range(60)]}}
                    for n in range(60)
                },
            }
        )
    },
    "alternatives": {"regex": "(" + "|".join(words(4500)) + "){1,50}"},
    "alternatives in repetitions": {"regex": "((a|b|ab)*(c|d|cd)*){1,400}"},
    "literal": {"regex": "a" * 65000},
    "repetition": {"regex": "[a-z]{1,65000}"},
    "class of every character": {"regex": "[^x]{1,3000}"},
    "recursion on the left": {"ebnf": 'root ::= root "a" | root root | root "b" root | ""'},
    "rule of itself in every place": {"ebnf": "root ::= (root? root? root? root? " * 40 + '"a"' + ")" * 40},
    "structural tag": {
        "structural_tag": json.dumps(
            {
                "type": "structural_tag",
                "format": {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": SLOW}, "end": ">"},
            }
        )
    },
}


def processes(server: Server, title: str) -> list[psutil.Process]:
    """The server's processes of that name."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == server.process.pid and process.cmdline()[:1] == [title]:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return found


def own_bytes(process: psutil.Process) -> int:
    """Memory that a process shares with no other."""
    try:
        return int(process.memory_full_info().uss)
    except psutil.NoSuchProcess:
        return 0


def wait_until(true: Any, seconds: float) -> float:
    """Seconds until ``true()``, which fails after ``seconds``."""
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < seconds
        time.sleep(0.05)
    return time.monotonic() - started


class Watched:
    """While it is entered, another request decodes, and memory is watched and bounded."""

    def __init__(self, server: Server) -> None:
        self._server, self._done = server, threading.Event()
        self.gap, self.tokens, self.memory, self.scheduler = 0.0, 0, 0, 0

    def __enter__(self) -> Watched:
        self._threads = [threading.Thread(target=target) for target in (self._decode, self._measure)]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.tokens > 5, 60)
        self.gap = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _decode(self) -> None:
        sampling = {"max_new_tokens": 8000, "ignore_eos": True, "temperature": 0}
        body = json.dumps({"input_ids": [30, 31], "stream": True, "sampling_params": sampling})
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            last = time.monotonic()
            while not self._done.is_set() and answer.readline():
                now = time.monotonic()
                self.gap, last, self.tokens = max(self.gap, now - last), now, self.tokens + 1
        connection.close()

    def _measure(self) -> None:
        (scheduler,) = processes(self._server, "sglang::scheduler")
        before = scheduler.memory_info().rss
        while not self._done.wait(0.2):
            self.scheduler = max(self.scheduler, scheduler.memory_info().rss - before)
            for child in processes(self._server, CHILD_TITLE):
                self.memory = max(self.memory, own_bytes(child))
                if self.memory > 2 * MAX_BYTES:
                    child.kill()  # and the test fails, but the machine goes on


def generate(server: Server, sampling: dict[str, Any]) -> tuple[int, str, float]:
    """Status, text and seconds of an answer."""
    body = {"input_ids": [30, 31], "sampling_params": {"max_new_tokens": 3, "temperature": 0, **sampling}}
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    return status, text, time.monotonic() - started


def attack(server: Server, grammars: dict[str, dict[str, Any]]) -> dict[str, tuple[int, str, float]]:
    """Answers to ``grammars``, all asked at once beside another request."""
    with Watched(server) as watched, ThreadPoolExecutor(len(grammars)) as threads:
        found = dict(zip(grammars, threads.map(lambda one: generate(server, one), grammars.values()), strict=True))
    assert watched.gap < GAP_SECONDS and watched.tokens > 100
    assert 0 < watched.memory < 1.2 * MAX_BYTES and watched.scheduler < GROWTH
    for name, (status, text, seconds) in found.items():
        assert status in (200, 400), f"{name}: {text}"
        assert seconds < ANSWER_SECONDS, name
    return found


def test_hostile_grammars_beside_another_request(server):
    found = attack(server, HOSTILE)
    refused = {name for name, (status, _, _) in found.items() if status == 400}
    assert refused >= {"regex that takes 20 GB", "regex that takes half a minute", "rules that are all optional"}
    assert all("compiling the grammar takes more than" in found[name][1] for name in refused), found
    wait_until(lambda: not processes(server, CHILD_TITLE), LEAVE_SECONDS)
    assert generate(server, {"regex": "[ab]{2}"})[0] == 200


@pytest.mark.full
def test_more_hostile_grammars(server):
    names = iter(MORE)
    while some := list(itertools.islice(names, 4)):
        attack(server, {name: MORE[name] for name in some})


TOOL = {"type": "object", "properties": {"a": {"type": "string", "pattern": SLOW}}, "required": ["a"]}
USER = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [30, 31], "sampling_params": {"regex": SLOW}},
    "/v1/completions": {"prompt": "hi", "regex": SLOW},
    "/v1/chat/completions": {
        "messages": USER,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": TOOL}},
    },
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", "name": "f", "strict": True, "parameters": TOOL}],
        "tool_choice": "required",
    },
    "/v1/messages": {
        "messages": USER,
        "max_tokens": 5,
        "tools": [{"name": "f", "strict": True, "input_schema": TOOL}],
        "tool_choice": {"type": "any"},
    },
}


@pytest.fixture
def asking(server) -> Iterator[Any]:
    """``asking(path, stream)``: a connection with a request whose grammar is being compiled."""
    model, open_ones = server.get("/v1/models")["data"][0]["id"], []

    def ask(path: str, stream: bool) -> http.client.HTTPConnection:
        wait_until(lambda: not processes(server, CHILD_TITLE), LEAVE_SECONDS)
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        open_ones.append(connection)
        body = {"stream": stream, **ASKED[path]} | ({} if path == "/generate" else {"model": model})
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: processes(server, CHILD_TITLE), 30)
        return connection

    yield ask
    for connection in open_ones:
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_who_leaves_ends_the_compilation(path, stream, server, asking):
    """The log says so, not that the grammar is too large or invalid."""
    before = len(server.text())
    asking(path, stream).close()
    wait_until(lambda: not processes(server, CHILD_TITLE), LEAVE_SECONDS)
    wait_until(lambda: ALL_LEFT in server.text()[before:], LEAVE_SECONDS)
    assert "Hit invalid" not in server.text()[before:]


def test_an_abort_ends_the_compilation(server, asking):
    connection = asking("/generate", False)
    server.command("/abort_request", {"abort_all": True})
    wait_until(lambda: not processes(server, CHILD_TITLE), LEAVE_SECONDS)
    assert "bort" in connection.getresponse().read().decode()


def test_a_child_is_bounded(server, asking):
    """The kernel ends what takes more, on a machine of any speed."""
    asking("/generate", False)
    (child,) = processes(server, CHILD_TITLE)
    wait_until(lambda: child.rlimit(psutil.RLIMIT_DATA)[1] != psutil.RLIM_INFINITY, LEAVE_SECONDS)
    assert child.rlimit(psutil.RLIMIT_DATA)[1] < child.memory_info().vms + MAX_BYTES
    wait_until(lambda: child.nice() > 0, LEAVE_SECONDS)


def test_a_child_that_the_system_ends(server, asking):
    """As its memory killer does: the request alone fails."""
    connection = asking("/generate", False)
    for child in processes(server, CHILD_TITLE):
        child.kill()
    answer = connection.getresponse()
    assert answer.status == 400 and "compiling the grammar takes more than" in answer.read().decode()


def test_the_process_that_compiles_is_replaced(server):
    (process,) = processes(server, TITLE)
    process.kill()
    status, text, _ = generate(server, {"regex": "[cd]{3}"})
    assert status == 200, text
    (other,) = processes(server, TITLE)
    assert other.pid != process.pid and Path(f"/proc/{other.pid}").exists()
