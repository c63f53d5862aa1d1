"""Requests that are given up in every way, at every moment, leave nothing behind and change nobody's answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.golden import Golden
from tests.support.prompts import draw_ids
from tests.support.server import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

REQUESTS, CONCURRENCY = 200, 16
IDLE_SECONDS = 30
POOLS = ("full", "swa", "requests")


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoints) -> Path:
    return tiny_checkpoints("nvfp4-full")


@pytest.fixture(scope="module")
def server(serve, checkpoint) -> Server:
    return serve(checkpoint)


@dataclass(frozen=True)
class Plan:
    """One request and how it ends: by itself, by hanging up, by ``/abort_request``."""

    name: str
    prompt: list[int]
    tokens: int
    end: str
    patience: float
    """Seconds until it is given up."""
    extra: dict[str, Any]

    @classmethod
    def draw(cls, number: int, rng: random.Random) -> Plan:
        """Short and long prompts, some with a prefix in common, some with a grammar or several samples."""
        length = int(2 ** rng.uniform(0, 9.3))
        seed = rng.choice([1, 2, 1000 + number])
        end = rng.choice(["finish", "finish", "hang up", "abort"])
        extra: dict[str, Any] = rng.choice([{}, {}, {}, {"n": 2}, {"regex": f"[a-z]{{{number + 1},999}}"}])
        patience = rng.choice([0.0, rng.uniform(0, 0.3), rng.uniform(0, 2)])
        tokens = rng.randint(1, 24) if end == "finish" else rng.randint(30, 200)
        return cls(f"aborts-{number}", draw_ids(length, seed, 512), tokens, end, patience, extra)

    def run(self, server: Server) -> str:
        """Ask and end as planned; ``complete`` or ``given up``."""
        sampling = {"temperature": 1, "max_new_tokens": self.tokens, "ignore_eos": True, **self.extra}
        body = {"input_ids": self.prompt, "sampling_params": sampling, "stream": self.end != "finish"}
        if self.end == "abort" and "n" not in self.extra:
            body["rid"] = self.name
        if self.end == "finish":
            answers = server.post("/generate", body)
            for answer in answers if isinstance(answers, list) else [answers]:
                assert len(answer["output_ids"]) == self.tokens
            return "complete"
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            return self._hang_up(connection) if "rid" not in body else self._abort(connection, server)
        finally:
            connection.close()

    def _hang_up(self, connection: http.client.HTTPConnection) -> str:
        """Close the connection, before or after the first chunks."""
        deadline = time.monotonic() + self.patience
        connection.sock.settimeout(max(self.patience, 0.01))
        with contextlib.suppress(TimeoutError):
            stream = connection.getresponse()
            while time.monotonic() < deadline and stream.readline():
                pass
        return "given up"

    def _abort(self, connection: http.client.HTTPConnection, server: Server) -> str:
        """Ask the server to abort it, and read the stream to its end."""

        def abort() -> None:
            time.sleep(self.patience)
            server.command("/abort_request", {"rid": self.name})

        thread = threading.Thread(target=abort)
        thread.start()
        text = connection.getresponse().read().decode()
        thread.join()
        chunks = [line for line in text.splitlines() if line.startswith("data: {")]
        if not chunks or '"abort"' in chunks[-1]:
            return "given up"
        return "complete"


def pools(server: Server) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = server.info()["pools"]
    return found


def wait_until_idle(server: Server) -> dict[str, dict[str, int]]:
    """Occupancy as soon as nothing runs or waits; what finished requests left in the cache counts as free."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        load = server.get("/v1/loads")["loads"][0]
        found = pools(server)
        busy = load["num_running_reqs"] + load["num_waiting_reqs"] + sum(found[name]["used"] for name in POOLS)
        if not busy:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"still in use after {IDLE_SECONDS} s: {found}, {load}")
        time.sleep(0.2)


def check_nothing_is_left(server: Server) -> None:
    """Every token and request slot is free or cached, and free once the cache is flushed."""
    found = wait_until_idle(server)
    assert all(found[name]["used"] == 0 for name in POOLS), found
    server.command("/flush_cache?timeout=30", {})
    found = pools(server)
    assert all(found[name]["free"] == found[name]["capacity"] > 0 for name in POOLS), found
    # SGLang's own checks, which run whenever the scheduler is idle, end it or leave a word.
    assert server.process.poll() is None
    assert not [line for line in server.text().splitlines() if "leak" in line.lower() or "double free" in line.lower()]


def test_pools_show_a_running_request(server):
    """Otherwise their being empty would say nothing."""
    wait_until_idle(server)
    plan = Plan("running", draw_ids(300, 5, 512), 200, "hang up", 1.5, {})
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(plan.run, server)
        deadline = time.monotonic() + 10
        while not (found := pools(server))["requests"]["used"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found["requests"]["used"] == 1 and found["full"]["used"] >= 300 and found["swa"]["used"] >= 128
        running.result()
    wait_until_idle(server)


def test_two_hundred_requests_with_aborts(server):
    before = Golden.ask(server)
    rng = random.Random(7)
    plans = [Plan.draw(number, rng) for number in range(REQUESTS)]
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        outcomes = list(threads.map(lambda plan: plan.run(server), plans))
    assert outcomes.count("given up") >= REQUESTS // 3 and outcomes.count("complete") >= REQUESTS // 3
    assert wait_until_idle(server)["full"]["cached"] > 0, "prompts of more than a page ran, and are cached"
    check_nothing_is_left(server)
    before.assert_same(Golden.ask(server))


def test_abort_all(server):
    """More requests than run at once: those that wait are aborted too."""
    before = Golden.ask(server)
    plans = [Plan(f"all-{n}", draw_ids(200 + n, n, 512), 400, "wait", 0, {}) for n in range(24)]

    def run(plan: Plan) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": plan.tokens, "ignore_eos": True}
        body = {"input_ids": plan.prompt, "sampling_params": sampling, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            lines = connection.getresponse().read().decode().splitlines()
        last: dict[str, Any] = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])
        return last

    with ThreadPoolExecutor(len(plans)) as threads:
        running = [threads.submit(run, plan) for plan in plans]
        deadline = time.monotonic() + 30
        while pools(server)["requests"]["free"]:
            assert time.monotonic() < deadline, "not all request slots came into use"
            time.sleep(0.1)
        server.command("/abort_request", {"abort_all": True})
        reasons = [future.result()["meta_info"]["finish_reason"]["type"] for future in running]
    assert reasons == ["abort"] * len(plans)
    check_nothing_is_left(server)
    before.assert_same(Golden.ask(server))
