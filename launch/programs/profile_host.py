"""Profiles the host's part of a decode step, or of a round of drafts: behind launch/profile_host.

A server with ``--enable-metrics`` runs so many endless requests. SGLang's scheduler counts the seconds of its stages,
each without those inside it; their shares of a window, times the window's time of a step, are a step's. On a GPU two
figures stand beside them: a step's own time, that of its graph replayed back to back, and what a step takes beyond
that. The detokenizer is another process, which no step waits for.

With ``--drafts`` the same is said of a round: a draft's passes, and the pass that verifies its guesses. Guesses of
random weights mean nothing, so that acceptance is simulated: one token a round.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from programs.local_server import server, tail
from programs.soak import descendants

STAGE_SECONDS, DECODED = "sglang:scheduler_stage_seconds_total", "nvfp4_sgl_decode_queries_total"
"""Metrics: seconds of the scheduler by stage, and tokens that decode passes have run.

A round counts all rows that its verify pass has of a request, and no row of a draft's passes."""
SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
STAGES = {
    "recv_requests": "receive",
    "process_input_requests": "take in",
    "get_next_batch_to_run": "schedule",
    "run_batch": "prepare, replay, sample",
    "process_batch_result": "process results",
    "process_queue": "queues of transfers",
    "sanity_check_cache": "checks of the pools",
    "idle": "idle",
    "other": "other",
}
"""SGLang's stages in the order of its loop."""
GRAPHS = {
    None: {"target": "decode step"},
    "mtp": {"target": "verify pass", "draft-extend": "draft: first guess", "draft": "draft: other guesses"},
    "dspark": {"target": "verify pass", "draft": "draft: block"},
}
"""Graphs of a step, or of a round by ``--drafts``: in words, by their names in ``timed_server.py``."""
CONTEXT, PROMPT = 8192, 64
POOL_TOKENS = 1 << 20
"""Capacity of the pools. SGLang has buffers of 48 bytes for each token of it, which would not fit beside pools of few
layers that fill a GPU."""
START_SECONDS, READ_SECONDS, PAUSE = 120.0, 60.0, 0.05
REPLAY_SECONDS = 60.0
"""Until every rank has timed a graph."""
DECODE_SECONDS = 5.0
"""A window: SGLang adds to its counters once a second."""


class ProfileError(Exception):
    """No figures; the message says why."""


def samples(text: str, name: str) -> dict[str, float]:
    """Values of a metric by its labels, as Prometheus's text has them."""
    found = (SAMPLE.match(line) for line in text.splitlines())
    return {one["labels"] or "": float(one["value"]) for one in found if one and one["name"] == name}


def label(labels: str, name: str) -> str:
    """The value of a label."""
    found = re.search(rf'(?:^|,){name}="([^"]*)"', labels)
    if found is None:
        raise ProfileError(f"{STAGE_SECONDS}: expected a label {name}, found {labels}")
    return found[1]


def stage_seconds(text: str) -> dict[str, float]:
    """Seconds of the scheduler by stage; :class:`ProfileError` if there are none, or one without a name here."""
    found: dict[str, float] = defaultdict(float)
    for labels, seconds in samples(text, STAGE_SECONDS).items():
        found[label(labels, "category")] += seconds
    if not found:
        raise ProfileError(f"{STAGE_SECONDS}: not among the server's metrics; start it with --enable-metrics")
    if unknown := found.keys() - STAGES.keys():
        raise ProfileError(f"{STAGE_SECONDS}: expected stages {', '.join(STAGES)}, found {', '.join(sorted(unknown))}")
    return dict(found)


