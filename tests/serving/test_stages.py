"""The lines of a server's start: timed, on the first rank alone, and ``ready`` when the server is."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

import pytest

from nvfp4_sgl.serving import stages


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("nvfp4_sgl.serving.sglang.parallel.tp_rank", lambda: 0)


def test_a_stage_says_its_words_and_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with stages.stage("weights") as words:
        words.append("1.00 GB")
    assert caplog.messages == ["nvfp4_sgl: weights: 1.00 GB, 0.0 s"]


def test_a_stage_that_fails_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), stages.stage("weights"):
        raise ZeroDivisionError
    assert not caplog.messages


def test_other_ranks_say_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("nvfp4_sgl.serving.sglang.parallel.tp_rank", lambda: 1)
    stages.say("weights", "words")
    assert not caplog.messages


def test_seconds_of_this_process() -> None:
    """Those that a process finds of itself."""
    script = "import time; time.sleep(0.5); from nvfp4_sgl.serving import stages; print(stages.process_seconds())"
    before = time.monotonic()
    found = float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert 0.5 <= found <= time.monotonic() - before + 0.02


@pytest.mark.parametrize(("ours", "healthy", "lines"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_ready_is_said_once_health_is(
    ours: bool, healthy: bool, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stages, "serves_our_model", lambda: ours)
    monkeypatch.setattr("nvfp4_sgl.serving.sglang.http_server.is_healthy", lambda: healthy)
    for name in ("comes_to_listen", "listens_on"):
        monkeypatch.setattr(stages, name, lambda port: ours)
    monkeypatch.setattr("nvfp4_sgl.serving.sglang.settings.resolved", lambda name: None)
    monkeypatch.setattr("nvfp4_sgl.serving.sglang.settings.url", lambda: "http://127.0.0.1:1")
    monkeypatch.setattr(os, "environ", {})
    stages.warm_up_server(lambda arguments, callback=None: logging.getLogger("sglang").info("fired up"), "arguments")
    assert caplog.messages[0] == "fired up" and len(caplog.messages) == 1 + lines
    assert all(line.startswith("nvfp4_sgl: ready: ") for line in caplog.messages[1:])


@pytest.mark.parametrize(
    ("given", "direct"),
    [({}, "::1"), ({"no_proxy": "a,b"}, "a,b,::1"), ({"NO_PROXY": "c", "no_proxy": ""}, "c,::1")],
)
def test_a_server_asks_itself_without_a_proxy(
    given: dict[str, str], direct: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, given.get(name, ""))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    stages.ask_without_proxy("::1")
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == direct
    client = pytest.importorskip("requests").utils  # with which SGLang asks
    assert client.should_bypass_proxies("http://[::1]:30000/model_info", None)
    assert not client.should_bypass_proxies("http://elsewhere/", None)
