"""Times a released model at full size with dummy weights: ours, then stock SGLang, on the same GPUs.

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
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from programs.local_server import server

from benchmarks import decode_trace, start
from benchmarks.client import Client, started
from benchmarks.decode_trace import Gemms
from benchmarks.full_size_checks import CARDS, Machine, assumed, plan_lines, problems
from benchmarks.full_size_options import complete, fill_in
from benchmarks.full_size_plan import (
    ADMIN_KEY,
    ENGINES,
    FAILED,
    LONG_ANSWER,
    LONG_PROMPT,
    TRACED_TOKENS,
    Start,
    draft_of,
    draft_weights_of,
    model_of,
    pending,
    rows_of_a_round,
    server_flags,
)
from benchmarks.full_size_record import record
from benchmarks.full_size_report import Report
from benchmarks.process_memory import HostMemory
from benchmarks.released import DraftWeights, write_released
from benchmarks.server_memory import gpu_memory
from nvfp4_sgl.arguments import MAX_RANKS, whole_number
from nvfp4_sgl.cache.layout import DRAFTED_TOKENS
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.config_fields import MAX_LAYERS
from nvfp4_sgl.sglang_defaults import DRAFT_STEPS, SAMPLERS

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = {"greedy": (), "top-p": ("--temperature", "1", "--top-p", "0.95")}
"""The client's options, by how it has tokens chosen."""
AT_ONCE = whole_number(1 << 16)
"""Type of options that count requests at once."""
LENGTH = whole_number(1 << 20, least=2)
"""Type of options that count a request's tokens; an answer of one token has no time per output token."""
TRACED_STEPS = 6
CLIENT_SECONDS = 300


def main() -> int:
    parser = options()
    arguments = parsed(parser, ENGINES)
    try:
        complete(arguments)
        if arguments.record is not None:
            check_record(arguments, parser)
        return planned(arguments) if arguments.dry_run else run(arguments, parser)
    except ValueError as error:
        parser.error(str(error))


def options() -> argparse.ArgumentParser:
    """All options of ``launch/bench_full``."""
    parser = shared_options("launch/bench_full", __doc__, ENGINES, "full_size", tp=2, layers=None, tokens=256)
    parser.set_defaults(concurrency=[1, 64])
    parser.add_argument("--model", choices=["flash", "pro"], default="flash", help="which model (default: %(default)s)")
    parser.add_argument(
        "--later",
        type=AT_ONCE,
        nargs="*",
        default=[16, 256],
        help="further numbers of requests, by a second start (default: 16 256)",
    )
    parser.add_argument(
        "--long", action="store_true", help=f"also time the first token of a prompt of {LONG_PROMPT} tokens"
    )
    parser.add_argument("--trace", type=AT_ONCE, nargs="*", default=[], help="trace decode steps with so many requests")
    parser.add_argument(
        "--drafts", choices=["mtp", "dspark"], help="time rounds of this draft, with simulated acceptance"
    )
    weights = [each.value for each in DraftWeights]
    parser.add_argument(
        "--draft-weights", choices=weights, help="nvfp4 or released: how our draft is stored (default: nvfp4)"
    )
    steps = whole_number(DRAFTED_TOKENS - 1)
    parser.add_argument("--steps", type=steps, metavar="N", help=f"guesses of an MTP draft (default: {DRAFT_STEPS})")
    parser.add_argument(
        "--accepted", type=float, metavar="TOKENS", help="mean tokens that a round accepts (default: 1)"
    )
    parser.add_argument(
        "--sampling",
        choices=["greedy", "top-p"],
        default="greedy",
        help="top-p: 0.95 at temperature 1 (default: greedy)",
    )
    parser.add_argument(
        "--stock-sampler", choices=SAMPLERS, default="pytorch", help="stock's --sampling-backend (default: %(default)s)"
    )
    parser.add_argument(
        "--stock-cache", type=Path, metavar="DIR", help="where stock keeps the kernels that it compiles"
    )
    parser.add_argument("--radix-cache", action="store_true", help="leave the prefix cache on, which is off otherwise")
    parser.add_argument("--record", type=Path, metavar="FILE", help="also write the figures to this new file")
    parser.add_argument("--fresh", action="store_true", help="ignore the results of an earlier run in OUT")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and the forecast; needs no GPU")
    return parser


