"""The server's port: refused where another process listens, held until the server listens, and then looked at."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.serving import http_port, stages
from nvfp4_sgl.serving.http_port import comes_to_listen, held_port
from nvfp4_sgl.serving.sglang import settings

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    """A free one."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def other() -> Iterator[socket.socket]:
    """A socket on which another program listens: it is none of this process's listeners while it has no backlog."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((HOST, 0))
        yield bound


def test_a_port_where_another_listens_is_refused(port: int) -> None:
    with (
        socket.create_server((HOST, port)),
        pytest.raises(ConfigError, match=f"--host {HOST} --port {port}: cannot listen there"),
        held_port(HOST, port),
    ):
        pass
    for host, number in (("no such host", port), (HOST, 70000)):
        with pytest.raises(ConfigError), held_port(host, number):
            pass


def test_a_held_port_is_nobody_elses_choice(port: int) -> None:
    """A program that looks for a free port sees it taken, as SGLang does; the server itself can listen there."""
    with held_port(HOST, port):
        with socket.socket() as chosen, pytest.raises(OSError, match="in use"):
            chosen.bind(("0.0.0.0", port))
        with socket.create_server((HOST, port)) as server, socket.create_connection((HOST, port), 5) as client:
            server.settimeout(5)
            accepted, address = server.accept()
            assert address == client.getsockname()
            accepted.close()
    with socket.socket() as chosen:
        chosen.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        chosen.bind((HOST, port))


def test_who_listens(port: int, other: socket.socket) -> None:
    """Only a TCP socket of this process counts that listens on that very port; a bound one does not."""
    assert not comes_to_listen(port, 0) and not comes_to_listen(other.getsockname()[1], 0)
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.bind((HOST, port))
        assert not comes_to_listen(port, 0)
    for family, host in ((socket.AF_INET, HOST), (socket.AF_INET6, "::1")):
        with socket.create_server((host, port), family=family):
            assert comes_to_listen(port, 0) and not comes_to_listen(port + 1, 0)
    assert not comes_to_listen(port, 0)


def test_a_listener_that_comes_late(other: socket.socket) -> None:
    later = threading.Timer(0.3, other.listen)
    later.start()
    before = time.monotonic()
    assert comes_to_listen(other.getsockname()[1], 10) and time.monotonic() - before < 5
    later.join()


def test_no_warm_up_of_another_server(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warm-up asks whoever listens; it is left out where this process does not, and the log says why."""
    monkeypatch.setattr(stages, "serves_our_model", lambda: True)
    monkeypatch.setattr(settings, "resolved", {"host": HOST, "port": port}.__getitem__)
    monkeypatch.setattr("nvfp4_sgl.serving.sglang.http_server.is_healthy", lambda: False)
    monkeypatch.setattr(stages, "comes_to_listen", lambda port: http_port.comes_to_listen(port, 0))
    warmed: list[str] = []
    stages.warm_up_server(warmed.append, "arguments")
    assert not warmed
    (line,) = caplog.messages
    assert line.startswith(f"nvfp4_sgl: --host {HOST} --port {port}: cannot listen there")
    with socket.create_server((HOST, port)):
        stages.warm_up_server(warmed.append, "arguments")
    assert warmed == ["arguments"] and caplog.record_tuples[0][1] == logging.ERROR
