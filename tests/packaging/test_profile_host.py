"""The parts of launch/profile_host that need no server: what it makes of metrics, and how a server times its graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING
from nvfp4_sgl.cache.plan import Batch, plan_batch
from tests.packaging.checkout import ROOT

LABELS = 'engine_type="unified",model_name="m",tp_rank="0"'


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "launch"), *sys.path])


def text(decoded: float, **stages: float) -> str:
    """Metrics of a server: half of each stage's seconds overlap with the GPU."""
    lines = ["# HELP nvfp4_sgl_decode_queries_total Tokens.", f"nvfp4_sgl_decode_queries_total{{{LABELS}}} {decoded}"]
    lines += [
        f'sglang:scheduler_stage_seconds_total{{category="{name}",{LABELS},forward_overlap="{overlap}"}} {seconds / 2}'
        for name, seconds in stages.items()
        for overlap in ("full", "none")
    ]
    return "\n".join([*lines, 'sglang:scheduler_stage_seconds_total_created{category="idle"} 1.7e9'])


def test_a_step_is_divided_as_the_stages_are() -> None:
    """400 steps of four requests in two seconds; the counters lag, so that only their shares count."""
    from programs.profile_host import profiled

    before = text(100, recv_requests=1.0, run_batch=10.0, idle=7.0)
    after = text(1700, recv_requests=1.25, run_batch=10.5, idle=7.0, process_batch_result=0.25)
    found = profiled(before, after, 2.0, 4, own={"decode step": (3000.0, 3500.0)})
    assert found.step == 5000.0
    assert {name: us for name, us in found.stages.items() if us} == {
        "recv_requests": 1250.0,
        "run_batch": 2500.0,
        "process_batch_result": 1250.0,
    }
    said = [" ".join(line.split()) for line in found.lines()]
    assert said == [
        "4 requests: 5,000 us a step",
        "receive 1,250 us 25.0%",
        "prepare, replay, sample 2,500 us 50.0%",
        "process results 1,250 us 25.0%",
        "own time of its graph 3,500 us, of the slowest of 2 ranks",
        "step minus own time 1,500 us",
    ]
    assert "not captured in CUDA graphs here" in [*profiled(before, after, 2.0, 4).lines()][-1]


def test_a_round_counts_all_its_rows() -> None:
    """100 rounds of four requests in two seconds, of six rows each; own times are those of the slowest rank."""
    from programs.profile_host import GRAPHS, profiled

    own = dict(zip(GRAPHS["mtp"].values(), [(9000.0, 8000.0), (1000.0, 2000.0), (500.0, 700.0)], strict=True))
    found = profiled(text(100, idle=1.0), text(2500, idle=3.0), 2.0, 4, own=own, rows=6)
    assert [" ".join(line.split()) for line in found.lines()] == [
        "4 requests: 20,000 us a round",
        "idle 20,000 us 100.0%",
        "own time of its graphs 10,700 us, of the slowest of 2 ranks",
        "verify pass 8,000 us",
        "draft: first guess 2,000 us",
        "draft: other guesses 700 us",
        "round minus own time 9,300 us",
    ]
    alone = profiled(text(100, idle=1.0), text(2500, idle=3.0), 2.0, 4, rows=6)
    assert [*alone.lines()][-1] == "  own time: none, as decode rounds are not captured in CUDA graphs here"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (text(5, idle=1), text(6, idle=2), "expected decode steps of 2 requests, found 1 tokens"),
        (text(5, idle=1), text(50, idle=1), "and 0.00 s of stages; ask for more --seconds"),
        (text(5), text(50), "not among the server's metrics; start it with --enable-metrics"),
        (text(5, idle=1), text(50, idle=1, think=2), "expected stages recv_requests, .*, other, found think"),
    ],
    ids=["no steps", "no stages yet", "no metrics", "another stage"],
)
def test_there_are_no_figures_of_nothing(before: str, after: str, said: str) -> None:
    from programs.profile_host import ProfileError, profiled

    with pytest.raises(ProfileError, match=said):
        profiled(before, after, 2.0, 2)


