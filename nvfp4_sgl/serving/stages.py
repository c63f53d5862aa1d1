"""The stages of a server's start, a line each in the log, with the seconds that they took.

``config``, ``memory``, ``weights``, ``warm-up``, ``boundaries`` (what implements each) and ``scheduler`` (the modes),
in this order, each on the first rank alone; at last ``ready`` by the launcher, when ``/health`` answers 200.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.serving.http_port import POLL_SECONDS, comes_to_listen, ending, held_port, listens_on
from nvfp4_sgl.serving.requests import serves_our_model
from nvfp4_sgl.serving.sglang import http_server, parallel, settings

logger = logging.getLogger(__name__)


@contextmanager
def stage(name: str) -> Iterator[list[str]]:
    """Time what is inside, and log it if it does not raise; append further words of the line to the list."""
    words: list[str] = []
    before = time.monotonic()
    yield words
    say(name, *words, f"{time.monotonic() - before:.1f} s")


def begun(*words: str) -> None:
    """Log the last line of the scheduler's start: ``words``, and the seconds since its process began."""
    say("scheduler", *words, f"{process_seconds():.1f} s since the start of this process")


def warm_up_server(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Hook around SGLang's wait for its own first request: log ``ready`` when ``/health`` answers 200.

    SGLang would repeat that request for two minutes to a server that has ended, which waits for this to return.
    """
    if not serves_our_model():
        original(*args, **kwargs)
        return
    host, port = settings.resolved("host"), settings.resolved("port")
    if not comes_to_listen(port):
        say_who_listens(host, port)
        return
    ask_without_proxy(urlsplit(settings.url()).hostname or host)
    warm_up = threading.Thread(target=original, args=args, kwargs=kwargs, name="warm-up", daemon=True)
    warm_up.start()
    while warm_up.is_alive() and not ending.is_set():
        warm_up.join(POLL_SECONDS)
    if listens_on(port) and http_server.is_healthy():
        logger.info("nvfp4_sgl: ready: %.1f s since the start of the server", process_seconds())


def ask_without_proxy(host: str) -> None:
    """Have this process ask ``host``, which is itself, directly: a proxy that the environment names cannot."""
    direct = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "", host]
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, direct))


def say_who_listens(host: str, port: int) -> None:
    """Log why this process does not come to listen, unless it could: it was asked to end then."""
    try:
        with held_port(host, port):
            pass
    except ConfigError as error:
        logger.error("nvfp4_sgl: another process came to listen while weights were loaded: %s", error)


def process_seconds() -> float:
    """Seconds since this process began."""
    # Field 22, in clock ticks since the system's start; the second field, a name, ends with the last parenthesis.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def say(name: str, *words: str) -> None:
    """Log a line of the start."""
    if parallel.tp_rank() == 0:
        logger.info("nvfp4_sgl: %s: %s", name, ", ".join(words))
