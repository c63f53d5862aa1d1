"""The benchmark behind launch/bench_long: some layers of Flash with dummy weights, with room for a million tokens.

Two servers differ in ``--context-length`` alone. Both are measured at decode steps of short requests, since CUDA graphs
and their workspaces are laid out for the longest request. The long one is also measured at prompts of up to a million
tokens: time to the first token, the decode step behind them, and the GPU's memory. Flags, uniform routing and client
are those of launch/bench_full. A measurement that fails is recorded as failed, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from programs.device_memory import SAMPLE_SECONDS, DeviceMemory
from programs.local_server import server

from benchmarks import start
from benchmarks.client import started
from benchmarks.flash import write_flash
from benchmarks.full_size import (
    CLIENT_SECONDS,
    environment,
    parsed,
    plugin,
    served,
    shared_options,
    steady,
)
from benchmarks.full_size_plan import ADMIN_KEY, common_flags
from benchmarks.full_size_report import Found
from nvfp4_sgl.synthetic.tiny_config import TinyFormat

CONTEXTS = {"long": 1 << 20, "short": 1 << 14}
"""``--context-length`` by server."""
LAYERS = 5
"""The first five have every kind: two window-only, two CSA and one HCA."""
LENGTHS = [16_384, 131_072, 1_000_000]
"""Tokens of the long prompts; the first also warms up what later ones use."""
ANSWER = 33
"""Tokens behind a long prompt: the first, then 32 decode steps."""
POOL = 4_194_304
"""``--max-total-tokens``: four requests of the longest. With a few layers many more would fit."""
LOG_INTERVAL = 8
"""Decode steps between two lines of the server's log, from which the time of a step is taken."""

Measurements = list[tuple[str, Callable[[], Any]]]


def main() -> int:
    parser = shared_options("launch/bench_long", __doc__, CONTEXTS, "long_context", tp=1, layers=LAYERS, tokens=64)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="tokens of the long prompts")
    parser.add_argument("--chunk", type=int, help="--chunked-prefill-size; SGLang's default unless given")
    parser.add_argument("--pool", type=int, default=POOL, help=f"--max-total-tokens; {POOL} by default")
    parser.add_argument("--seconds", type=float, default=400, help="limit for each long prompt")
    arguments = parsed(parser, CONTEXTS)
    found: Found = {}
    for found in recorded(arguments, measure):
        (arguments.output / "report.md").write_text(markdown(found))
    print(markdown(found), flush=True)
    return 1 if any(is_failed(value) for values in found.values() for value in values.values()) else 0


def recorded(
    arguments: argparse.Namespace, measure: Callable[[str, argparse.Namespace], Iterator[tuple[str, Any]]]
) -> Iterator[Found]:
    """Measure the servers and print what is found; after each measurement all of ``report.json`` as it is then."""
    report = arguments.output / "report.json"
    found: Found = json.loads(report.read_text()) if report.exists() else {}
    for measured in arguments.servers:
        found[measured] = {}  # figures of an earlier run never stand beside those of this one
        for name, value in measure(measured, arguments):
            found[measured][name] = value
            print(f"{measured}, {name}: {json.dumps(value)}", flush=True)
            report.write_text(json.dumps(found, indent=1) + "\n")
            yield found


def failed(error: Exception) -> dict[str, str]:
    return {"failed": f"{type(error).__name__}: {error}"}


def is_failed(value: object) -> bool:
    return isinstance(value, dict) and "failed" in value


