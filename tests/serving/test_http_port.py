"""The server's port: refused where another process listens, held until the server listens, and then looked at."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.serving import guard, http_port, stages
from nvfp4_sgl.serving.endpoints import Access
from nvfp4_sgl.serving.http_port import comes_to_listen, held_port, listens_on
from nvfp4_sgl.serving.sglang import settings
from tests.support.server import free_port

HOST = "127.0.0.1"


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


LOCAL = ((socket.AF_INET, HOST), *([(socket.AF_INET6, "::1")] if has_ipv6() else []))
needs_ipv6 = pytest.mark.skipif(len(LOCAL) < 2, reason="no IPv6 here")


@pytest.fixture
def port() -> int:
    return free_port()


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


@needs_ipv6
def test_every_address_of_a_name_is_bound(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As uvicorn binds them: ``localhost`` is two addresses on many machines, and another may listen on either."""
    found: list[tuple[Any, ...]] = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (HOST, port))]
    found.append((socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    for family, *_, address in found:
        with held_port("localhost", port), socket.create_server(address[:2], family=family):
            pass
        with (
            socket.create_server(address[:2], family=family),
            pytest.raises(ConfigError, match="--host localhost"),
            held_port("localhost", port),
        ):
            pass


def test_a_kernel_without_ipv6(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``localhost`` may still have an address of it, in /etc/hosts."""
    addresses = ((socket.AF_INET6, ("::1", port, 0, 0)), (socket.AF_INET, (HOST, port)))
    found = [(family, socket.SOCK_STREAM, 6, "", address) for family, address in addresses]
    original = socket.socket

    def without_ipv6(family: int = socket.AF_INET, *arguments: Any, **named: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return original(family, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        patch.setattr(socket, "socket", without_ipv6)
        with held_port("localhost", port), original() as chosen, pytest.raises(OSError, match="in use"):
            chosen.bind((HOST, port))


@needs_ipv6
def test_all_addresses_of_one_version(port: int) -> None:
    """Who listens on all of IPv4 is not in the way of a server on all of IPv6."""
    with socket.create_server(("0.0.0.0", port)):
        with held_port("::", port):
            pass
        with pytest.raises(ConfigError), held_port("", port):
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
    assert not listens_on(port) and not listens_on(other.getsockname()[1])
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.bind((HOST, port))
        assert not listens_on(port)
    for family, host in LOCAL:
        with socket.create_server((host, port), family=family):
            assert listens_on(port) and not listens_on(port + 1)
    assert not listens_on(port)


def test_a_listener_that_comes_late(other: socket.socket) -> None:
    later = threading.Timer(0.3, other.listen)
    later.start()
    before = time.monotonic()
    assert comes_to_listen(other.getsockname()[1]) and time.monotonic() - before < 5
    later.join()


@pytest.fixture
def warm_up(
    port: int, ended: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[Callable[[], None]], list[str]]:
    """Run a warm-up of a server at ``port``, as hooked; what it logs."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(stages, "serves_our_model", lambda: True)
    monkeypatch.setattr(settings, "resolved", {"host": HOST, "port": port}.__getitem__)
    monkeypatch.setattr(settings, "url", lambda: f"http://{HOST}:{port}")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("nvfp4_sgl.serving.sglang.http_server.is_healthy", lambda: True)

    def run(original: Callable[[], None]) -> list[str]:
        caplog.clear()
        stages.warm_up_server(original)
        return caplog.messages

    return run


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """In place of the one that is set when uvicorn ends the application."""
    event = threading.Event()
    for module in (http_port, stages, guard):
        monkeypatch.setattr(module, "ending", event)
    return event


def test_no_warm_up_of_another_server(port: int, ended: threading.Event, warm_up: Any) -> None:
    """The warm-up asks whoever listens; it is left out where this process does not, and the log says why."""
    warmed: list[int] = []
    ended.set()
    assert not warm_up(lambda: warmed.append(1)), "an end that was asked for"
    script = f"import socket, sys; s = socket.create_server(('{HOST}', {port})); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdin is not None
        program.stdout.readline()
        (line,) = warm_up(lambda: warmed.append(1))
        program.stdin.close()
    assert "another process" in line and f"--host {HOST} --port {port}: cannot listen there" in line and not warmed
    ended.clear()
    with socket.create_server((HOST, port)):
        (line,) = warm_up(lambda: warmed.append(1))
    assert warmed == [1] and "ready" in line


def test_a_warm_up_ends_with_the_server(port: int, ended: threading.Event, warm_up: Any) -> None:
    """SGLang's goes on asking for two minutes, and the server waits for it."""
    go_on = threading.Event()
    with socket.create_server((HOST, port)) as listener:
        for later in (listener.close, ended.set):
            threading.Timer(0.2, later).start()
        before = time.monotonic()
        assert not warm_up(lambda: go_on.wait(20) and None)
    assert time.monotonic() - before < 10
    go_on.set()


def test_the_end_of_the_application_is_noted(ended: threading.Event) -> None:
    """Uvicorn asks the application for it when it cannot listen, and after it has been asked to end itself."""
    noted = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(2):
            await receive()
            noted.append(ended.is_set())

    events = iter(({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}))

    async def receive() -> Any:
        return next(events)

    asyncio.run(guard.Guard(application, Access(), lambda: False)({"type": "lifespan"}, receive, None))  # type: ignore[arg-type]
    assert noted == [False, True]
