"""Times Flash at full size with dummy weights: ours, then stock SGLang, on the same GPUs.

Both have the same flags and client.
Ours serves every matrix in NVFP4, stock what SGLang recommends on Hopper at low latency: FP8 and MXFP4 through Marlin.
Both route uniformly: the routers of dummy weights would send 64 tokens to 9 of 256 experts. Client: SGLang's own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from programs.local_server import server

from benchmarks import decode_trace, start
from benchmarks.client import Client, started
from benchmarks.decode_trace import Gemms
from benchmarks.flash import LAYERS, write_flash
from benchmarks.full_size_record import described, record
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.synthetic.tiny_config import TinyFormat

ROOT = Path(__file__).resolve().parents[2]
STOCK = Path(__file__).parent / "peers" / "stock_sglang"
FLAGS = "--load-format dummy --sampling-backend pytorch --mem-fraction-static 0.8 --context-length 16384"
LEAST_REQUESTS = 64
"""Requests that a server is laid out for, at least."""
SAMPLING = {"greedy": (), "top-p": ("--temperature", "1", "--top-p", "0.95")}
"""The client's options, by how it has tokens chosen."""
ENGINES = {"ours": TinyFormat.NVFP4_FULL, "stock": TinyFormat.DEEPSEEK}
STOCK_FLAGS = ["--moe-runner-backend", "marlin", "--trust-remote-code"]
STOCK_ENVIRONMENT = {"NVFP4_SGL_DISABLE": "1", "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
LONG_PROMPT = 8192
TRACED_STEPS = 6
ADMIN_KEY = "bench-full"
"""Key of the servers that are measured: SGLang's profiler is an administrative endpoint."""
CLIENT_SECONDS = 300


def main() -> int:
    parser = shared_options("launch/bench_full", __doc__, ENGINES, "full_size", tp=2, layers=LAYERS, tokens=256)
    parser.add_argument("--long", action="store_true", help=f"also the time to first token of {LONG_PROMPT} tokens")
    parser.add_argument("--trace", type=int, nargs="*", default=[], help="requests at once of traced decode steps")
    parser.add_argument("--drafts", choices=["mtp"], help="draft, with acceptance that is simulated")
    parser.add_argument("--steps", type=int, default=3, help="of the draft")
    parser.add_argument("--accepted", type=float, default=1.0, metavar="ROWS", help="of a round, in the mean")
    parser.add_argument("--sampling", choices=["greedy", "top-p"], default="greedy", help="top-p: of 0.95")
    parser.add_argument("--stock-sampler", default="pytorch", metavar="NAME", help="stock's --sampling-backend")
    parser.add_argument("--radix-cache", action="store_true", help="keep the cache of prefixes, which is off otherwise")
    parser.add_argument("--record", type=Path, metavar="FILE", help="a new JSON file of launch/results/figures")
    arguments = parsed(parser, ENGINES)
    if arguments.record is not None:
        check_record(arguments, parser)
    run = described(arguments, sys.argv[1:]) if arguments.record is not None else {}
    for found in recorded(arguments, measure):
        if arguments.record is not None:
            record(arguments.record, arguments, found, run)
    return 0


def check_record(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End the process before anything is measured if ``--record`` could not be written."""
    file: Path = arguments.record
    if "ours" not in arguments.servers:
        parser.error(f"--record {file}: expected ours among the servers, found {' '.join(arguments.servers)}")
    if arguments.drafts:
        parser.error(
            f"--record {file} with --drafts: acceptance is simulated, and figures of answers are recorded alone"
        )
    if file.exists() or file.suffix != ".json" or not file.parent.is_dir():
        parser.error(f"--record {file}: expected a new .json file in a folder that exists; name another")


def shared_options(
    prog: str, doc: str | None, servers: Iterable[str], folder: str, *, tp: int, layers: int, tokens: int
) -> argparse.ArgumentParser:
    """The options of a benchmark of several servers, one after the other; ``tp`` and so on are their defaults."""
    parser = argparse.ArgumentParser(prog=prog, description=(doc or "").splitlines()[0])
    parser.add_argument("servers", nargs="*", default=list(servers), help="which of its two servers; both unless given")
    parser.add_argument("--tp", type=int, default=tp, metavar="N", help="tensor-parallel size")
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 16, 64], help="requests at once")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a request")
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens of its answer")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / folder, metavar="OUT", help="logs and results")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--flags", default="", help="further flags of both servers")
    return parser


def parsed(parser: argparse.ArgumentParser, servers: Iterable[str]) -> argparse.Namespace:
    """The command line's options; those that name another server end the process."""
    arguments = parser.parse_args()
    if unknown := set(arguments.servers) - set(servers):
        parser.error(f"{sorted(unknown)[0]}: expected of {', '.join(servers)}")
    return arguments


Found = dict[str, dict[str, Any]]
"""What each measurement found, by server and name."""


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


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(engine: str, arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Serve an engine and yield the name and result of each measurement."""
    folder: Path = arguments.output / engine
    model = write_flash(folder / "model", ENGINES[engine], arguments.layers)
    flags = common_flags([*arguments.concurrency, *arguments.trace], radix_cache=arguments.radix_cache)
    flags += ["--tp", str(arguments.tp), "--admin-api-key", ADMIN_KEY, *arguments.flags.split()]
    values = {"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1", "HF_HUB_OFFLINE": "1"}
    if engine == "stock":
        flags += [*STOCK_FLAGS, "--sampling-backend", arguments.stock_sampler]
        paths = [str(STOCK), *filter(None, [os.environ.get("PYTHONPATH")])]
        values |= STOCK_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    more, variables = drafting(arguments)
    flags, values = flags + more, values | variables
    log = folder / "server.log"
    begun = time.monotonic()
    with (
        environment(**values),
        started(folder / "client.log", CLIENT_SECONDS) as client,
        server(model, log, arguments.port, flags) as url,
    ):
        ready = time.time()
        yield "ready after", round(time.monotonic() - begun, 1)
        if engine == "ours":
            yield "start", start.described(log, ready)
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
            yield "plugin", plugin(json.load(answer), engine)
        for count in dict.fromkeys([*arguments.concurrency, *arguments.trace]):
            if count in arguments.concurrency:
                sizes = count, arguments.prompt, arguments.tokens
                found = served(client, url, model, *sizes, sampling=arguments.sampling)
                yield f"at {count}", found
                if arguments.drafts:
                    yield f"round at {count}", round(found["mean_tpot_ms"] * arguments.accepted, 3)
                yield f"steady at {count}", steady(log, count)
            if count in arguments.trace:
                gemms = Gemms.of(ModelConfig.from_dir(model), arguments.tp, count) if engine == "ours" else None
                yield f"trace at {count}", trace(url, folder, count, arguments.prompt, gemms)
        if arguments.long:
            yield f"prompt of {LONG_PROMPT}", served(client, url, model, 1, LONG_PROMPT, 4)


def drafting(arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a server that drafts, of either engine; none of one that does not.

    Guesses of random weights mean nothing, so that SGLang's switch says how many are accepted. With one row of a round
    accepted, which is the default, the time per output token is that of a round.
    """
    if not arguments.drafts:
        return [], {}
    steps = arguments.steps
    flags = ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps)]
    flags += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1)]
    accepted = {
        "SGLANG_SIMULATE_ACC_LEN": str(arguments.accepted),
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    return flags, accepted


def common_flags(at_once: Iterable[int], *, radix_cache: bool) -> list[str]:
    """Flags of all servers, laid out for as many requests as will be ``at_once``."""
    most = str(max([LEAST_REQUESTS, *at_once]))
    flags = [*FLAGS.split(), "--cuda-graph-max-bs-decode", most, "--max-running-requests", most]
    return flags if radix_cache else [*flags, "--disable-radix-cache"]


def plugin(info: dict[str, Any], engine: str) -> dict[str, Any]:
    """This project's plugin in ``/server_info``; RuntimeError if it is not there, or should not be."""
    found: dict[str, Any] = next((state["nvfp4_sgl"] for state in info["internal_states"] if "nvfp4_sgl" in state), {})
    if bool(found) != (engine == "ours"):
        raise RuntimeError(f"{engine}: /server_info says of the plugin {found or 'nothing'}")
    return {key: found[key] for key in ("version", "weights", "routing", "target") if key in found}


def served(
    client: Client, url: str, model: Path, count: int, prompt: int, tokens: int, *, sampling: str = "greedy"
) -> dict[str, float]:
    """Measure with SGLang's own client, ``count`` requests at once: milliseconds, and tokens a second."""
    output = model.parent / f"client.{count}.{prompt}.jsonl"
    output.unlink(missing_ok=True)
    host, port = url.removeprefix("http://").split(":")
    arguments = ["--backend", "sglang", "--host", host, "--port", port]
    arguments += ["--model", str(model), "--tokenizer", str(model), "--dataset-name", "random-ids"]
    arguments += ["--random-input-len", str(prompt), "--random-output-len", str(tokens), "--random-range-ratio", "1"]
    # As ids: text of a made-up vocabulary does not give the tokens back that it was made of.
    arguments += ["--tokenize-prompt", "--num-prompts", str(3 if count == 1 else 2 * count)]
    # As many beforehand as will run at once: stock compiles kernels when it first sees so many.
    arguments += ["--max-concurrency", str(count), "--warmup-requests", str(count), *SAMPLING[sampling]]
    client.run([*arguments, "--disable-tqdm", "--output-file", str(output)])
    said = json.loads(output.read_text().splitlines()[-1])
    names = ("mean_tpot_ms", "median_tpot_ms", "median_ttft_ms", "output_throughput", "completed")
    return {name: round(said[name], 3) for name in names}


def steady(log: Path, count: int) -> float | None:
    """Milliseconds of a decode step at ``count`` requests: the median of what the server's log says of full batches."""
    found = re.findall(r"Decode batch.*?#running-req: (\d+),.*?gen throughput \(token/s\): ([\d.]+)", log.read_text())
    rates = [float(rate) for running, rate in found if int(running) == count]
    return round(1000 * count / statistics.median(rates), 3) if rates else None


def trace(url: str, folder: Path, count: int, prompt: int, gemms: Gemms | None) -> str:
    """Trace some decode steps of ``count`` requests; its head is the answer, tables and traces stay in ``folder``."""
    where = folder / f"trace.{count}"
    body = json.dumps(
        {
            "input_ids": [[100 + (7 * i + j) % 20000 for j in range(prompt)] for i in range(count)],
            "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
        }
    ).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    thread = threading.Thread(target=lambda: urllib.request.urlopen(request, timeout=CLIENT_SECONDS).read())
    thread.start()
    time.sleep(1 + 0.08 * count)  # until all prompts are read: the steps that follow are decode steps
    post(f"{url}/start_profile", output_dir=str(where), num_steps=TRACED_STEPS, activities=["GPU"])
    thread.join()
    begun = time.monotonic()
    while not (files := sorted(where.glob("*TP-0*.trace.json.gz"))) and time.monotonic() - begun < CLIENT_SECONDS:
        time.sleep(0.5)
    if not files:
        raise RuntimeError(f"{where}: SGLang's profiler wrote no trace of rank 0")
    time.sleep(1)  # a file appears before it is whole
    table = decode_trace.text(files[0], gemms)
    (folder / f"trace.{count}.txt").write_text(table + "\n")
    return table.splitlines()[0]


def post(url: str, **fields: object) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
    request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
    urllib.request.urlopen(request, timeout=CLIENT_SECONDS).read()


if __name__ == "__main__":
    sys.exit(main())
