"""Runs of launch/bench_full: their order, what a cut-off one keeps, and what is refused before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its packages are imported by bare name
from benchmarks import figures, full_size, full_size_checks, process_memory, released, server_memory
from benchmarks.full_size_checks import CARDS, Machine, assumed, forecast_of, problems
from benchmarks.full_size_plan import OF_A_START, server_flags, starts
from benchmarks.released import MODELS, config_of
from programs.local_server import ServerError

from nvfp4_sgl import pushed_sums
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.memory.forecast import INBOXES
from nvfp4_sgl.prompt_sizes import SWITCH
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny import storage
from nvfp4_sgl.synthetic.tiny_config import TinyDraft, TinyFormat

H200, H100 = CARDS
SERVED = {"mean_tpot_ms": 5.0, "median_tpot_ms": 5.0, "median_ttft_ms": 99.0, "output_throughput": 200.0}
ENOUGH = Machine("NVIDIA H200", "sm_90a", 8, CARDS[H200], 1 << 60, 1 << 60)


def options(*words: str) -> Namespace:
    """What the command line says, and its output folder's default."""
    kept: list[Namespace] = []

    def keep(arguments: Namespace) -> int:
        kept.append(arguments)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench_full", "--dry-run", *words])
        patch.setattr(full_size, "planned", keep)
        assert full_size.main() == 0
    return kept[0]


@pytest.mark.parametrize("model", ["flash", "pro"])
def test_what_matters_most_comes_first(model: str) -> None:
    found = starts(options("--model", model, "--long", "--trace", "1", "64"))
    assert [(start.engine, start.concurrency, start.most) for start in found] == [
        ("ours", (1, 64), 64), ("stock", (1, 64), 64), ("ours", (16, 256), 256), ("stock", (16, 256), 256),
    ]  # fmt: skip
    measured = ["at 1", "steady at 1", "at 64", "steady at 64", "trace at 1", "trace at 64"]
    assert found[0].names == [*OF_A_START, *measured]
    later = ["at 16", "steady at 16", "at 256", "steady at 256", "prompt of 8192"]
    assert found[2].left(found[0].names) == later
    (_, traced) = starts(options("ours", "--trace", "1", "2", "256"))
    assert traced.trace == (2, 256), "a step of two requests is traced last, one of 256 where as many are measured"
    assert "start" not in found[1].names
    drafted = starts(options("ours", "--later", "--drafts", "mtp"))
    assert len(drafted) == 1 and "round at 64" in drafted[0].names


@pytest.mark.parametrize(("model", "captured", "rank"), [("flash", [40, 41, 42], 256), ("pro", [58, 59, 60], 512)])
def test_a_dspark_draft_is_the_release_s(model: str, captured: list[int], rank: int, tmp_path: Path) -> None:
    """And every matrix of it is NVFP4."""
    arguments = options("ours", "--model", model, "--tp", "8", "--later", "--drafts", "dspark")
    config = config_of(MODELS[model], TinyFormat.NVFP4_FULL, None, TinyDraft.DSPARK)
    draft = DsparkConfig.parse(config, ModelConfig.from_dict(config))
    assert (draft.block, [*draft.captured_layers], draft.markov_rank, draft.noise_token) == (5, captured, rank, 128_799)
    (tmp_path / "config.json").write_text(json.dumps(config))
    bundled = verify_dummy(tmp_path).draft()
    assert bundled is not None and {*bundled.storages.values()} == {Storage.NVFP4}
    flags, values = server_flags(arguments, starts(arguments)[0])
    assert flags[-2:] == ["--speculative-algorithm", "DSPARK"] and values["SGLANG_SIMULATE_ACC_LEN"] == "1.0"
    none = options("ours", "--model", model, "--tp", "8", "--later")
    free = CARDS["H200"]
    drafted, undrafted = (forecast_of(each, starts(each)[0], "sm_90a", free) for each in (arguments, none))
    assert sum(drafted.weights.values()) - sum(undrafted.weights.values()) > 1e9  # three stages over eight ranks


