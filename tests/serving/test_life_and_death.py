"""How a server ends, and how two live side by side. Small pools: what is said of lengths is tried to the last token."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nvfp4_sgl.errors import INTERRUPTED
from tests.serving.test_startup_errors import assert_one_error
from tests.support.golden import Golden
from tests.support.server import Server, wait_for_none
from tests.support.server_processes import process
from tests.support.start_log import check_start
from tests.support.start_ups import StartUps

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

POOL = 2048
DEATH_SECONDS = 10
FLAGS = ("--max-total-tokens", str(POOL))


@pytest.fixture(scope="module")
def pair(checkpoint, tmp_path_factory) -> Iterator[tuple[Server, Server]]:
    """Two servers that started at once, without an administrative key.

    The first is started as users start it, the second as most tests start theirs (:mod:`tests.support.forks`).
    """
    folder = tmp_path_factory.mktemp("pair")
    with (
        Server.launch(checkpoint, *FLAGS, log=folder / "first.log", admin=False, fresh=True) as first,
        Server.launch(checkpoint, *FLAGS, log=folder / "second.log", admin=False) as second,
    ):
        yield first.wait_ready(), second.wait_ready()


def test_the_log_of_a_start(pair) -> None:
    """Up to ``ready`` it is short, and warns of nothing but what is so."""
    check_start(pair[0])


def test_servers_answer_alike(pair) -> None:
    first, second = map(Golden.ask, pair)
    first.assert_same(second)


def inherited(server: Server) -> list[tuple[Any, ...]]:
    """What each process of a server has from the one that started it."""
    launcher = psutil.Process(server.process.pid)
    children = [process(server, f"sglang::{name}") for name in ("scheduler", "detokenizer")]
    return [
        (
            found.ppid() == launcher.pid,
            (os.getsid(found.pid), os.getpgid(found.pid)) == (launcher.pid, launcher.pid),
            Path(found.cwd()) == server.log.parent,
            [Path(f"/proc/{found.pid}/fd/{number}").readlink() == server.log for number in (1, 2)],
            [found.rlimit(limit) for limit in (psutil.RLIMIT_NOFILE, psutil.RLIMIT_STACK, psutil.RLIMIT_CORE)],
            re.search(r"^SigBlk:\s*(\w+)$", Path(f"/proc/{found.pid}/status").read_text(), re.MULTILINE)[1],
        )
        for found in (launcher, *children)
    ]


def test_processes_of_a_forked_server_stand_where_others_do(pair) -> None:
    assert inherited(pair[1]) == inherited(pair[0])


def test_administration_is_off_without_its_key(pair) -> None:
    """SGLang's own call of one such path, when it is ready, has left no trace in the log."""
    for path in ("/flush_cache", "/abort_request", "/configure_logging", "/start_profile"):
        with pytest.raises(urllib.error.HTTPError, match="403") as refusal:
            pair[0].post(path, {})
        assert "--admin-api-key" in refusal.value.read().decode()
    assert "freeze_gc failed" not in pair[0].text()


def test_the_longest_request_is_served_and_a_longer_one_refused(pair) -> None:
    """SGLang itself takes some that it answers with no token, or never; a prompt leaves five tokens for its answer."""
    server = pair[0]
    length = server.get("/v1/models")["data"][0]["max_model_len"]
    assert length == POOL - 2 * 256
    for prompt in (length - 5, length - 258):
        sampling = {"max_new_tokens": length - prompt, "ignore_eos": True}
        body = {"input_ids": [30 + prompt % 7] * prompt, "sampling_params": sampling}
        answer = server.post("/generate", body, seconds=120)["meta_info"]
        assert answer["prompt_tokens"] + answer["completion_tokens"] == length
    for prompt in (length - 4, length + 1, POOL - 1, 2 * POOL):
        assert server.status("/generate", {"input_ids": [30] * prompt, "sampling_params": {"max_new_tokens": 1}}) == 400


def test_port_in_use_is_said_before_anything_is_loaded(pair, checkpoint, start_up: StartUps) -> None:
    port = str(pair[0].port)
    assert_one_error(*start_up(checkpoint, "--port", port), (f"--port {port}", "in use"))


def test_sigterm_lets_requests_finish_and_takes_no_new_ones(pair) -> None:
    """A client that never sends the rest of its request does not keep the server."""
    server, answers = pair[0], []
    stuck = socket.create_connection(("127.0.0.1", server.port))
    stuck.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    sampling = {"max_new_tokens": 150, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": [30, 31, 32], "sampling_params": sampling}
    thread = threading.Thread(target=lambda: answers.append(server.post("/generate", body)))
    thread.start()
    deadline = time.monotonic() + 10
    while not server.info()["pools"]["requests"]["used"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(server.process.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert server.status("/generate", body) == 503
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.get("/health")
    assert refusal.value.code == 503
    thread.join(60)
    assert answers and answers[0]["meta_info"]["completion_tokens"] == 150
    server.process.wait(30)
    assert not wait_for_none(server.process.pid, 10)
    assert stuck.recv(99).startswith(b"HTTP/1.1 503") and "Traceback" not in server.text()
    stuck.close()


def test_a_dead_process_ends_the_server(pair) -> None:
    """Run after the other server has ended: this one did not notice."""
    server = pair[1]
    assert len(server.generate([30, 31], 3)["output_ids"]) == 3
    process(server, "sglang::detokenizer").kill()
    assert server.process.wait(DEATH_SECONDS) != 0
    assert not wait_for_none(server.process.pid, DEATH_SECONDS)
    line = next(line for line in server.text().splitlines() if "crashed with exit code" in line)
    assert "detokenizer" in line, line


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="SIGINT is ignored, as behind nohup or &")
def test_ctrl_c_ends_with_one_line(checkpoint, tmp_path: Path) -> None:
    """A terminal sends it to each process of the server."""
    with Server.launch(checkpoint, *FLAGS, log=tmp_path / "log") as server:
        server.wait_ready()
        for name in ("sglang::scheduler", "nvfp4-sgl::grammars", "sglang::detokenizer"):
            process(server, name).send_signal(signal.SIGINT)
        time.sleep(1.5)  # a process that ends is noticed each second
        os.kill(server.process.pid, signal.SIGINT)
        assert server.process.wait(30) == INTERRUPTED
        assert not wait_for_none(server.process.pid, DEATH_SECONDS)
    said = server.text()
    assert said.count("nvfp4-sgl: interrupted") == 1 and "Traceback" not in said


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="SIGINT is ignored, as behind nohup or &")
@pytest.mark.parametrize(
    ("number", "line"), [(signal.SIGINT, "nvfp4_sgl: weights"), (signal.SIGTERM, "Uvicorn running")]
)
def test_an_end_during_the_start(number: int, line: str, checkpoint, tmp_path: Path) -> None:
    """SGLang's warm-up would ask a server that has ended for two minutes; Ctrl-C is one line, as later."""
    with Server.launch(checkpoint, *FLAGS, log=tmp_path / "log") as server:
        deadline = time.monotonic() + 60
        while line not in server.text():
            assert time.monotonic() < deadline, server.excerpt()
            time.sleep(0.02)
        os.kill(server.process.pid, number)
        assert server.process.wait(DEATH_SECONDS) != 0
        assert not wait_for_none(server.process.pid, DEATH_SECONDS)
    said = server.text()
    assert said.count("nvfp4-sgl: interrupted") == (number == signal.SIGINT)
    assert "Traceback" not in said and "crashed" not in said