def measure(name: str, arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Start a server and yield the name and result of each measurement, or its failure."""
    folder: Path = arguments.output / name
    model = write_flash(folder / "model", TinyFormat.NVFP4_FULL, arguments.layers)
    log, begun = folder / "server.log", time.monotonic()
    try:
        with (
            environment(SGLANG_SIMULATE_UNIFORM_EXPERTS="1", HF_HUB_OFFLINE="1"),
            started(folder / "client.log", CLIENT_SECONDS) as client,
            DeviceMemory() as memory,
            server(model, log, arguments.port, flags(name, arguments)) as url,
        ):
            ready = time.time()
            yield "ready after", round(time.monotonic() - begun, 1)
            yield "start", start.described(log, ready)
            todo: Measurements = [("server", partial(described, url))]
            for count in arguments.concurrency:
                of_client = partial(served, client, url, model, count, arguments.prompt, arguments.tokens)
                todo += [(f"at {count}", of_client), (f"steady at {count}", partial(steady, log, count))]
            for length in arguments.lengths if name == "long" else []:
                todo.append((f"prompt of {length}", partial(long_prompt, url, model, length, memory, arguments)))
            for what, measured in todo:
                try:
                    yield what, measured()
                except Exception as error:
                    yield what, failed(error)
    except Exception as error:
        yield "serving", failed(error)


def flags(name: str, arguments: argparse.Namespace) -> list[str]:
    """The server's; of an argument that is given twice the last one counts."""
    chosen = common_flags(arguments.concurrency, radix_cache=False)
    chosen += ["--tp", str(arguments.tp), "--admin-api-key", ADMIN_KEY]
    chosen += ["--context-length", str(CONTEXTS[name]), "--max-total-tokens", str(arguments.pool)]
    chosen += ["--decode-log-interval", str(LOG_INTERVAL)]
    chosen += ["--chunked-prefill-size", str(arguments.chunk)] if arguments.chunk else []
    return [*chosen, *arguments.flags.split()]


def described(url: str) -> dict[str, Any]:
    """The plugin, its pools, its forecast of memory, lengths and chunks, as ``/server_info`` says them."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        info = json.load(answer)
    ours: dict[str, Any] = next((state["nvfp4_sgl"] for state in info["internal_states"] if "nvfp4_sgl" in state), {})
    names = ("context_length", "chunked_prefill_size", "max_total_tokens", "max_running_requests")
    found = {**plugin(info, "ours"), **{name: info.get(name) for name in names}, "pools": ours.get("pools")}
    forecast = ours.get("memory") or {}
    parts = ("weights", "server", "token", "estimated", "free", "tokens")
    return {**found, "forecast": {part: forecast.get(part) for part in parts}}


def long_prompt(
    url: str, model: Path, length: int, memory: DeviceMemory, arguments: argparse.Namespace
) -> dict[str, Any]:
    """:func:`times` of a prompt of random ids, and the GPU's memory before and at its peak."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    ids = random.Random(length).choices(range(100, vocabulary), k=length)
    before = memory.restart()
    found = times(url, ids, ANSWER, arguments.seconds)
    time.sleep(2 * SAMPLE_SECONDS)  # the server's allocator keeps what it took
    return {**found, "MiB before": before, "MiB at peak": memory.peak}


def times(url: str, ids: list[int], tokens: int, seconds: float) -> dict[str, Any]:
    """Seconds to the first token of an answer to ``ids`` and milliseconds for each further one, from its stream.

    Raises:
        RuntimeError: the server refused the prompt, or the answer ends early; with what it said.
    """
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": ids, "sampling_params": sampling, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    arrivals: list[tuple[float, int]] = []
    last: Mapping[str, Any] = {}
    begun = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            for event in events(answer, begun + seconds):
                last = event
                arrivals.append((time.monotonic(), event["meta_info"]["completion_tokens"]))
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{len(ids)} ids: status {error.code}: {error.read()[:500].decode()}") from error
    if not arrivals or arrivals[-1][1] != tokens:
        raise RuntimeError(f"{len(ids)} ids: expected {tokens} tokens, the answer ended with {json.dumps(last)[:500]}")
    (first, at_first), (end, at_end) = arrivals[0], arrivals[-1]
    step = round(1000 * (end - first) / (at_end - at_first), 3) if at_end > at_first else None
    return {
        "bytes": len(body),
        "prompt tokens": last["meta_info"]["prompt_tokens"],
        "first token s": round(first - begun, 3),
        "prefill tokens/s": round(len(ids) / (first - begun), 1),
        "decode ms": step,
        "events": len(arrivals),
    }


def events(lines: Any, deadline: float) -> Iterator[dict[str, Any]]:
    """The server-sent events of a stream.

    Raises:
        RuntimeError: one of them is an error. TimeoutError: the deadline, by ``time.monotonic``, is over.
    """
    for line in lines:
        if time.monotonic() > deadline:
            raise TimeoutError("the stream did not end in time")
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "meta_info" not in event:
                raise RuntimeError(f"the server says {json.dumps(event)[:500]}")
            yield event


def markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of a report; what is missing or failed is a dash."""
    names = list(found)
    counts = sorted({int(what.split()[-1]) for of in found.values() for what in of if what.startswith("at ")})
    lengths = sorted({int(what.split()[-1]) for of in found.values() for what in of if what.startswith("prompt of ")})
    lines = ["## Decode steps of short requests, ms", ""]
    lines += ["| requests | " + " | ".join(f"{name}: step | median TPOT" for name in names) + " |"]
    lines += ["| --- " * (1 + 2 * len(names)) + "|"]
    for count in counts:
        cells = []
        for name in names:
            cells += [
                cell(found[name].get(f"steady at {count}")),
                cell(found[name].get(f"at {count}"), "median_tpot_ms"),
            ]
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    columns = ("first token s", "prefill tokens/s", "decode ms", "MiB before", "MiB at peak")
    for name in names if lengths else []:
        if not any(what.startswith("prompt of ") for what in found[name]):
            continue
        lines += ["", f"## Prompts, server {name}", "", "| tokens | " + " | ".join(columns) + " |"]
        lines += ["| --- " * (1 + len(columns)) + "|"]
        for length in lengths:
            value = found[name].get(f"prompt of {length}")
            lines.append(f"| {length} | " + " | ".join(cell(value, column) for column in columns) + " |")
    for name in names:
        lines += ["", f"## Server {name}", "", "```json", json.dumps(found[name].get("server"), indent=1), "```"]
    return "\n".join(lines) + "\n"


def cell(value: Any, key: str | None = None) -> str:
    if isinstance(value, dict):
        value = value.get(key)
    return "–" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