@pytest.mark.parametrize(("model", "kind"), [("flash", "dspark"), ("pro", "mtp")])
def test_a_draft_as_released(model: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every matrix of the decoder is NVFP4, every one of the draft stored as in DeepSeek's release."""
    words = ("ours", "--model", model, "--tp", "8", "--later", "--drafts", kind, "--draft-weights")
    arguments, in_nvfp4 = (options(*words, each) for each in ("released", "nvfp4"))

    def no_server(folder: Path, *given: Any) -> Path:
        raise CutOffError(released.write_released(folder, *given))

    monkeypatch.setattr(full_size, "write_released", no_server)
    arguments.output = tmp_path
    with pytest.raises(CutOffError):
        list(full_size.measure(starts(arguments)[0], arguments, ["ready after"]))
    verified = verify_dummy(tmp_path / "ours" / "model")
    draft = verified.draft()
    assert draft is not None and {*verified.summary.storages.values()} == {Storage.NVFP4}
    assert draft.storages == {
        spec.name: storage(spec, TinyFormat.DEEPSEEK) for spec in draft.specs.values() if spec.role.is_matrix
    }
    head = list(full_size_checks.plan_lines(arguments))[1]
    stages = draft.stages * verified.config.n_routed_experts
    assert f"--draft-weights released: ours has {draft.kind.words}, its matrices {3 * stages} in MXFP4," in head
    found = [forecast_of(each, starts(each)[0], "sm_90a", CARDS[H200]).weights for each in (arguments, in_nvfp4)]
    dense = [spec for spec in draft.specs.values() if draft.storages.get(spec.name) is Storage.FP8]
    more = sum(prod(spec.shape) for spec in dense) * (1 + 1 / 32 - 9 / 16)
    assert more / 8 < found[0]["draft"] - found[1]["draft"] < more
    assert {**found[0], "draft": 0} == {**found[1], "draft": 0}


def test_stock_s_kernels_are_kept_where_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = options("--stock-cache", str(tmp_path / "kernels"))
    ours, stock = (server_flags(arguments, start)[1] for start in starts(arguments)[:2])
    assert "SGLANG_CACHE_DIR" not in ours and stock["SGLANG_CACHE_DIR"] == str(tmp_path / "kernels")
    assert "SGLANG_CACHE_DIR" not in server_flags(options(), starts(options())[1])[1]
    with pytest.raises(SystemExit):
        options("ours", "--stock-cache", str(tmp_path))
    assert f"--stock-cache {tmp_path}: expected stock among the servers" in capsys.readouterr().err


def test_a_server_has_the_model_s_share_of_its_gpus() -> None:
    for model, fraction in (("flash", "0.8"), ("pro", "0.85")):
        arguments = options("--model", model, "--tp", "8", "--flags=--mem-fraction-static 0.7")
        flags, _ = server_flags(arguments, starts(arguments)[0])
        assert flags[flags.index("--mem-fraction-static") + 1] == fraction
        assert flags[-1] == "0.7" and flags[flags.index("--tp") + 1] == "8"


# --- what is kept -------------------------------------------------------------------------------------------------


class CutOffError(BaseException):
    """The end of a process that nothing in it catches."""


class Servers:
    """In place of servers: each finds what is left, up to the measurement that a test has ``end``, which raises."""

    def __init__(self) -> None:
        self.started: list[tuple[str, list[str]]] = []
        self.end: dict[str, BaseException] = {}

    def measure(self, start: Any, arguments: Namespace, left: Collection[str]) -> Iterator[tuple[str, Any]]:
        self.started.append((start.engine, [*left]))
        for name in left:
            if error := self.end.get(f"{start.engine}, {name}"):
                raise error
            values = {"ready after": 90.0, "start": {"ready after weights": 20.0, "stages": {"weights": 50.0}}}
            sizes = {"RSS of ranks": 9.5, "PSS of ranks": None}
            values |= {"host memory": sizes, "GPU memory": {"weights": 112.9, "weights, forecast": 112.83}}
            yield name, values.get(name, SERVED if name.startswith(("at ", "prompt of ")) else 4.5)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    import torch

    found = Servers()
    monkeypatch.setattr(full_size, "measure", found.measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(full_size.Machine, "here", lambda *_: ENOUGH)
    monkeypatch.setattr(full_size, "problems", lambda *_: [])
    return found


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """``launch/bench_full --model pro --tp 8`` with further words; its record is ``record.json``."""

    def called(*words: str) -> int:
        given = ["--model", "pro", "--tp", "8", "--output", str(tmp_path / "out"), "--record"]
        monkeypatch.setattr(sys, "argv", ["bench_full", *given, str(tmp_path / "record.json"), *words])
        return full_size.main()

    return called


def test_a_run_that_is_cut_off_goes_on(servers: Servers, call: Callable[..., int], tmp_path: Path) -> None:
    servers.end["stock, at 64"] = CutOffError()
    with pytest.raises(CutOffError):
        call()
    first = figures.read(tmp_path / "record.json")
    kept = {(one.metric, one.requests): (float(one.value), one.peer_value) for one in first}
    assert kept["time per output token, mean", 1] == (5.0, 5.0) and kept["time per output token, mean", 64] == (5, None)
    assert kept["host memory of all ranks while loading, RSS", None] == (9.5, pytest.approx(9.5))
    assert kept["GPU memory of a rank's weights, forecast", None][0] == 112.83
    assert kept["weights loaded in", None][0] == 50 and "DeepSeek-V4-Pro" in str(first[0].model)
    assert {one.case for one in first} == {"pro_tp8"}

    servers.end.clear()
    servers.started.clear()
    assert call("--long") == 0
    assert servers.started == [
        ("stock", ["at 64", "steady at 64"]),
        ("ours", ["at 16", "steady at 16", "at 256", "steady at 256", "prompt of 8192"]),
        ("stock", ["at 16", "steady at 16", "at 256", "steady at 256", "prompt of 8192"]),
    ]
    whole = figures.read(tmp_path / "record.json")
    assert {one.date for one in whole} == {one.date for one in first}
    assert all(one.peer_value is not None for one in whole if one.requests)
    assert {one.requests for one in whole if one.requests} == {1, 16, 64, 256}
    servers.started.clear()
    assert call("--long") == 0 and not servers.started


def test_a_server_that_fails_ends_no_other(servers: Servers, call: Callable[..., int], tmp_path: Path) -> None:
    servers.end["stock, ready after"] = ServerError("out of memory")
    assert call() == 1
    assert [engine for engine, _ in servers.started] == ["ours", "stock", "ours", "stock"]
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["stock"] == {"failed": "ServerError: out of memory"} and "at 256" in found["ours"]
    servers.end.clear()
    servers.started.clear()
    assert call() == 0
    assert [engine for engine, _ in servers.started] == ["stock", "stock"]
    assert "failed" not in json.loads((tmp_path / "out" / "report.json").read_text())["stock"]


def test_results_of_other_conditions_are_not_mixed(
    servers: Servers, call: Callable[..., int], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    call()
    for words, differs in (
        (("--prompt", "512"), "prompt: expected 512, found 1024"),
        (("--flags=--x",), "flags: expected '--x', found ''"),
    ):
        with pytest.raises(SystemExit):
            call(*words)
        assert f"holds results of another run: {differs}; name another --output, or pass --fresh" in (
            capsys.readouterr().err
        )
    monkeypatch.setenv(SWITCH, "0")
    with pytest.raises(SystemExit):
        call()
    assert f"holds results of another run: {SWITCH}: expected False, found None" in capsys.readouterr().err
    monkeypatch.delenv(SWITCH)
    monkeypatch.setenv(pushed_sums.SWITCH, "1")
    with pytest.raises(SystemExit):
        call()
    assert f"holds results of another run: {pushed_sums.SWITCH}: expected True, found None" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        call("--fresh")
    assert "expected a new .json file, found one of another run" in capsys.readouterr().err


def test_a_trace_that_is_not_understood_ends_no_other(servers: Servers, call: Callable[..., int]) -> None:
    """As every measurement that raises something: Pro's machine is measured with what is left."""
    servers.end["ours, trace at 1"] = ValueError("a step launches 12 kernels, expected 11")
    assert call("--trace", "1") == 1
    assert [engine for engine, _ in servers.started] == ["ours", "stock", "ours", "stock"]


CUT = {
    "cut": '{"ours": {"at 1": {"mean',
    "empty": "",
    "no object": "[1, 2]",
    "of no objects": '{"ours": 5}',
}


@pytest.mark.parametrize("contents", CUT)
@pytest.mark.parametrize("name", ["report.json", "run.json"])
def test_results_that_are_cut(
    servers: Servers, call: Callable[..., int], capsys: Any, tmp_path: Path, name: str, contents: str
) -> None:
    """They are neither taken for none nor mixed with new ones, and the error names the file."""
    call()
    (tmp_path / "out" / name).write_text(CUT[contents])
    (tmp_path / "record.json").unlink()
    servers.started.clear()
    with pytest.raises(SystemExit):
        call()
    said = capsys.readouterr().err
    assert f"{tmp_path / 'out' / name}: expected a JSON object of objects" in said and "--fresh" in said
    assert not servers.started
    assert call("--fresh") == 0 and len(servers.started) == 4


@pytest.mark.parametrize("results", [False, True], ids=["new", "gone on"])
def test_a_folder_that_cannot_be_written(
    servers: Servers,
    call: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    tmp_path: Path,
    results: bool,
) -> None:
    """That is known before a server starts."""
    if results:
        servers.end["ours, at 64"] = CutOffError()
        with pytest.raises(CutOffError):
            call()
        servers.started.clear()

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied", "report.json.unfinished")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(SystemExit):
        call()
    assert f"--output {tmp_path / 'out'}: expected to write there, found [Errno 13]" in capsys.readouterr().err
    assert not servers.started


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flash() -> Namespace:
    return options("--tp", "2", "--layers", "4")


LACKS: dict[str, tuple[dict[str, Any], str]] = {
    "GPUs": ({"gpus": 1}, "--tp 2: expected 2 GPUs, found 1"),
    "host memory": ({"host": 8 << 30}, "host memory: expected 12.88 GB for 2 ranks, found 8.59 GB"),
    "disk": ({"disk": 1 << 30}, "expected 4.29 GB free for logs, traces and kernels, found 1.07 GB"),
    "GPU memory": ({"free": 4 << 30}, "ours for 64 requests on NVIDIA H200: too little memory on a rank"),
}


@pytest.mark.parametrize("lacks", LACKS)
def test_a_machine_that_lacks_something_is_refused(lacks: str, flash: Namespace) -> None:
    changes, message = LACKS[lacks]
    assert not list(problems(flash, ENOUGH))
    found = list(problems(flash, replace(ENOUGH, **changes)))
    assert found and any(message in problem for problem in found), found


def test_a_pool_too_small_for_all_requests_is_refused() -> None:
    """A step would have fewer of them than its figure says."""
    small = options("--tp", "2", "--layers", "4", "--flags=--max-total-tokens 200000")
    (found,) = problems(small, ENOUGH)
    assert "256 requests of 1024 and 256 tokens need 327,680 of a pool, found room for 200,000" in found


def test_nothing_starts_on_a_machine_that_lacks_something(
    servers: Servers, call: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(full_size, "problems", problems)
    monkeypatch.setattr(full_size_checks, "_memory_problems", lambda *_: [])
    monkeypatch.setattr(full_size.Machine, "here", lambda *_: replace(ENOUGH, gpus=4))
    with pytest.raises(SystemExit):
        call()
    assert "nothing was started:\n  --tp 8: expected 8 GPUs, found 4" in capsys.readouterr().err
    assert not servers.started and not [*tmp_path.iterdir()]


def test_a_split_that_no_model_takes_is_refused(flash: Namespace) -> None:
    (found,) = problems(Namespace(**vars(flash) | {"tp": 3}), ENOUGH)
    assert found.startswith("--tp-size 3: o_groups is 8, expected a multiple of 3")


WRONG: dict[str, tuple[str, str]] = {
    "no ranks": ("--tp 0", "argument --tp: expected a whole number from 1 to 1024, found '0'"),
    "no requests": ("--concurrency 0", "argument --concurrency: expected a whole number from 1 to 65536, found '0'"),
    "no later requests": ("--later -2", "argument --later: expected a whole number from 1 to 65536, found '-2'"),
    "no traced requests": ("--trace 0", "argument --trace: expected a whole number from 1 to 65536, found '0'"),
    "no requests at all": ("--concurrency --later", "--concurrency and --later: expected requests of one of them"),
    "traced requests alone": ("--concurrency --later --trace 4", "--concurrency and --later: expected requests of one"),
    "a cache that is a file": (f"--stock-cache {__file__}", "test_bench_full_plan.py: expected a folder, found a file"),
    "flags that are none": ("--flags quick", "--flags: expected flags, which begin with --, found 'quick'"),
    "one token": ("--tokens 1", "argument --tokens: expected a whole number from 2 to 1048576, found '1'"),
    "more layers": ("--layers 62", "--layers 62: expected 1 to 61, those of DeepSeek-V4-Pro"),
    "a server twice": ("ours ours", "ours ours: expected each server once"),
    "steps alone": ("--steps 2", "--steps 2: expected --drafts mtp, too"),
    "steps of a block": ("--drafts dspark --steps 3", "--steps 3: expected --drafts mtp, too"),
    "more rows than a block": ("--drafts dspark --accepted 6.5", "--accepted 6.5: expected 1 to 6, a round's"),
    "weights of no draft": ("--draft-weights released", "--draft-weights released: expected --drafts, too; add it"),
    "weights of stock's": (
        "stock --drafts mtp --draft-weights released", "--draft-weights released: expected ours among the servers"
    ),
    "other weights": ("--drafts mtp --draft-weights fp8", "argument --draft-weights: invalid choice: 'fp8'"),
    "no sampler": ("--stock-sampler nope", "argument --stock-sampler: invalid choice: 'nope' (choose from 'flash"),
    "another device's sampler": ("--stock-sampler ascend", "argument --stock-sampler: invalid choice: 'ascend'"),
    "ours' sampler": ("--flags=--sampling-backend=flashinfer", "--flags: expected no --sampling-backend, for which"),
    "acceptance alone": ("--accepted 2", "--accepted 2: expected --drafts, too; add it"),
    "more steps": ("--drafts mtp --steps 10", "argument --steps: expected a whole number from 1 to 9, found '10'"),
    "no rows": ("--drafts mtp --accepted 0", "--accepted 0: expected 1 to 4, a round's verified tokens"),
    "more rows": ("--drafts mtp --steps 1 --accepted 2.5", "--accepted 2.5: expected 1 to 2, a round's"),
    "no number of rows": ("--drafts mtp --accepted nan", "--accepted nan: expected 1 to 4, a round's verified tokens"),
    "other ranks": ("--flags=--tp-size=4", "--flags: expected no --tp-size, for which there is --tp"),
    "other steps": ("--drafts mtp --flags=--speculative-num-steps=5", "--flags: expected no --speculative-num-steps"),
    "no fraction": ("--flags=--mem-fraction-static=x", "--mem-fraction-static: expected a number above 0 and below 1"),
    "a whole fraction": ("--flags=--mem-fraction-static=7", "a number above 0 and below 1, found '7'"),
    "no context": ("--flags=--context-length", "--context-length: expected a number of at least 1, found ''"),
    "fewer at once": ("--flags=--max-running-requests=4", "--max-running-requests 4: expected 64, the requests at"),
    "a short context": ("--flags=--context-length=1000", "--prompt 1024 and --tokens 256: expected 1000 tokens at"),
    "a long trace": ("--trace 1 --prompt 16000", "--trace, 400 tokens behind --prompt 16000: expected 16384 tokens"),
    "a long prompt": ("--long --flags=--context-length=8000", "--long: expected 8000 tokens at most"),
    "nowhere to record": ("--record /nowhere/at/all.json", "--record /nowhere/at/all.json: expected a .json file in"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_options_that_do_not_fit(wrong: str, capsys: Any) -> None:
    """Neither a plan nor a run: its figures would be of another server than their words say."""
    words, message = WRONG[wrong]
    with pytest.raises(SystemExit) as ended:
        options("--model", "pro", "--tp", "8", *words.split())
    said = capsys.readouterr()
    assert ended.value.code == 2 and message in said.err and not said.out


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (pushed_sums.SWITCH, "9", "expected 0 or 1, found '9'"),
        (pushed_sums.SWITCH, "1", "=1: expected --tp-size 2, 4 or 8, found 1"),
        (SWITCH, "yes", "expected 0 or 1, found 'yes'"),
    ],
)
def test_variables_that_ours_refuses(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They go to its server, which would say so minutes later; stock reads none of them."""
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        options("--tp", "1", "--layers", "8")
    said = capsys.readouterr().err
    assert name in said and words in said
    options("stock", "--tp", "1", "--layers", "8")


def test_a_dry_run_of_pro() -> None:
    """In whole: it fits eight H200s, and eight H100s by far not."""
    arguments = options("--model", "pro", "--tp", "8", "--long")
    assert not list(problems(arguments, assumed(arguments, H200)))
    lines = list(full_size_checks.plan_lines(arguments))
    assert sum(line.startswith("\nstart ") for line in lines) == 4
    assert any("--mem-fraction-static 0.85" in line and "--tp 8" in line for line in lines)
    short = next(line for line in lines if "does not fit: ours for 64 requests on H100 80GB:" in line)
    assert "need 114.03 GB" in short and "is 71.19 GB (42.84 GB too little)" in short
    assert not any("does not fit" in line and "H200" in line for line in lines)


@pytest.mark.parametrize(("words", "status"), [("--tp 2", 0), ("--tp 1", 1), ("--tp 3", 1)])
def test_the_status_says_whether_a_card_holds_it(words: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Flash fits two H200s and no two H100s; no model is split over three ranks."""
    assert full_size.planned(options(*words.split())) == status
    assert capsys.readouterr().out.count("does not fit") >= 1


def test_a_start_that_measures_nothing_is_not_planned() -> None:
    lines = list(full_size_checks.plan_lines(options("--layers", "4", "--concurrency", "64", "--later", "64")))
    assert [line for line in lines if line.startswith("\nstart")] == [
        f"\nstart {number}: {engine}, laid out for 64 requests" for number, engine in ((1, "ours"), (2, "stock"))
    ]


def test_a_plan_of_stock_alone_forecasts_what_it_can() -> None:
    lines = list(full_size_checks.plan_lines(options("stock", "--layers", "4")))
    place = next(index for index, line in enumerate(lines) if line.startswith("\nforecast"))
    assert "a rank of stock, its stored weights alone, 2 x H200" in lines[place] and lines[place + 1] == "  fits"


@pytest.mark.parametrize(
    ("words", "switch", "captured"),
    [
        ((), "", 2048),
        ((), "0", 0),
        (("--flags=--chunked-prefill-size 1500",), "", 1024),
        (("--flags=--disable-prefill-cuda-graph",), "", 0),
        (("--flags=--disable-cuda-graph",), "", 0),
    ],
)
def test_the_forecast_counts_graphs_of_prompts(
    words: tuple[str, ...], switch: str, captured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the server will have, which has this process's environment."""
    monkeypatch.setenv(SWITCH, switch)
    arguments = options("ours", "--layers", "4", "--later", *words)
    found = forecast_of(arguments, starts(arguments)[0], "sm_90a", CARDS[H200])
    assert found.setting.prompt_tokens == captured
    assert ("prompt graphs" in found.estimated) == (captured > 0)


@pytest.mark.parametrize(
    ("words", "switch", "pushes"), [(("--tp", "2"), "", 1), (("--tp", "2"), "0", 0), (("--tp", "4"), "", 0)]
)
def test_the_forecast_counts_inboxes(
    words: tuple[str, ...], switch: str, pushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bf16 row for two sums, two ranks and 32 tokens."""
    monkeypatch.setenv(pushed_sums.SWITCH, switch)
    arguments = options("ours", "--layers", "4", *words)
    found = forecast_of(arguments, starts(arguments)[0], "sm_90a", CARDS[H200])
    assert found.server.get(INBOXES, 0) == pushes * 2 * 2 * 32 * 4096 * 2


def test_a_dry_run_needs_no_gpu(tmp_path: Path) -> None:
    words = ["--dry-run", "--layers", "2", "--tp", "2", "--output", str(tmp_path / "out")]
    command = [str(ROOT / "launch" / "bench_full"), *words]
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "start 4: stock" in done.stdout, done.stderr
    assert not [*tmp_path.iterdir()]


# --- memory of a server -------------------------------------------------------------------------------------------


def test_memory_of_processes_that_share_pages() -> None:
    """Two processes of a session hold a file's pages together: RSS counts them twice, PSS once."""
    code = """
import os, sys, time, mmap
size = 64 << 20
held = mmap.mmap(-1, size)
held.write(b"x" * size)
os.fork()
sum(held[::4096])
print("ready", flush=True)
time.sleep(60)
"""
    titled = [sys.executable, "-c", code, process_memory.RANK]
    with subprocess.Popen(titled, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None and [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        with process_memory.HostMemory() as host:
            host.watch(process.pid)
            found = host.found()
        for pid in process_memory.session(process.pid):
            subprocess.run(["kill", "-9", str(pid)], check=True)
    assert found["ranks"] == 2 and found["RSS of ranks"] == found["RSS of all"]
    assert found["RSS of ranks"] is not None and 0.134 < found["RSS of ranks"] < 0.3
    if found["PSS of ranks"] is not None:
        assert 0.06 < found["PSS of ranks"] < found["RSS of ranks"] - 0.06


def test_gpu_memory_beside_the_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_memory, "each", lambda: [120_000, 121_000])
    log = tmp_path / "log"
    log.write_text(
        "TP0] Load weight end. elapsed=9 s, mem usage=105.00 GB.\nTP1] Load weight end. mem usage=105.10 GB."
    )
    memory = {"weights": {"experts": 109e9, "others": 3e9}, "server": {"a": 1e9}, "token": {"row": 10_000.0},
              "estimated": {"graphs": 5e9}, "tokens": 900_000}  # fmt: skip
    info = {"max_total_num_tokens": 800_000, "internal_states": [{"nvfp4_sgl": {"memory": memory}}]}
    found = server_memory.gpu_memory(info, log)
    assert found == {
        "weights": 112.85, "weights, forecast": 112.0, "in use": 126.88, "in use, forecast": 126.0,
        "tokens": 800_000, "tokens, forecast": 900_000,
    }  # fmt: skip
    assert "weights, forecast" not in server_memory.gpu_memory({"internal_states": [{}]}, log)
