"""What launch/bench_full makes of a trace, of a server's log and of what a server says of itself."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.serving.drafts import checks, simulated
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny_config import TinyFormat
from tests.support.released import FLASH, config_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "launch"), *sys.path])


def event(name: str, begin: float, us: float, launch: int, category: str = "kernel") -> dict[str, Any]:
    return {"name": name, "ts": begin, "dur": us, "cat": category, "args": {"correlation": launch}}


def steps(count: int) -> list[dict[str, Any]]:
    """Steps of 100 us, in each of which b begins during a, and c follows after a pause."""
    found = []
    for step in range(count):
        at = 100.0 * step
        found += [event("a", at, 10, step), event("b", at + 2, 12, step), event("c", at + 20, 5, step)]
    return found


def test_a_server_that_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags fit each other and the configuration that is measured."""
    from benchmarks import flash, full_size_plan

    assert full_size_plan.drafting(Namespace(drafts=None)) == ([], {})
    flags, variables = full_size_plan.drafting(Namespace(drafts="mtp", steps=3, accepted=2.5))
    given = dict.fromkeys(("speculative_algorithm", *checks.NEED_ALGORITHM))
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        given[flag.removeprefix("--").replace("-", "_")] = value if value == "EAGLE" else int(value)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    simulated.simulated_length.cache_clear()
    checks.check_flags(given)
    assert simulated.simulated_length() == 2.5
    simulated.simulated_length.cache_clear()
    model = flash.write_flash(tmp_path, full_size_plan.ENGINES["ours"], 2)
    checks.check_draft(given | {"model_path": str(model)}, verify_dummy(model), "sm_90a", {})


def test_what_a_launch_adds_to_a_step(tmp_path: Path) -> None:
    from benchmarks import decode_trace

    prefill = [event("a", 900, 50, 77), event("on the host", 0, 1, 78, "cpu_op")]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*reversed(steps(5)), *prefill]}).encode()))
    kernels = decode_trace.read(path)
    assert [kernel.begin for kernel in kernels] == sorted(kernel.begin for kernel in kernels)
    found = decode_trace.graphs(kernels)
    # Neither the first step nor the last, which the profiler may have cut off, nor what is no whole graph.
    assert [step[0].begin for step in found] == [100, 200, 300]
    lines = {line.name: (line.count, line.us, line.adds, line.gap) for line in by_kernel(found)}
    assert lines == {"a": (1, 10, 10, 0), "b": (1, 12, 4, 0), "c": (1, 5, 11, 6)}
    text = decode_trace.text(path).splitlines()
    assert text[0] == "3 graphs of 3 launches, 25 us from begin to end, 100 us from one to the next"
    assert [line.split()[-1] for line in text[2:]] == ["c", "a", "b"]


def test_what_runs_between_verify_passes(tmp_path: Path) -> None:
    """A draft's graph of two launches and one launch alone, each behind a wait for the host."""
    from benchmarks import decode_trace

    drafts = [
        event(name, 100 * step + begin, 10, graph + step)
        for step in range(5)
        for name, begin, graph in (("d", 40, 100), ("d", 60, 100), ("e", 80, 200))
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*steps(5), *drafts]}))
    verified, _, rest = decode_trace.text(path, drafted=True).partition("\nbetween verify passes: ")
    assert verified == decode_trace.text(path) + "\n"
    head, _, *rows = rest.splitlines()
    assert head == "2 launches by the host, 75 us, 45 of them idle"
    found = {row.split(maxsplit=5)[5]: [*map(float, row.split()[1:5])] for row in rows}
    assert found["d"] == [2, 22.5, 12.5, 10] and found["e"] == [1, 20, 10, 10]
    assert found["(the next step's first launch)"][2] == 10


def by_kernel(steps: Any) -> Any:
    from benchmarks import decode_trace

    return decode_trace.lines(steps, decode_trace.by_kernel)


def test_gemms_beside_their_floors(tmp_path: Path) -> None:
    """The launches of a step are told apart by their order; those of no GEMM count as time before the next."""
    from benchmarks import decode_trace
    from benchmarks.decode_trace import COPY_BYTES_PER_US, GEMM, Gemms

    config = ModelConfig.from_dict(config_json(FLASH, num_hidden_layers=2, compress_ratios=[0, 4, 0]))
    gemms = Gemms.of(config, 2, 1)
    assert len(gemms.names) == 12 and gemms.names[1] == "wq_b" and gemms.names[7] == "wq_b + indexer.wq_b"
    events = []
    for step in range(4):
        at = 1000.0 * step
        for _ in gemms.names:
            events += [event(f"kernel_{GEMM}_0", at, 10, step), event("between", at + 9, 2, step)]
            at += 20
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    table = decode_trace.text(path, gemms).partition("  GEMM, floor at 4.25 TB/s\n")[2].splitlines()
    columns = {line.split(maxsplit=7)[7]: line.replace("%", "").split()[:7] for line in table}
    rows = {name: list(map(float, found)) for name, found in columns.items()}
    # A gap of 9 us but at the begin of a step.
    assert rows["wq_b"][1:5] == [1, 19, 9, 10] and rows["wo_a"][:2] == [38, 2]
    floor = 16384 * 1024 * 0.5625 / COPY_BYTES_PER_US
    assert rows["wq_b"][5:] == [round(floor, 2), round(100 * floor / 19)]
    seven = 7 * 2 * 1024 * 4096 * 0.5625 / COPY_BYTES_PER_US
    assert rows["experts.w1 + w3"][5] == round(seven, 2)
    visited = 1 + 256 * (1 - (1 - 6 / 256) ** 64)
    assert Gemms.of(config, 2, 64).weights["experts.w2"] == pytest.approx(visited * 1024 * 4096 * 0.5625)
    with pytest.raises(ValueError, match=f"launches 12 kernels named {GEMM}, expected 11"):
        decode_trace.text(path, Gemms(gemms.names[1:], gemms.weights))
    table = decode_trace.text(path, Gemms(gemms.names[:-1], gemms.weights, drafted=True)).splitlines()
    assert [line.split(maxsplit=5)[1:] for line in table if line.endswith("(the draft's)")] == [
        ["1", "19.00", "9.00", "10.00", "(the draft's)"]
    ]
    with pytest.raises(ValueError, match=f"launches 12 kernels named {GEMM}, expected 13"):
        decode_trace.text(path, Gemms([*gemms.names, "one more"], gemms.weights, drafted=True))