def with_defaults(**given: object) -> argparse.Namespace:
    """The options ``given`` by name, all others of ``launch/bench_full`` at their defaults, for programs without them.

    So :func:`measure`, and all that reads options, finds each of them, also one that is added later.
    """
    arguments = options().parse_args([], argparse.Namespace(**given))
    fill_in(arguments)
    return arguments


def planned(arguments: argparse.Namespace) -> int:
    """Print the plan; 1 if none of the cards in it could be used."""
    print("\n".join(plan_lines(arguments)))
    return 0 if any(not list(problems(arguments, assumed(arguments, name))) for name in CARDS) else 1


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure, if this machine can; else end the process.

    Raises:
        ValueError: as :meth:`Report.opened`.
    """
    machine = Machine.here(arguments.output, arguments.tp)
    if found := list(problems(arguments, machine)):
        parser.error("\n  ".join(["this machine cannot end the run, and nothing was started:", *found]))
    return measured(arguments, Report.opened(arguments, sys.argv[1:]))


def measured(arguments: argparse.Namespace, report: Report) -> int:
    """Find what the report lacks, and write each result as soon as it is there; a start that fails ends no other."""
    failed = 0
    if report.found and arguments.record is not None:
        record(arguments.record, arguments, report.found, report.run)
    for start_, left in pending(arguments, report.found):
        try:
            for name, value in measure(start_, arguments, left):
                print(f"{start_.engine}, {name}: {json.dumps(value)}", flush=True)
                report.add(start_.engine, name, value)
                if arguments.record is not None:
                    record(arguments.record, arguments, report.found, report.run)
        except Exception as error:  # of a server, a client or a trace, whatever it is: others are measured yet
            failed += 1
            words = f"{type(error).__name__}: {error}"
            report.add(start_.engine, FAILED, words)
            print(f"{start_.engine}, {FAILED}: {words}", file=sys.stderr, flush=True)
    return 1 if failed else 0


def check_record(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End the process before anything is measured if ``--record`` could not be written."""
    file: Path = arguments.record
    if "ours" not in arguments.servers:
        parser.error(f"--record {file}: expected ours among the servers, found {' '.join(arguments.servers)}")
    if arguments.drafts:
        parser.error(
            f"--record {file} with --drafts: acceptance is simulated, and figures of answers are recorded alone"
        )
    if file.suffix != ".json" or not file.parent.is_dir():
        parser.error(f"--record {file}: expected a .json file in a folder that exists; name another")
    if file.exists() and not Report.wrote(arguments, file):
        parser.error(f"--record {file}: expected a new .json file, found one of another run; name another")


def shared_options(
    prog: str, doc: str | None, servers: Iterable[str], folder: str, *, tp: int, layers: int | None, tokens: int
) -> argparse.ArgumentParser:
    """The options of a benchmark of several servers, one after the other; ``tp`` and so on are their defaults."""
    parser = argparse.ArgumentParser(prog=prog, description=(doc or "").splitlines()[0])
    parser.add_argument("servers", nargs="*", default=list(servers), help="which of the two servers (default: both)")
    parser.add_argument("--tp", type=whole_number(MAX_RANKS), default=tp, metavar="N", help="tensor-parallel size")
    parser.add_argument("--layers", type=whole_number(MAX_LAYERS), default=layers, help="serve only the first layers")
    parser.add_argument("--concurrency", type=AT_ONCE, nargs="*", default=[1, 16, 64], help="requests at once")
    parser.add_argument("--prompt", type=LENGTH, default=1024, help="tokens of a prompt (default: 1024)")
    parser.add_argument("--tokens", type=LENGTH, default=tokens, help="tokens of an answer")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / folder, metavar="OUT", help="logs and results")
    parser.add_argument(
        "--port", type=whole_number(65535, least=0), default=0, help="port of the servers (default: a free one)"
    )
    parser.add_argument("--flags", default="", help="more flags of both servers: --flags='--a 1 --b'")
    return parser


