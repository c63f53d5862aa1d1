"""Requests that are given up in every way, and what must be left of them: nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

from tests.support.prompts import draw_ids
from tests.support.server import Server

IDLE_SECONDS = 30
POOLS = ("full", "swa", "requests")


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
