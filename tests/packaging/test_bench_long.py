"""What launch/bench_long makes of a server's stream and of measurements that fail, with no server of SGLang's."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
IDS = list(range(7))
PAUSE = 0.02


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "launch"), *sys.path])


class Stream(BaseHTTPRequestHandler):
    """Answers with as many tokens as are asked for, but for prompts of 3 ids (refused), 4 (an error), 5 (one less)."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = len(body["input_ids"])
        self.send_response(400 if count == 3 else 200)
        self.end_headers()
        if count in (3, 4):
            self.wfile.write(b'data: {"error": {"message": "too long"}}\n\n')
            return
        for token in range(1, body["sampling_params"]["max_new_tokens"] + (count != 5)):
            meta = {"completion_tokens": token, "prompt_tokens": count, "finish_reason": {"type": "length"}}
            self.wfile.write(b"data: " + json.dumps({"text": "", "meta_info": meta}).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(PAUSE)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Stream)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


def test_times_of_a_stream(url: str) -> None:
    from benchmarks.long_context import times

    found = times(url, IDS, 5, 60)
    assert found["prompt tokens"] == len(IDS) and found["events"] == 5
    assert found["decode ms"] >= 1000 * PAUSE and found["first token s"] < 30
    assert found["prefill tokens/s"] > 0
    assert times(url, IDS, 1, 60)["decode ms"] is None


@pytest.mark.parametrize(("count", "message"), [(3, "status 400.*too long"), (4, "too long"), (5, "expected 4 tokens")])
def test_an_answer_that_is_none_is_an_error(url: str, count: int, message: str) -> None:
    from benchmarks.long_context import times

    with pytest.raises(RuntimeError, match=message):
        times(url, IDS[:count], 4, 60)


def test_a_stream_that_takes_too_long_is_given_up(url: str) -> None:
    from benchmarks.long_context import times

    with pytest.raises(TimeoutError):
        times(url, IDS, 1000, 4 * PAUSE)


def arguments(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(
        tp=1, layers=5, concurrency=[1, 16], prompt=8, tokens=4, lengths=[100, 200], chunk=4096, pool=1 << 20,
        seconds=9.0, output=folder, port=0, flags="--skip-server-warmup",
    )  # fmt: skip


def test_the_servers_differ_in_the_context_alone(tmp_path: Path) -> None:
    from benchmarks.long_context import CONTEXTS, flags

    long, short = (flags(name, arguments(tmp_path)) for name in ("long", "short"))
    differing = [place for place, pair in enumerate(zip(long, short, strict=True)) if len(set(pair)) > 1]
    (place,) = differing
    assert (long[place - 1], long[place]) == ("--context-length", str(CONTEXTS["long"]))
    assert "--context-length" not in long[place + 1 :]  # of several the last one counts
    assert long[long.index("--chunked-prefill-size") + 1] == "4096"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, Any]]:
    """Measurements of which those of 16 requests and of the longest prompt fail."""
    from benchmarks import long_context

    def served(client: object, url: str, model: Path, count: int, *sizes: int) -> dict[str, float]:
        if count == 16:
            raise RuntimeError("SGLang's client ended")
        return {"median_tpot_ms": 2.5}

    def long_prompt(url: str, model: Path, length: int, *rest: object) -> dict[str, float]:
        if length == 200:
            raise TimeoutError("timed out")
        return {"first token s": 1.25}

    monkeypatch.setattr(long_context, "server", lambda *given: nullcontext("http://nowhere"))
    monkeypatch.setattr(long_context, "started", lambda *given: nullcontext())
    monkeypatch.setattr(long_context, "write_flash", lambda path, *given: path)
    for name, found in (("described", {"version": "1"}), ("steady", 2.25)):
        monkeypatch.setattr(long_context, name, lambda *given, found=found: found)
    monkeypatch.setattr(long_context, "served", served)
    monkeypatch.setattr(long_context, "long_prompt", long_prompt)
    return lambda folder: {name: dict(long_context.measure(name, arguments(folder))) for name in long_context.CONTEXTS}


def test_what_fails_does_not_end_the_rest(tmp_path: Path, measured: Callable[[Path], dict[str, Any]]) -> None:
    from benchmarks.long_context import is_failed, markdown

    found = measured(tmp_path)
    assert [name for name, value in found["long"].items() if is_failed(value)] == ["at 16", "prompt of 200"]
    assert "prompt of 100" not in found["short"] and found["short"]["steady at 16"] == 2.25
    text = markdown(found)
    assert "| 1 | 2.25 | 2.5 | 2.25 | 2.5 |\n| 16 | 2.25 | – | 2.25 | – |" in text
    assert "| 100 | 1.25 | – | – | – | – |\n| 200 | – | – | – | – | – |" in text


def test_a_server_that_does_not_start_is_recorded(
    tmp_path: Path, measured: Callable[[Path], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import long_context

    @contextmanager
    def refuses(*given: object) -> Iterator[str]:
        raise OSError("no GPU")
        yield ""

    monkeypatch.setattr(long_context, "server", refuses)
    assert measured(tmp_path)["long"] == {"serving": {"failed": "OSError: no GPU"}}
    assert long_context.markdown({"long": {"serving": {"failed": "OSError: no GPU"}}})
