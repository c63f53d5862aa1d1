"""Requests that are given up in every way, at every moment, leave nothing behind and change nobody's answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.given_up import Plan, check_nothing_is_left, pools, wait_until_idle
from tests.support.golden import Golden
from tests.support.prompts import draw_ids

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

REQUESTS, CONCURRENCY = 200, 16


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


LONG = 160
"""Tokens of an answer that takes longer than the two seconds after which SGLang aborts what is left of a stream."""


def named(rid: str, tokens: int, stream: bool = False) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": [5, 6, 7, 8], "rid": rid, "stream": stream, "sampling_params": sampling}


@contextlib.contextmanager
def asked(server: Any, body: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """A connection on which ``body`` was sent, and runs."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    with contextlib.closing(connection):
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        deadline = time.monotonic() + 10
        while not pools(server)["requests"]["used"] and time.monotonic() < deadline:
            time.sleep(0.02)
        yield connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_request_of_a_name_leaves_the_first_alone(stream: bool, server):
    """It is refused at once, by the name; what SGLang does at the end of its stream is not done to the first."""
    wait_until_idle(server)
    with asked(server, named("twice", LONG)) as first:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as second:
            body = json.dumps(named("twice", 1, stream))
            second.request("POST", "/generate", body, {"Content-Type": "application/json"})
            answer = second.getresponse()
            assert answer.status == 400 and b"Duplicate request ID detected: twice" in answer.read()
        assert len(json.loads(first.getresponse().read())["output_ids"]) == LONG


def test_a_name_may_be_used_again(server):
    """After a stream, too."""
    wait_until_idle(server)
    with asked(server, named("again", 4, stream=True)) as first:
        first.getresponse().read()
    time.sleep(1)
    assert len(server.post("/generate", named("again", LONG))["output_ids"]) == LONG


@pytest.mark.parametrize("hangs_up", [False, True])
def test_an_abort_spares_names_that_begin_alike(hangs_up: bool, server):
    wait_until_idle(server)
    with ThreadPoolExecutor(1) as thread, asked(server, named("one", 4000)) as first:
        other = thread.submit(server.post, "/generate", named("one more", LONG))
        time.sleep(0.5)
        if hangs_up:
            first.close()
        else:
            server.command("/abort_request", {"rid": "one"})
            assert json.loads(first.getresponse().read())["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(other.result()["output_ids"]) == LONG
    wait_until_idle(server)


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
