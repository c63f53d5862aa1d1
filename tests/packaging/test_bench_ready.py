"""What launch/bench_full and its relatives make of the lines of a server's start, and of how long that took."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOG = """\
[2026-11-23 10:00:01] server_args={'model_path': 'nvfp4_sgl: weights: no stage'}
[2026-11-23 10:01:10 TP0] nvfp4_sgl: config: DIR verified, 134,762 tensors, 2.1 s
[2026-11-23 10:01:11 TP0] nvfp4_sgl: memory: 81.3 GB of weights and 4,900,000 tokens fit
[2026-11-23 10:01:12 TP0] compiling 33 GEMMs and 242 Triton kernels with 32 processes
[2026-11-23 10:01:17 TP0] nvfp4_sgl: weights: 31.8 of 161.7 GB, 6.35 GB/s, about 20 s left
[2026-11-23 10:02:04 TP0] nvfp4_sgl: weights: RANDOM (full NVFP4), 161.70 GB stored, 53.0 s
[2026-11-23 10:03:00 TP0] compiled in 108.1 s, with 900 s of processor time
[2026-11-23 10:03:02 TP0] nvfp4_sgl: warm-up: 12.5 s
[2026-11-23 10:03:10 TP0] nvfp4_sgl: scheduler: target sm_90a, w4a16, 151.0 s since the start of this process
[2026-11-23 10:03:14] nvfp4_sgl: ready: 163.5 s since the start of the server
[2026-11-23 10:09:00] nvfp4_sgl: process scheduler_1 (tensor-parallel rank 1) has ended with SIGKILL
"""
READY = datetime(2026, 11, 23, 10, 3, 14).timestamp() + 0.5


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "launch"), *sys.path])


def test_the_start(tmp_path: Path) -> None:
    from benchmarks import start

    (tmp_path / "log").write_text(LOG)
    found = start.described(tmp_path / "log", READY)
    stages = {"config": 2.1, "memory": None, "weights": 53.0, "warm-up": 12.5, "scheduler": 151.0, "ready": 163.5}
    assert found["stages"] == stages and tuple(stages) == start.STAGES
    assert found["ready after weights"] == 70.5
    compiling, compiled = found["compiled"]
    assert compiling.startswith("compiling 33 GEMMs") and compiled.startswith("compiled in 108.1 s")
    assert start.after_weights("", READY) is None


def test_the_stages_that_a_waiting_script_shows(tmp_path: Path) -> None:
    from programs import local_server

    (tmp_path / "log").write_text(LOG)
    shown = local_server.stages(tmp_path / "log")
    assert [line.partition(":")[0] for line in shown[:3]] == ["config", "memory", "weights"]
    assert shown[0] == "config: DIR verified, 134,762 tensors, 2.1 s" and shown[-2].startswith("ready: 163.5 s")


@pytest.mark.parametrize(
    ("cache", "seconds", "begin"),
    [
        ("empty", 90.0, "pass: empty cache: ready 90 s after weights (goal 90), 200 s in all"),
        ("empty", 91.0, "FAIL"),
        ("filled", 25.0, "pass"),
        ("filled", 40.0, "FAIL"),
        ("filled", None, "FAIL: filled cache: no line of its log names the weights"),
    ],
)
def test_the_goals(cache: str, seconds: float | None, begin: str) -> None:
    from benchmarks.ready import verdict

    good, words = verdict(cache, {"ready after": 200.3, "start": {"ready after weights": seconds}})
    assert words.startswith(begin) and good == begin.startswith("pass")


def test_a_cache_that_shall_be_empty_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And servers of both starts are told of the same folder."""
    from benchmarks import ready

    told: list[Any] = []

    def measure(start: Any, arguments: Any, left: list[str]) -> Any:
        told.append((start.engine, os.environ["XDG_CACHE_HOME"], os.environ["TRITON_CACHE_DIR"], start.concurrency))
        kernels.mkdir(exist_ok=True)
        (kernels / "compiled").touch()
        yield "ready after", 100.0
        yield "start", {"ready after weights": 24.0}

    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "old").touch()
    monkeypatch.setattr(ready, "measure", measure)
    for cache in ("empty", "filled"):
        monkeypatch.setattr(sys, "argv", ["ready", cache, "--output", str(tmp_path)])
        assert ready.main() == 0
        assert (tmp_path / f"{cache}.json").exists() and not (kernels / "old").exists()
    assert told == 2 * [("ours", str(kernels), str(kernels / "triton"), ())]


class ReachedError(Exception):
    """A server would be started now."""


@pytest.mark.parametrize("cache", ["empty", "filled"])
def test_every_option_that_a_start_reads_is_there(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way to the server, which gets its model, flags and folder of kernels."""
    from benchmarks import full_size, ready

    def server(model: Path, log: Path, port: int, flags: list[str], **more: Any) -> None:
        layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
        raise ReachedError(layers, port, flags[flags.index("--tp") + 1], flags[-1], os.environ["XDG_CACHE_HOME"])

    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "compiled").touch()
    monkeypatch.setattr(full_size, "server", server)
    monkeypatch.setattr(full_size, "started", lambda *given: contextlib.nullcontext())
    words = [cache, "--layers", "4", "--tp", "1", "--output", str(tmp_path), "--flags=--log-level debug"]
    monkeypatch.setattr(sys, "argv", ["ready", *words])
    with pytest.raises(ReachedError) as reached:
        ready.main()
    assert reached.value.args == (4, 0, "1", "debug", str(kernels))
    assert kernels.exists() == (cache == "filled")


def test_a_filled_cache_holds_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import ready

    monkeypatch.setattr(sys, "argv", ["ready", "filled", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"{tmp_path}/kernels: expected .* found none; run `empty` first"):
        ready.main()
