"""The processes of a server, by the names that SGLang gives them."""

from __future__ import annotations

import psutil

from tests.support.server import Server


def process(server: Server, name: str) -> psutil.Process:
    """The server's process that SGLang names so."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child for child in children if name in " ".join(child.cmdline()))