def test_steady_steps_are_those_of_full_batches(tmp_path: Path) -> None:
    from benchmarks.full_size import steady

    log = tmp_path / "log"
    line = "Decode batch, #running-req: {}, #full token: 1, gen throughput (token/s): {}, #queue-req: 0\n"
    log.write_text("".join(line.format(*pair) for pair in [(16, 1000), (64, 2000), (64, 3200), (64, 4000), (6, 9)]))
    assert steady(log, 64) == 20.0
    assert steady(log, 16) == 16.0
    assert steady(log, 1) is None


def test_the_plugin_must_run_in_our_server_alone() -> None:
    from benchmarks.full_size import plugin

    ours = {
        "internal_states": [{}, {"nvfp4_sgl": {"version": "1", "target": "sm_90a", "rank_sums": "pushed", "pools": {}}}]
    }
    assert plugin(ours, "ours") == {"version": "1", "target": "sm_90a", "rank_sums": "pushed"}
    assert plugin({"internal_states": [{}]}, "stock") == {}
    for info, engine in ((ours, "stock"), ({"internal_states": [{}]}, "ours")):
        with pytest.raises(RuntimeError, match="/server_info"):
            plugin(info, engine)


def test_the_configuration_is_that_of_the_release(tmp_path: Path) -> None:
    from benchmarks.flash import write_flash

    for format in (TinyFormat.NVFP4_FULL, TinyFormat.DEEPSEEK):
        config = json.loads((write_flash(tmp_path / format.value, format) / "config.json").read_text())
        assert {key: config[key] for key in FLASH} == FLASH
    verified = verify_dummy(write_flash(tmp_path / "short", TinyFormat.NVFP4_FULL, layers=8))
    assert verified.config.num_hidden_layers == 8


class Recorder(BaseHTTPRequestHandler):
    """A server that answers what SGLang's client asks for, and keeps what it was asked to generate."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer(b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/generate":
            return self._answer(b"{}")
        self.asked.append(json.loads(body))
        tokens = self.asked[-1]["sampling_params"]["max_new_tokens"]
        parts = [{"text": "x" * n, "meta_info": {"completion_tokens": n}} for n in range(1, tokens + 1)]
        self._answer(b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Recording", (Recorder,), {"asked": asked}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def test_prompts_have_the_tokens_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: tuple[str, list[dict[str, Any]]]
) -> None:
    """By SGLang's own client. As text they once came to thirty times as many."""
    from benchmarks.client import started
    from benchmarks.flash import write_flash
    from benchmarks.full_size import served

    monkeypatch.setenv("PYTHONPATH", str(ROOT / "launch"))
    url, asked = recorder
    model = write_flash(tmp_path / "ours" / "model", TinyFormat.NVFP4_FULL)
    with started(tmp_path / "client.log", 240) as client:
        found = served(client, url, model, count=2, prompt=100, tokens=5)
        assert len(asked) == 2 + 4  # it warms up
        greedy = [*asked]
        served(client, url, model, count=2, prompt=100, tokens=5, sampling="top-p")
    assert found["completed"] == 4
    for request in asked:
        assert len(request["input_ids"]) == 100
        assert max(request["input_ids"]) < FLASH["vocab_size"]
        chosen = {name: request["sampling_params"].get(name) for name in ("temperature", "top_p")}
        assert chosen == ({"temperature": 0, "top_p": None} if request in greedy else {"temperature": 1, "top_p": 0.95})


def test_servers_are_laid_out_for_the_requests_that_come() -> None:
    from benchmarks.full_size import SAMPLING
    from benchmarks.full_size_plan import common_flags

    def value(flags: list[str], name: str) -> str:
        return flags[flags.index(name) + 1]

    for at_once, most in (([], "64"), ([1, 16], "64"), ([1, 256, 64], "256")):
        flags = common_flags(at_once, radix_cache=False)
        assert value(flags, "--max-running-requests") == value(flags, "--cuda-graph-max-bs-decode") == most
        assert "--disable-radix-cache" in flags
    assert "--disable-radix-cache" not in common_flags([1], radix_cache=True)
    assert list(SAMPLING) == ["greedy", "top-p"]
