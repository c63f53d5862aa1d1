"""Updates of a server's weights, and what runs meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.server import ADMIN_KEY, Server


def update(server: Server, path: Path | str, **fields: Any) -> tuple[int, str]:
    """Status and message that ``/update_weights_from_disk`` answers."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
    body = json.dumps({"model_path": str(path), **fields}).encode()
    request = urllib.request.Request(f"{server.url}/update_weights_from_disk", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return int(answer.status), json.load(answer)["message"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["message"]


@dataclass
class Background:
    """A call in a thread; its result is ``None`` if the server ended."""

    work: Callable[[], Any]
    result: Any = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the server has ended
            self.result = self.work()

    def wait(self) -> Any:
        self.thread.join(240)
        assert not self.thread.is_alive()
        return self.result


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