@dataclass(frozen=True)
class Profile:
    """A decode step of ``requests`` requests, or a round; times in microseconds.

    Attributes:
        step: from one to the next. stages: what the scheduler spends of it, by SGLang's names.
        own: times of each of its graphs alone, by the graph's words, then by ranks; empty where there are no graphs.
        unit: "step", or "round" of a server that drafts.
    """

    requests: int
    step: float
    stages: Mapping[str, float]
    own: Mapping[str, Sequence[float]] = field(default_factory=dict)
    unit: str = "step"

    def lines(self) -> Iterator[str]:
        """The report."""
        from nvfp4_sgl.reports.inspection import counted

        yield f"{counted(self.requests, 'request')}: {self.step:,.0f} us a {self.unit}"
        for name, words in STAGES.items():
            if (us := self.stages.get(name, 0.0)) >= 0.5:
                yield f"  {words:24} {us:10,.0f} us {us / self.step:6.1%}"
        if not self.own:
            yield f"  own time: none, as decode {self.unit}s are not captured in CUDA graphs here"
            return
        ranks = [dict(zip(self.own, times, strict=True)) for times in zip(*self.own.values(), strict=True)]
        slowest = max(ranks, key=lambda parts: sum(parts.values()))
        own, graphs = sum(slowest.values()), "graph" if len(slowest) == 1 else "graphs"
        yield f"  {f'own time of its {graphs}':24} {own:10,.0f} us, of the slowest of {counted(len(ranks), 'rank')}"
        if len(slowest) > 1:
            for words, us in slowest.items():
                yield f"    {words:22} {us:10,.0f} us"
        yield f"  {f'{self.unit} minus own time':24} {self.step - own:10,.0f} us"


def profiled(
    before: str,
    after: str,
    seconds: float,
    requests: int,
    *,
    own: Mapping[str, Sequence[float]] | None = None,
    rows: int | None = None,
) -> Profile:
    """The profile of a window of so many seconds, from the server's metrics at its begin and its end.

    Args:
        own: as :class:`Profile`. rows: that a round verifies of a request; ``None`` for decode steps.
    """
    unit, tokens = ("step", requests) if rows is None else ("round", requests * rows)
    decoded = sum(samples(after, DECODED).values()) - sum(samples(before, DECODED).values())
    begun, ended = stage_seconds(before), stage_seconds(after)
    spent = {name: ended[name] - begun.get(name, 0.0) for name in ended}
    total = sum(spent.values())
    if decoded < tokens or total <= 0:
        raise ProfileError(
            f"{seconds:.1f} s: expected decode {unit}s of {requests} requests, found {decoded:.0f} tokens and"
            f" {total:.2f} s of stages; ask for more --seconds"
        )
    step = seconds * 1e6 * tokens / decoded
    return Profile(requests, step, {name: step * each / total for name, each in spent.items()}, own or {}, unit)


