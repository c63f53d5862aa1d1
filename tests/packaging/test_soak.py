"""What launch/soak asks for, which answers it takes for whole, and what it counts as memory."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.serving.grammar_process import CHILD_TITLE, TITLE

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
    assert own.whose == "the server" and own.look().on_gpu == 9
    monkeypatch.setattr(soak, "descendants", lambda root: [99])
    everybody = soak.Record("1")
    assert everybody.whose == "all processes" and everybody.look().on_gpu == 700
    assert soak.Record(None).look().on_gpu is None
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
    monkeypatch.setattr(soak, "memory", lambda: {"server": soak.MIB})
    monkeypatch.setattr(soak.device_memory, "used_by", lambda processes, gpu: None)
    monkeypatch.setattr(soak.device_memory, "used", lambda gpu: next(used))
    given = argparse.Namespace(minutes=0, concurrency=2, growth=200, gpu="0", gpu_growth=128)
    assert soak.run("http://127.0.0.1:1", given, 512) == (grown == 64)
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(last)
    assert any(f"GPU 0, memory of all processes: 700 MiB after 0 minutes, {700 + grown} MiB" in line for line in said)


HOLDER = """
import os, signal, sys
from setproctitle import setproctitle
setproctitle(sys.argv[1])
kept, children = [b"x" * (64 << 20)], []
print("ready", flush=True)
for line in sys.stdin:
    if line == "grow\\n":
        kept.append(b"y" * (32 << 20))
    else:
        ready, tell = os.pipe()
        children.append(os.fork())
        if not children[-1]:
            setproctitle(sys.argv[2])
            os.write(tell, b"!")
            signal.pause()
        os.read(ready, 1)
    print("done", flush=True)
for child in children:
    os.kill(child, signal.SIGKILL)
"""
"""A process with 64 MiB of its own, which grows by 32, or forks a child of another title."""


class Holders:
    """Starts :data:`HOLDER` processes, which with their children are all that the soak sees."""

    def __init__(self, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        from programs import soak

        self._stack, self._started = stack, list[int]()
        below = soak.descendants
        monkeypatch.setattr(
            soak, "descendants", lambda root: [one for pid in self._started for one in (pid, *below(pid))]
        )

    def start(self, title: str, child: str = "child") -> Callable[[str], None]:
        """Begin one; what is returned tells it what to do, and waits until that is done."""
        command = [sys.executable, "-c", HOLDER, title, child]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._stack.enter_context(process)  # it ends with its input
        commands, answers = process.stdin, process.stdout
        assert commands is not None and answers is not None and answers.readline() == "ready\n"
        self._started.append(process.pid)

        def tell(what: str) -> None:
            print(what, file=commands, flush=True)
            assert answers.readline() == "done\n"

        return tell


@pytest.fixture
def holders(on_path: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Holders]:
    with contextlib.ExitStack() as stack:
        yield Holders(stack, monkeypatch)


@pytest.mark.parametrize(
    ("child", "titles"),
    [(TITLE, {TITLE}), (CHILD_TITLE, {TITLE}), ("worker", {TITLE, "worker"})],
    ids=["same title", "grammar", "other title"],
)
def test_a_fork_changes_no_sum_of_the_host_s_memory(child: str, titles: set[str], holders: Holders) -> None:
    from programs.soak import MIB, memory

    tell = holders.start(TITLE, child)
    before = memory()
    tell("fork")
    after = memory()
    assert set(before) == {TITLE} and 64 * MIB < before[TITLE] < 96 * MIB
    assert set(after) == titles
    assert abs(sum(after.values()) - sum(before.values())) < 4 * MIB


def test_pages_of_files_are_not_the_server_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page cache that a process maps comes and goes with the machine's other work."""
    from programs import soak

    sizes = {1: {"Rss": 90, "Pss": 50, "Pss_Anon": 20, "Pss_File": 29, "Pss_Shmem": 1}, 2: {"Pss": 7}, 3: {"Rss": 0}}
    monkeypatch.setattr(soak, "descendants", lambda root: [*sizes])
    monkeypatch.setattr(soak, "rollup", sizes.get)
    monkeypatch.setattr(soak, "title", {1: "python\0-m\0server\0", 2: "old kernel", 3: "ended"}.get)
    assert soak.memory() == {"python -m server": 21, "old kernel": 7, "ended": 0}


