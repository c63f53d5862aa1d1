"""The examples that need a server: on the one with default flags; how they start one, on a stand-in for SGLang."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from programs import demo
from transformers import AutoTokenizer

from examples import function_calling, server
from tests.support.chat import printable_bias
from tests.support.server import ServerPool, session_processes

pytestmark = pytest.mark.timeout(600)

STAND_IN = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(sys.argv[1:]).encode())

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
"""A server that is ready at once and answers with its arguments."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Process ids of what the example starts."""
    ids = []
    popen = server.subprocess.Popen

    def start(*args: object, **kwargs: object) -> object:
        process = popen(*args, **kwargs)  # type: ignore[call-overload]
        ids.append(process.pid)
        return process

    monkeypatch.setattr(server.subprocess, "Popen", start)
    return ids


@pytest.mark.server
def test_the_answer_and_the_streamed_one_agree(serve: ServerPool, checkpoint: Path) -> None:
    bias = printable_bias(AutoTokenizer.from_pretrained(checkpoint))  # random weights would write broken UTF-8
    answer, streamed = server.ask(serve(checkpoint).url, extra_body={"logit_bias": bias})
    assert answer and answer == streamed


@pytest.mark.server
def test_the_tool_is_called_and_its_result_answered(serve: ServerPool) -> None:
    """On the demo's server and model, as the page says: nothing steers the model, which knows no tools."""
    _, call, result, answer = function_calling.converse(serve(demo.TRAINED, *demo.FLAGS).url)
    assert [tool["function"]["name"] for tool in call["tool_calls"]] == ["get_weather"]
    assert json.loads(result["content"])["degrees"] in (14, 22)
    assert answer["role"] == "assistant" and answer["content"]


def test_a_server_is_started_with_its_arguments_and_ended(
    started: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with server.running(tmp_path / "checkpoint", "--tp-size", "2") as url, urllib.request.urlopen(url) as answer:
        arguments = json.load(answer)
    assert arguments[:2] == ["--model-path", str(tmp_path / "checkpoint")] and arguments[-2:] == ["--tp-size", "2"]
    assert started and not session_processes(started[0])


def test_a_server_that_does_not_start_says_so_and_leaves_nothing(
    started: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang.py").write_text("")  # hides SGLang: the module is no package
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="ended with status 1 "), server.running(tmp_path / "absent"):
        pass
    assert started and not session_processes(started[0])