def metrics(url: str) -> str:
    """The server's counters now, as text."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=READ_SECONDS) as answer:
        return str(answer.read().decode())


class Endless:
    """Requests that decode until they are left; each a stream."""

    def __init__(self, url: str, requests: int, tokens: int) -> None:
        self._url, self._tokens = url, tokens
        self._over, self._begun = threading.Event(), threading.Semaphore(0)
        self._faults: list[str] = []
        self._threads = [threading.Thread(target=self._decode, args=(n,), daemon=True) for n in range(requests)]

    def _decode(self, number: int) -> None:
        connection = http.client.HTTPConnection(self._url.removeprefix("http://"), timeout=READ_SECONDS)
        sampling = {"max_new_tokens": self._tokens, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": [20 + number % 100] * PROMPT, "sampling_params": sampling, "stream": True}
        try:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise ProfileError(f"/generate: expected status 200, found {answer.status}: {answer.read(300)!r}")
            answer.readline()
            self._begun.release()
            while answer.readline() and not self._over.is_set():
                pass
            if not self._over.is_set():
                raise ProfileError(f"a request ended after {self._tokens} tokens; ask for fewer --seconds")
        except (OSError, http.client.HTTPException, ProfileError) as error:
            self._faults.append(f"{type(error).__name__}: {error}")
        finally:
            connection.close()
            self._begun.release()

    def __enter__(self) -> Endless:
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + START_SECONDS
        for _ in self._threads:
            if not self._begun.acquire(timeout=max(0.0, deadline - time.monotonic())):
                self._over.set()
                raise ProfileError(f"expected first tokens of {len(self._threads)} requests in {START_SECONDS:.0f} s")
        self.require_all()
        return self

    def require_all(self) -> None:
        """:class:`ProfileError` if a request is over."""
        if self._faults:
            self._over.set()
            raise ProfileError(self._faults[0])

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=READ_SECONDS)


def replay_times(folder: Path, requests: int, ranks: int, running: Callable[[], None] = lambda: None) -> list[float]:
    """Microseconds of a replay on each rank, of the least graph that holds so many requests; waits for them.

    Args:
        folder: of one kind of graph.
        running: raises once the requests no longer run.
    """
    deadline = time.monotonic() + REPLAY_SECONDS
    while time.monotonic() < deadline:
        running()
        batches = [int(file.name.partition("-")[0]) for file in folder.glob("*") if not file.suffix]
        if (batch := min((each for each in batches if each >= requests), default=None)) is not None:
            files = [folder / f"{batch}-{rank}" for rank in range(ranks)]
            if all(file.exists() for file in files):
                return [float(file.read_text()) for file in files]
        time.sleep(PAUSE)
    timed = sorted(str(file.relative_to(folder.parent)) for file in folder.parent.glob("*/*") if not file.suffix)
    raise ProfileError(
        f"expected {ranks} ranks to time the {folder.name} graph of {requests} requests in {REPLAY_SECONDS:.0f} s,"
        f" found {', '.join(timed) or 'no graph timed'}; does other work share the GPU?"
    )


def measure(
    url: str,
    requests: int,
    *,
    seconds: float,
    tokens: int,
    replays: Path | None = None,
    ranks: int = 1,
    drafts: str | None = None,
    rows: int | None = None,
) -> Profile:
    """The profile of a running server's decode steps, or rounds.

    Args:
        tokens: of a request's answer, at most; more than it decodes here.
        replays: where a server of ``timed_server.py`` writes the times of its graphs, if it has graphs.
        drafts: of :data:`GRAPHS`. rows: as :func:`profiled`.
    """
    with Endless(url, requests, tokens) as running:
        graphs = {} if replays is None else {words: replays / name for name, words in GRAPHS[drafts].items()}
        own = {words: replay_times(folder, requests, ranks, running.require_all) for words, folder in graphs.items()}
        begun, before = time.monotonic(), metrics(url)
        time.sleep(seconds)
        ended, after = time.monotonic(), metrics(url)
        running.require_all()
    return profiled(before, after, ended - begun, requests, own=own, rows=rows)


def spied(process: int, output: Path, seconds: float) -> None:
    """Record what the Python functions of a process take, as text that flame graphs are made of."""
    command = ["py-spy", "record", "--format", "raw", "--duration", str(max(1, round(seconds)))]
    subprocess.run([*command, "--pid", str(process), "--output", str(output)], check=True)


@contextlib.contextmanager
def server_log_on_error(log: Path) -> Iterator[None]:
    """Add the last lines of the server's log to a :class:`ProfileError`: the file is deleted with its folder."""
    try:
        yield
    except ProfileError as error:
        raise ProfileError(f"{error}\n--- last lines of {log.name}\n{tail(log)}") from error


def schedulers() -> list[int]:
    """Scheduler processes among the children of this one, rank by rank."""
    found = []
    for process in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"sglang::scheduler"):
                found.append(process)
    return sorted(found)


@dataclass(frozen=True)
class Served:
    """A model, and what its server is asked for.

    Attributes:
        environment: of the server. rows: as :func:`profiled`.
    """

    checkpoint: Path
    flags: Sequence[str]
    environment: Mapping[str, str]
    rows: int | None


def served(folder: Path, layers: int, drafts: str | None, *, on_gpu: bool) -> Served:
    """Write the model to ``folder``, with its draft; of a round one token is accepted."""
    from benchmarks.full_size import with_defaults
    from benchmarks.full_size_plan import draft_of, drafting, rows_of_a_round
    from benchmarks.released import MODELS, write_released

    from nvfp4_sgl.synthetic.tiny import TinyFormat, write_tiny

    run = with_defaults(drafts=drafts)
    flags = ["--enable-metrics", "--context-length", str(CONTEXT), "--disable-radix-cache"]
    if on_gpu:
        flags += ["--load-format", "dummy", "--max-total-tokens", str(POOL_TOKENS)]
        write_released(folder, MODELS["flash"], TinyFormat.NVFP4_FULL, layers, draft_of(run))
    else:
        write_tiny(folder, "nvfp4-full", draft=draft_of(run), num_hidden_layers=layers)
    more, environment = drafting(run)
    return Served(folder, [*flags, *more], environment, rows_of_a_round(run) if drafts else None)