def test_processes_that_change_meanwhile_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from programs import soak

    lists = iter([[1], [1, 2], [1, 2], [2, 1]])
    monkeypatch.setattr(soak, "descendants", lambda root: next(lists))
    monkeypatch.setattr(soak, "rollup", lambda process: {"Pss": 10})
    monkeypatch.setattr(soak, "title", str)
    assert soak.memory() == {"1": 10, "2": 10}


def test_a_process_that_grows_is_named(holders: Holders) -> None:
    """Once for all processes of its title; one that grew little, or shrank, is not."""
    from programs.soak import MIB, grown, memory

    first, second = holders.start("one"), holders.start("one")
    holders.start("other")
    before = memory()
    first("grow")
    second("grow")
    after = memory()
    assert set(before) == {"one", "other"} and 64 * MIB <= after["one"] - before["one"] < 68 * MIB
    (line,) = grown(before, after)
    assert line == f"one: {before['one'] / MIB:.0f} MiB before, {after['one'] / MIB:.0f} MiB after"
    before, after = {"a": 100 * MIB, "b": 90 * MIB}, {"a": 110 * MIB, "b": 10 * MIB, "c": 11 * MIB, "d" * 999: 99 * MIB}
    assert grown(before, after) == [f"{'d' * 100}: 0 MiB before, 99 MiB after", "c: 0 MiB before, 11 MiB after"]


@pytest.mark.parametrize(
    ("sizes", "said", "last"),
    [
        ((300, 311), ["grew by more than 10 MiB: grows: 300 MiB before, 311 MiB after"], "pass: 3 requests"),
        (
            (300, 501),
            ["grew by more than 10 MiB: grows: 300 MiB before, 501 MiB after"],
            "FAIL: host memory; 3 requests",
        ),
        ((300, 310), [], "pass: 3 requests"),
    ],
)
def test_growth_on_the_host(
    sizes: tuple[int, int], said: list[str], last: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from programs import soak

    looks = iter([{"grows": size * soak.MIB, "stays": 50 * soak.MIB} for size in sizes])
    monkeypatch.setattr(soak, "memory", lambda: next(looks))
    monkeypatch.setattr(soak, "Client", QuietClient)
    monkeypatch.setattr(soak, "soak", lambda *_: None)
    given = argparse.Namespace(minutes=0.01, concurrency=2, growth=200, gpu=None, gpu_growth=128)
    assert soak.run("http://127.0.0.1:1", given, 512) == last.startswith("pass")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    first, second = (size + 50 for size in sizes)
    assert f"host memory, PSS without files: {first} MiB after 0.0025 minutes, {second} MiB at the end" in lines
    assert [line for line in lines if line.startswith("grew")] == said and lines[-1].startswith(last)


def test_memory_that_nobody_knows_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """As where the kernel has no smaps_rollup."""
    from programs import soak

    monkeypatch.setattr(soak, "descendants", lambda root: [1])
    monkeypatch.setattr(soak, "rollup", lambda process: {"Rss": 1 << 30})
    monkeypatch.setattr(soak, "Client", QuietClient)
    monkeypatch.setattr(soak, "soak", lambda *_: None)
    given = argparse.Namespace(minutes=0.01, concurrency=2, growth=200, gpu=None, gpu_growth=128)
    assert not soak.run("http://127.0.0.1:1", given, 512)
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL: host memory; 3 requests")


def test_a_soak_without_requests_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from programs import soak

    monkeypatch.setattr(QuietClient, "answered", 0)
    monkeypatch.setattr(soak, "memory", lambda: {"server": soak.MIB})
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
