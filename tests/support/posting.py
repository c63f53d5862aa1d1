"""Posts bodies to a server, several at once, and says how each was answered."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.support.server import ADMIN_KEY, Server

AT_ONCE = 8
SECONDS = 120


@dataclass(frozen=True)
class Answer:
    """How a request was answered.

    Attributes:
        status: 0 if the connection was dropped.
    """

    path: str
    body: bytes
    status: int
    text: str

    def __str__(self) -> str:
        return f"{self.path} {self.body[:300]!r}: {self.status} {self.text[:300]}"

    @property
    def is_refusal(self) -> bool:
        """Whether it is status 4xx with JSON."""
        try:
            return 400 <= self.status < 500 and isinstance(json.loads(self.text), dict)
        except ValueError:
            return False


def post(server: Server, path: str, body: Any, *, admin: bool = False) -> Answer:
    """The answer to a body, which is encoded as JSON unless it is ``bytes``."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {ADMIN_KEY}"} if admin else {})}
    request = urllib.request.Request(server.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return Answer(path, data, int(answer.status), answer.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(path, data, error.code, error.read().decode())
    except OSError as error:
        return Answer(path, data, 0, f"{type(error).__name__}: {error}")


def post_all(server: Server, requests: Iterable[tuple[str, Any]], *, admin: bool = False) -> Iterator[Answer]:
    """The answers to bodies, each with its path, in their order."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(lambda request: post(server, *request, admin=admin), requests)