def test_less_than_a_round_gives_no_figures() -> None:
    from programs.profile_host import ProfileError, profiled

    with pytest.raises(ProfileError, match="expected decode rounds of 2 requests, found 7 tokens"):
        profiled(text(5, idle=1), text(12, idle=2), 2.0, 2, rows=4)


@pytest.mark.parametrize(("drafts", "graphs"), [(None, 1), ("mtp", 3), ("dspark", 2)])
def test_each_graph_of_a_round_has_a_time(
    drafts: str | None, graphs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from programs import profile_host

    for us, name in enumerate(profile_host.GRAPHS[drafts], 1):
        (tmp_path / name).mkdir()
        (tmp_path / name / "2-0").write_text(f"{us}\n")
    texts = iter([text(5, idle=1), text(500, idle=2)])
    monkeypatch.setattr(profile_host, "Endless", lambda *given: MagicMock())
    monkeypatch.setattr(profile_host, "metrics", lambda url: next(texts))
    found = profile_host.measure("url", 2, seconds=0.01, tokens=9, replays=tmp_path, drafts=drafts, rows=4)
    assert [*found.own.values()] == [[float(us)] for us in range(1, graphs + 1)]


@pytest.mark.parametrize(("drafts", "rows"), [("mtp", 4), ("dspark", 6), ("longest", 10)])
def test_a_second_replay_finds_the_rows_that_the_first_has_read(drafts: str, rows: int) -> None:
    """A verify pass reads no row of a compressor's ring that it writes; one of ten rows a request would."""
    ratios = frozenset(DRAFTED_STATE_RING)
    spoilt = False
    for start in range(120, 280):
        ends = torch.tensor([start + rows])
        slots = torch.arange(512)
        batch = Batch(ends - rows, ends, torch.tensor([0]), slots[None], slots)
        plan = plan_batch(batch, window=128, ratios=ratios, rings=DRAFTED_STATE_RING)
        for one in plan.compress.values():
            spoilt |= bool(torch.isin(one.history_rows, one.write_rows).any())
    assert spoilt == (drafts == "longest")


def test_the_graph_of_a_step_is_the_least_that_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from programs import profile_host

    for name, us in (("1-0", 9), ("1-1", 9), ("8-0", 30), ("8-1", 31), ("16-0", 50), ("16-1", 51), ("4-0.part", 1)):
        (tmp_path / name).write_text(f"{us}\n")
    assert profile_host.replay_times(tmp_path, 3, ranks=2) == [30.0, 31.0]
    monkeypatch.setattr(profile_host, "REPLAY_SECONDS", 0.1)
    for folder, requests in ((tmp_path, 17), (tmp_path / "draft", 1)):
        said = f"expected 2 ranks to time the {folder.name} graph of {requests} requests"
        with pytest.raises(profile_host.ProfileError, match=said):
            profile_host.replay_times(folder, requests, ranks=2)


def test_a_server_that_dies_is_not_waited_for(tmp_path: Path):
    """Its log, which is deleted with its folder, is in the error."""
    from programs import profile_host

    (tmp_path / "log").write_text("first\nthe reason\n")

    def running() -> None:
        raise profile_host.ProfileError("a request ended")

    with (
        pytest.raises(profile_host.ProfileError, match=r"a request ended\n.*log\nfirst\nthe reason"),
        profile_host.server_log_on_error(tmp_path / "log"),
    ):
        profile_host.replay_times(tmp_path / "target", 1, ranks=1, running=running)


class Event:
    """Stands for CUDA's: times are numbers of replays so far, in milliseconds."""

    replays = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.replays

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: Event) -> float:
        assert end.waited
        return (end.at - self.at) * 0.25