def parsed(parser: argparse.ArgumentParser, servers: Iterable[str]) -> argparse.Namespace:
    """The command line's options; those that name another server end the process."""
    arguments = parser.parse_args()
    if unknown := set(arguments.servers) - set(servers):
        parser.error(f"{sorted(unknown)[0]}: expected {' or '.join(servers)}")
    if len({*arguments.servers}) < len(arguments.servers):
        parser.error(f"{' '.join(arguments.servers)}: expected each server once")
    return arguments


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(start_: Start, arguments: argparse.Namespace, left: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Start a server and yield the name and result of each measurement that is ``left``.

    Args:
        arguments: all options, from a completed command line or :func:`with_defaults`.
    """
    for name, value in _results(start_, arguments, left):
        if name in left:
            yield name, value


def _results(start_: Start, arguments: argparse.Namespace, left: Collection[str]) -> Iterator[tuple[str, Any]]:
    """As :func:`measure`, with what costs nothing beside what is left."""
    folder: Path = arguments.output / start_.engine
    released, ours = model_of(arguments), start_.engine == "ours"
    drafted = draft_of(arguments), draft_weights_of(arguments)
    model = write_released(folder / "model", released, ENGINES[start_.engine], arguments.layers, *drafted)
    flags, values = server_flags(arguments, start_)
    log = folder / f"server.{start_.most}.log"
    begun = time.monotonic()
    with (
        environment(**values),
        started(folder / "client.log", CLIENT_SECONDS) as client,
        HostMemory() as host,
        server(model, log, arguments.port, flags, seconds=released.start_seconds, began=host.watch) as url,
    ):
        ready = time.time()
        yield "ready after", round(time.monotonic() - begun, 1)
        yield "host memory", host.found()
        yield "start", start.described(log, ready)
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
            info = json.load(answer)
        yield "plugin", plugin(info, start_.engine)
        yield "GPU memory", gpu_memory(info, log)
        for count in start_.concurrency:
            if not {*start_.at(count)}.isdisjoint(left):
                sizes = count, arguments.prompt, arguments.tokens
                found = served(client, url, model, *sizes, sampling=arguments.sampling)
                yield f"at {count}", found
                yield f"round at {count}", round(found["mean_tpot_ms"] * arguments.accepted, 3)
                yield f"steady at {count}", steady(log, count)
        for count in start_.trace:
            if f"trace at {count}" in left:
                tokens = count * rows_of_a_round(arguments) if start_.drafts else count
                config, drafts = ModelConfig.from_dir(model), start_.drafts
                gemms = Gemms.of(config, arguments.tp, tokens, drafted=drafts) if ours else None
                yield f"trace at {count}", trace(url, folder, count, arguments.prompt, gemms, drafted=drafts)
        if f"prompt of {LONG_PROMPT}" in left:
            yield f"prompt of {LONG_PROMPT}", served(client, url, model, 1, LONG_PROMPT, LONG_ANSWER)


def plugin(info: dict[str, Any], engine: str) -> dict[str, Any]:
    """This project's plugin in ``/server_info``; RuntimeError if it is not there, or should not be."""
    found: dict[str, Any] = next((state["nvfp4_sgl"] for state in info["internal_states"] if "nvfp4_sgl" in state), {})
    if bool(found) != (engine == "ours"):
        raise RuntimeError(f"{engine}: /server_info says of the plugin {found or 'nothing'}")
    return {key: found[key] for key in ("version", "weights", "routing", "target", "rank_sums") if key in found}


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


def trace(url: str, folder: Path, count: int, prompt: int, gemms: Gemms | None, *, drafted: bool = False) -> str:
    """Trace some decode steps of ``count`` requests; its head is the answer, tables and traces stay in ``folder``."""
    where = folder / f"trace.{count}"
    body = json.dumps(
        {
            "input_ids": [[100 + (7 * i + j) % 20000 for j in range(prompt)] for i in range(count)],
            "sampling_params": {"temperature": 0, "max_new_tokens": TRACED_TOKENS, "ignore_eos": True},
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
    table = decode_trace.text(files[0], gemms, drafted=drafted)
    (folder / f"trace.{count}.txt").write_text(table + "\n")
    return table.splitlines()[0]


def post(url: str, **fields: object) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
    request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
    urllib.request.urlopen(request, timeout=CLIENT_SECONDS).read()


if __name__ == "__main__":
    sys.exit(main())
