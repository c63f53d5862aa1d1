"""The port of the HTTP server, which SGLang binds only when the weights are loaded.

Until then this process holds it. Where another process listens there all the same, uvicorn would wait for the warm-up,
which asks that other process for minutes, and would call the server ready if it answers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.serving.flags.values import check_value

POLL_SECONDS = 0.05

ending = threading.Event()
"""Set once uvicorn ends the application: it cannot listen, or was asked to stop."""


@contextlib.contextmanager
def held_port(host: str, port: int) -> Iterator[None]:
    """Bind a port without listening, before weights are loaded.

    Programs that take a free port of their own choice do not get this one then, SGLang's among them. The server can
    still bind it, as both allow others to reuse the address. A name such as ``localhost`` may stand for several
    addresses; all are bound, as uvicorn does.

    Raises:
        ConfigError: another process listens there, or the host has no such address.
    """
    check_value("port", port)
    with contextlib.ExitStack() as stack:
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in dict.fromkeys(found):
                try:
                    holder = stack.enter_context(socket.socket(family, kind, protocol))
                except OSError:  # this kernel has no IPv6, say; uvicorn leaves the address out, too
                    continue
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                holder.bind(address)
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port}: cannot listen there ({error}); choose another port"
            ) from error
        yield


def comes_to_listen(port: int) -> bool:
    """Wait until this process listens on ``port``, on whatever address; ``False`` once the server ends instead."""
    while not listens_on(port):
        if ending.wait(POLL_SECONDS):
            return False
    return True


def listens_on(port: int) -> bool:
    """Whether this process listens on ``port``, on whatever address."""
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed since it was listed
            if link.is_socket() and _is_listener(int(link.name), port):
                return True
    return False


def _is_listener(file: int, port: int) -> bool:
    with socket.socket(fileno=os.dup(file)) as opened:
        return (
            opened.family in (socket.AF_INET, socket.AF_INET6)
            and opened.type == socket.SOCK_STREAM
            and bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            and opened.getsockname()[1] == port
        )