@pytest.mark.parametrize(
    ("hook", "drafts", "graph"),
    [
        ("execute", False, "target"),
        ("execute", True, "draft"),
        ("replay_draft", True, "draft"),
        ("replay_extend", True, "draft-extend"),
    ],
)
def test_each_graph_is_timed_once_behind_a_step(
    hook: str, drafts: bool, graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from programs import timed_server

    def replay(key: str, batch: object) -> str:
        assert key == "graph" and batch == "batch"
        Event.replays += 1
        return "output"

    monkeypatch.setenv(timed_server.FOLDER, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timed_server, "_steps", Counter())
    monkeypatch.setattr(Event, "replays", 0)
    monkeypatch.setattr("nvfp4_sgl.serving.sglang.parallel.tp_rank", lambda: 1)
    runner = SimpleNamespace(
        bs=8,
        model_runner=SimpleNamespace(is_draft_worker=drafts),
        backend=SimpleNamespace(replay=replay),
        _replay_graph_key="graph",
    )
    function, step = getattr(timed_server, hook), partial(replay, "graph", "batch")
    if hook == "execute":
        run = partial(function, lambda runner, batch, more: step(), runner, "batch", 3)
    else:
        run = partial(function, lambda runner, key, batch: replay(key, batch), runner, "graph", "batch")
    file = tmp_path / graph / "8-1"
    for count in range(1, 2 * timed_server.STEPS_BEFORE):
        assert run() == "output"
        assert file.exists() == (count >= timed_server.STEPS_BEFORE)
    # Those of the steps, one before the first event, and nothing else beside those that are timed.
    assert Event.replays == count + timed_server.REPLAYS + 1
    assert float(file.read_text()) == 250.0 and [*tmp_path.rglob("*-*[0-9]")] == [file]


REGISTRY = """
class HookType:
    AROUND = "around"
class HookRegistry:
    hooks = []
    register = classmethod(lambda cls, *hook: cls.hooks.append(hook))
"""
SERVER = """
import multiprocessing, sys
from sglang.worker import show
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    show("server", sys.argv[1:])
    worker = multiprocessing.Process(target=show, args=("scheduler", []))
    worker.start()
    worker.join()
"""
WORKER = """
from sglang.srt.plugins.hook_registry import HookRegistry
def show(who, arguments):
    print(who, arguments, [(path, hook.__name__, kind) for path, hook, kind in HookRegistry.hooks], flush=True)
"""


def test_scheduler_processes_have_the_hook(tmp_path: Path) -> None:
    """SGLang spawns them; here a stand-in does."""
    plugins = tmp_path / "sglang" / "srt" / "plugins"
    plugins.mkdir(parents=True)
    (plugins / "hook_registry.py").write_text(REGISTRY)
    (tmp_path / "sglang" / "launch_server.py").write_text(SERVER)
    (tmp_path / "sglang" / "worker.py").write_text(WORKER)
    for folder in (tmp_path / "sglang", plugins.parent, plugins):
        (folder / "__init__.py").touch()
    program = ROOT / "launch" / "programs" / "timed_server.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path / "times", "--port", "1"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    from programs import timed_server

    hooks = [(path, hook.__name__, "around") for path, hook in timed_server.HOOKS.items()]
    assert len(hooks) == 3
    assert done.stdout.splitlines() == [f"server ['--port', '1'] {hooks}", f"scheduler [] {hooks}"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--tp", "0"], "--tp: expected 1 or more, found 0"),
        (["--requests", "4", "-1"], "expected"),
        (["--seconds", "0"], "--seconds: expected a number above 0, found 0.0"),
        (["--seconds", "nan"], "--seconds: expected a number above 0, found nan"),
        (["--seconds", "inf"], "--seconds: expected a number above 0, found inf"),
        (["--drafts", "none"], "--drafts: invalid choice: 'none' (choose from 'mtp', 'dspark')"),
        (["--output", "/nowhere/at/all"], "--output: expected a file in a folder that exists, found /nowhere/at/all"),
        (["--output", "/"], "--output: expected a file in a folder that exists, found /"),
        (["--py-spy", "x"], "--py-spy: needs the program py-spy on PATH, found none; run: pip install py-spy"),
    ],
)
def test_wrong_options_are_told_before_a_server_starts(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from programs import profile_host

    def run(*given: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(profile_host, "run", run)
    monkeypatch.setattr(profile_host.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["profile_host", *given])
    with pytest.raises(SystemExit):
        profile_host.main()
    assert said in capsys.readouterr().err
