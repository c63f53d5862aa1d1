"""Rounds of a real server, as ``launch/profile_host --drafts`` profiles them."""

from __future__ import annotations

import contextlib
import http.client
import sys
import time
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT
from tests.support.metrics import scrape, value
from tests.support.server import ServerPool

REQUESTS, TOKENS = 2, 7
WINDOWS = (5.0, 30.0)
"""Seconds to look; the second where others keep the machine busy."""
ROUNDS = 5
"""Least number of a window, whose ends both lie within a round."""
LAYERS = 1
"""So that a window has rounds enough."""


@pytest.mark.server
@pytest.mark.parametrize(("drafts", "rows"), [("mtp", 4), ("dspark", 6)])
def test_a_round_takes_as_long_as_a_streamed_token(
    drafts: str, rows: int, serve: ServerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round streams one token of a request, since acceptance is simulated so, and is counted by its rows."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "launch"), *sys.path])
    from programs import profile_host

    model = profile_host.served(tmp_path / "tiny", LAYERS, drafts, on_gpu=False)
    assert model.rows == rows
    server = serve(model.checkpoint, *model.flags, environment=model.environment)
    before = scrape(server)
    server.generate([9] * 40, TOKENS)
    gained = value(scrape(server), profile_host.DECODED) - value(before, profile_host.DECODED)
    assert gained == rows * (TOKENS - 1)  # the first token is the prompt's

    arrivals: list[float] = []
    window: list[float] = []
    read, metrics = http.client.HTTPResponse.readline, profile_host.metrics

    def readline(answer: http.client.HTTPResponse, limit: int = -1) -> bytes:
        line = read(answer, limit)
        if line.startswith(b"data: {"):
            arrivals.append(time.monotonic())
        return line

    def looked_at(url: str) -> str:
        window.append(time.monotonic())
        return metrics(url)

    monkeypatch.setattr(http.client.HTTPResponse, "readline", readline)
    monkeypatch.setattr(profile_host, "metrics", looked_at)
    for seconds in WINDOWS:
        window.clear()
        with contextlib.suppress(profile_host.ProfileError):  # of a window too short, too
            found = profile_host.measure(
                server.url, REQUESTS, seconds=seconds, tokens=2000, drafts=drafts, rows=model.rows
            )
            begin, end = window
            streamed = sum(begin <= at <= end for at in arrivals)
            if streamed > REQUESTS * ROUNDS:
                break
    else:
        pytest.fail(f"fewer than {ROUNDS} rounds in {WINDOWS[-1]} s")
    assert found.step == pytest.approx((end - begin) * 1e6 * REQUESTS / streamed, rel=0.3)
    assert found.unit == "round" and sum(found.stages.values()) == pytest.approx(found.step)
    assert found.stages["run_batch"] > 0.3 * found.step