def run(args: argparse.Namespace, folder: Path) -> list[str]:
    """Serve and measure at each number of ranks; the report."""
    from nvfp4_sgl.reports.inspection import counted
    from nvfp4_sgl.targets.choose import detect_target
    from nvfp4_sgl.targets.target import descriptor

    on_gpu = descriptor(detect_target()).on_gpu
    model = served(folder / "checkpoint", args.layers, args.drafts, on_gpu=on_gpu)
    what = counted(args.layers, "layer") + (f", {args.drafts} drafts" if args.drafts else "")
    said = [] if on_gpu else ["no GPU: a tiny model on the CPU; its times say nothing of a GPU's"]
    for ranks in args.tp:
        replays = folder / f"replays-{ranks}"
        replays.mkdir()
        more = ["--tp-size", str(ranks), "--max-running-requests", str(max(args.requests))]
        timed = (str(Path(__file__).with_name("timed_server.py")), str(replays))
        program = timed if on_gpu else ("-m", "sglang.launch_server")
        log = folder / f"server-{ranks}.log"
        with (
            server_log_on_error(log),
            server(
                model.checkpoint,
                log,
                arguments=[*model.flags, *more],
                program=program,
                environment=model.environment,
            ) as url,
        ):
            for requests in sorted(args.requests):  # before a larger graph has a time, which would hold as many
                found = measure(
                    url,
                    requests,
                    seconds=args.seconds,
                    tokens=CONTEXT - 2 * PROMPT,
                    replays=replays if on_gpu else None,
                    ranks=ranks,
                    drafts=args.drafts,
                    rows=model.rows,
                )
                first, *rest = found.lines()
                said += [f"TP {ranks}, {what}, {first}", *rest]
                if args.py_spy is not None:
                    with Endless(url, requests, CONTEXT - 2 * PROMPT):
                        spied(schedulers()[0], args.py_spy / f"tp{ranks}-{requests}.txt", args.seconds)
    return said


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/profile_host", description="Where the host's time of a step goes.")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="layers of the model (%(default)s)")
    parser.add_argument(
        "--tp", type=int, nargs="+", default=[1], metavar="N", help="tensor-parallel sizes, one server each (1)"
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16], metavar="N", help="requests at once (1 16)")
    parser.add_argument(
        "--drafts", choices=["mtp", "dspark"], help="time rounds of this draft, instead of decode steps"
    )
    parser.add_argument(
        "--seconds", type=float, default=DECODE_SECONDS, help="how long each case is measured (%(default)s)"
    )
    parser.add_argument("--py-spy", type=Path, metavar="DIR", help="also write a py-spy profile of rank 0 there")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the report here")
    args = parser.parse_args()
    if args.py_spy is not None and shutil.which("py-spy") is None:
        parser.error("--py-spy: needs the program py-spy on PATH, found none; run: pip install py-spy")
    for name, values in (("layers", [args.layers]), ("tp", args.tp), ("requests", args.requests)):
        if min(values) < 1:
            parser.error(f"--{name}: expected 1 or more, found {min(values)}")
    if not 0 < args.seconds < math.inf:
        parser.error(f"--seconds: expected a number above 0, found {args.seconds}")
    if args.output is not None and (args.output.is_dir() or not args.output.absolute().parent.is_dir()):
        parser.error(f"--output: expected a file in a folder that exists, found {args.output}")
    if args.py_spy is not None and args.py_spy.exists() and not args.py_spy.is_dir():
        parser.error(f"--py-spy: expected a folder, found the file {args.py_spy}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if args.py_spy is not None:
            args.py_spy.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            lines = run(args, Path(folder))
    except ProfileError as error:
        print(f"launch/profile_host: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines), flush=True)
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
