"""What launch/soak asks for, and which answers it takes for whole."""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "launch"), *sys.path])


def answer(tokens: int, reason: str) -> dict[str, Any]:
    return {"output_ids": [5] * tokens, "meta_info": {"finish_reason": {"type": reason}}}


def test_a_regular_expression_may_end_an_answer() -> None:
    from programs.soak import Request

    plain, regex = ({"sampling_params": {"max_new_tokens": 8, **more}} for more in ({}, {"regex": "[a-z]{2,9}"}))
    assert Request("answered", body=plain).is_whole(answer(8, "length"))
    assert not Request("answered", body=plain).is_whole(answer(7, "stop"))
    assert Request("answered", body=regex).is_whole(answer(7, "stop"))
    assert not Request("answered", body=regex).is_whole(answer(7, "length"))


SMI = """#!/bin/sh
[ "$4" = --format=csv,noheader,nounits ] || exit 4
case "$1 $2 $3" in
  "-i 1 --query-gpu=memory.used") echo 700 ;;
  "-i 0,1 --query-gpu=memory.used") echo 600; echo 700 ;;
  "-i 1 --query-compute-apps=pid,used_memory") echo "11, 40"; echo "12, 50"; echo "13, 9" ;;
  *) exit 3 ;;
esac
"""


def test_memory_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processes that nvidia-smi knows, or of all; nothing where there is none."""
    from programs import device_memory, soak

    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert (device_memory.used("1"), device_memory.used("0,1"), device_memory.used("7")) == (700, 1300, None)
    assert (device_memory.used_by([11, 12, 99], "1"), device_memory.used_by([99], "1")) == (90, None)
    monkeypatch.setattr(soak, "descendants", lambda root: [13])
    own = soak.Record("1")
    assert own.whose == "the server" and own.look()[2] == 9
    monkeypatch.setattr(soak, "descendants", lambda root: [99])
    everybody = soak.Record("1")
    assert everybody.whose == "all processes" and everybody.look()[2] == 700
    assert soak.Record(None).look()[2] is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert device_memory.used("1") is None and device_memory.used_by([11], "1") is None


def test_what_is_drawn() -> None:
    """All kinds, within bounds, and in words that tell what was asked."""
    from programs.soak import draw

    rng = random.Random(1)
    drawn = [draw(rng, 500, 1024) for _ in range(300)]
    assert {request.kind for request in drawn} == {"answered", "hung up", "aborted", "malformed"}
    for request in drawn:
        assert request.kind in str(request) and "\n" not in str(request)
        if request.kind == "malformed":
            assert request.data
            continue
        assert 1 <= len(request.body["input_ids"]) <= 1024 and max(request.body["input_ids"]) < 500
        assert request.body["stream"] == bool(request.seconds) and json.dumps(request.body)


class QuietClient:
    """A server that has answered so many requests, and of which nothing is asked."""

    answered = 3

    def __init__(self, *_: Any, **__: Any) -> None:
        self.ended, self.faults = collections.Counter(["answered"] * self.answered), list[str]()

    def probe(self) -> tuple[list[int], list[float]]:
        return [1, 2], [-0.5, -0.25]

    def used(self) -> dict[str, int]:
        return {"full": 0}

    def command(self, path: str, **fields: Any) -> None:
        assert path == "/flush_cache"


@pytest.mark.parametrize(("grown", "last"), [(64, "pass: 3 requests in 0 minutes"), (200, "FAIL: GPU memory; 3 ")])
def test_growth_on_the_gpu_fails(grown: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from programs import soak

    used = iter((700, 700 + grown))
    monkeypatch.setattr(soak, "Client", QuietClient)
    monkeypatch.setattr(soak, "soak", lambda *_: None)
    monkeypatch.setattr(soak.device_memory, "used_by", lambda processes, gpu: None)
    monkeypatch.setattr(soak.device_memory, "used", lambda gpu: next(used))
    given = argparse.Namespace(minutes=0, concurrency=2, growth=200, gpu="0", gpu_growth=128)
    assert soak.run("http://127.0.0.1:1", given, 512) == (grown == 64)
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(last)
    assert any(f"GPU 0, memory of all processes: 700 MiB after 0 minutes, {700 + grown} MiB" in line for line in said)


def test_a_soak_without_requests_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from programs import soak

    monkeypatch.setattr(QuietClient, "answered", 0)
    monkeypatch.setattr(soak, "Client", QuietClient)
    monkeypatch.setattr(soak, "soak", lambda *_: None)
    given = argparse.Namespace(minutes=0.01, concurrency=2, growth=200, gpu=None, gpu_growth=128)
    assert not soak.run("http://127.0.0.1:1", given, 512)
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL: requests ended as they must; 0 requests")


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--minutes", "nan"], ["--concurrency", "0"]], ids=" ".join)
def test_a_soak_of_nothing_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from programs import soak

    monkeypatch.setattr(sys, "argv", ["launch/soak", *words])
    with pytest.raises(SystemExit, match="2"):
        soak.main()
    assert f"{words[0]}: expected" in capsys.readouterr().err
