"""A soak test: mixed, given-up and malformed requests at one server for minutes or hours, then a look at what is left.

Run through launch/soak. Exit status 0 only if requests ran and all ended as they must, no slot or pool token is in
use, and a probe's greedy ids and log-probabilities are unchanged. The host's memory (:func:`memory`) must not grow
beyond ``--growth`` after a warm-up, nor with ``--gpu`` the GPU's beyond ``--gpu-growth``. Processes that grew are
named. The last line is the verdict. Figures of past runs: launch/results/soak.md.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.process_memory import rollup, title

from programs import device_memory
from programs.local_server import server

ADMIN_KEY = "soak"
SETTLE_SECONDS = 60
TIMEOUT_SECONDS = 300
TOLERANCE = 1e-4
"""Bound on differences of log-probabilities: sums take another order beside other requests."""

SAMPLE_SECONDS = 15
"""Between two looks at the memory, for the record."""
MAX_READINGS = 8
"""Bound on how often the processes are read for one look."""
MIB = 1 << 20
"""Bytes."""
NAMED_GROWTH_MIB = 10
"""Growth of a process's memory above which it is named."""
MAX_TITLE_CHARACTERS = 100
"""What is shown of a process's title, which may be a whole command line."""
ON_GPU = (
    *("--sampling-backend", "pytorch", "--mem-fraction-static", "0.2", "--max-total-tokens", "32768"),
    *("--context-length", "4096", "--max-running-requests", "32", "--cuda-graph-max-bs-decode", "32"),
    *("--chunked-prefill-size", "512", "--swa-full-tokens-ratio", "0.5"),
)
"""Flags of a server on a GPU: small pools, so that prompts are chunked and cached pages make way."""
SHAPES: dict[str, Any] = {"index_topk": 512, "num_attention_heads": 64, "o_groups": 8, "num_hidden_layers": 6}
"""Shapes of a tiny checkpoint that a GPU's kernels take."""

MALFORMED: tuple[tuple[str, bytes], ...] = (
    ("/generate", b"[]"),
    ("/generate", b'{"input_ids": [99999999]}'),
    ("/generate", b'{"input_ids": [30], "sampling_params": {"n": 1000000000}}'),
    ("/generate", b'{"input_ids": [30], "sampling_params": {"sampling_seed": 1}}'),
    ("/generate", b'{"input_ids": [30], "sampling_params": {"ebnf": "root ::= root", "top_p": 0.9}}'),
    ("/v1/chat/completions", b"5"),
    ("/v1/chat/completions", b'{"model": "x", "messages": [{"role": "wizard"}]}'),
    ("/v1/completions", b'{"model": "x", "prompt": "x", "temperature": -1}'),
    ("/v1/completions", b'{"model": "x", "prompt": "x", "regex": "["}'),
    ("/v1/completions", b'{"model": "x", "prompt"'),
    ("/update_weights_from_disk", b"{}"),
    ("/flush_cache", b"{}"),
)
"""Requests that must be answered with a 4xx."""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        kind: answered, hung up, aborted or malformed.
        body: in JSON. data: the bytes of a malformed one.
        seconds: after which it is given up.
    """

    kind: str
    path: str = "/generate"
    body: dict[str, Any] = field(default_factory=dict)
    data: bytes | None = None
    seconds: float = 0.0

    def is_whole(self, answer: dict[str, Any]) -> bool:
        """Whether an answer has all tokens that were asked for, or ends where a regular expression let it."""
        sampling = self.body["sampling_params"]
        ended = "regex" in sampling and answer["meta_info"]["finish_reason"]["type"] == "stop"
        return ended or len(answer["output_ids"]) == sampling["max_new_tokens"]

    def __str__(self) -> str:
        """A line that tells it from others."""
        if self.data is not None:
            return f"{self.kind} {self.path} {self.data[:80]!r}"
        given_up = f" given up after {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.kind}{given_up}, {len(self.body['input_ids'])} tokens, {self.body['sampling_params']}"


def draw(rng: random.Random, vocabulary: int, longest: int) -> Request:
    """A request of a random kind."""
    kind = rng.choices(("answered", "hung up", "aborted", "malformed"), (5, 2, 2, 2))[0]
    if kind == "malformed":
        path, data = rng.choice(MALFORMED)
        return Request(kind, path, data=data)
    length = min(longest, int(2 ** rng.uniform(0, 10)))
    tokens = rng.randint(1, 32) if kind == "answered" else rng.randint(50, 200)
    sampling: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True}
    sampling |= rng.choice([{}, {"n": 2}, {"top_p": 0.9}, {"regex": f"[a-z]{{{rng.randint(1, 400)},999}}"}])
    prefix = random.Random(rng.choice([1, 2, rng.random()]))  # some prompts have their beginning in common
    ids = [prefix.randrange(20, vocabulary) for _ in range(length)]
    body = {"input_ids": ids, "sampling_params": sampling, "stream": kind != "answered"}
    return Request(kind, body=body, seconds=0.0 if kind == "answered" else rng.uniform(0, 2))


class Client:
    """Asks one server and counts how its requests ended."""

    def __init__(self, url: str, vocabulary: int, longest: int) -> None:
        self.address, self.vocabulary, self.longest = url.removeprefix("http://"), vocabulary, longest
        self.ended: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        """Status and body of the answer."""
        connection = http.client.HTTPConnection(self.address, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def command(self, path: str, **fields: Any) -> None:
        """An administrative request."""
        self.post(path, json.dumps(fields).encode(), Authorization=f"Bearer {ADMIN_KEY}")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=TIMEOUT_SECONDS) as answer:
            return json.load(answer)

    def count(self, how: str, fault: str = "") -> None:
        with self._lock:
            self.ended[how] += 1
            if fault:
                self.faults.append(fault)

    def ask(self, request: Request, name: str) -> None:
        """Send a request, and do with its answer as its kind says."""
        data = json.dumps(request.body).encode() if request.data is None else request.data
        if request.kind == "malformed":
            status, text = self.post(request.path, data)
            self.count(request.kind, "" if 400 <= status < 500 else f"{request}: {status} {text[:200]!r}")
        elif request.kind == "answered":
            status, text = self.post(request.path, data)
            parts = json.loads(text)
            whole = status == 200 and all(map(request.is_whole, parts if isinstance(parts, list) else [parts]))
            self.count(request.kind, "" if whole else f"{request}: {status} {text[:200]!r}")
        else:
            self.give_up(request, name)

    def give_up(self, request: Request, name: str) -> None:
        """A stream that is left, or aborted by its name, after ``request.seconds``."""
        body = dict(request.body)
        if request.kind == "aborted" and "n" not in body["sampling_params"]:
            body["rid"] = name
        connection = http.client.HTTPConnection(self.address, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("POST", request.path, json.dumps(body).encode(), {"Content-Type": "application/json"})
            time.sleep(request.seconds)
            if "rid" in body:
                self.command("/abort_request", rid=name)
                connection.getresponse().read()
        finally:
            connection.close()
        self.count(request.kind)

    def probe(self) -> tuple[list[int], list[float]]:
        """Greedy ids and log-probabilities of a fixed prompt."""
        ids = [20 + 7 * n % (self.vocabulary - 20) for n in range(min(300, self.longest))]
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        body = {"input_ids": ids, "return_logprob": True, "sampling_params": sampling}
        answer = json.loads(self.post("/generate", json.dumps(body).encode())[1])
        return answer["output_ids"], [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]

    def used(self) -> dict[str, int]:
        """The use of each pool, once nothing changes any more or :data:`SETTLE_SECONDS` have passed."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            pools = self.get("/server_info")["internal_states"][0]["nvfp4_sgl"]["pools"]
            found = {name: pool["used"] for name, pool in pools.items()}
            if not any(found.values()) or time.monotonic() > deadline:
                return found
            time.sleep(0.5)


def descendants(root: int) -> list[int]:
    """Ids of every process below ``root``."""
    parents: dict[int, list[int]] = collections.defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])].append(int(folder.name))
        except (OSError, IndexError):
            continue  # it has just ended
    found, pending = [], [root]
    while pending:
        children = parents[pending.pop()]
        found += children
        pending += children
    return found


def memory() -> dict[str, int]:
    """Bytes that the server's processes, children of this one, hold in pages without a file, by title.

    That is PSS less its part in files. Each process has its share of a page that several have, so that a fork does not
    change the sum. It does change shares: a process has less while a child of it has its pages, too. Processes of one
    title are added up, and a grammar's child to the process that it is forked from. If processes begin or end
    meanwhile, all are read again, :data:`MAX_READINGS` times at most. A kernel that does not give ``Pss_File`` has
    pages of files counted, too.
    """
    from nvfp4_sgl.serving.grammar_process import CHILD_TITLE, TITLE

    found: collections.Counter[str] = collections.Counter()
    for _ in range(MAX_READINGS):
        found.clear()
        processes = descendants(os.getpid())
        for process in processes:
            sizes, name = rollup(process), title(process).replace("\0", " ").strip()
            found[TITLE if name == CHILD_TITLE else name] += sizes.get("Pss", 0) - sizes.get("Pss_File", 0)
        if set(processes) == set(descendants(os.getpid())):
            break
    return dict(found)


@dataclass(frozen=True)
class Look:
    """Memory at one moment.

    Attributes:
        minutes: since the start. processes: as :func:`memory`. on_gpu: MiB, if there is a GPU that tells.
    """

    minutes: float
    processes: Mapping[str, int]
    on_gpu: int | None

    @property
    def on_host(self) -> int:
        """MiB of all processes."""
        return sum(self.processes.values()) // MIB


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """A line for each title that grew by more than :data:`NAMED_GROWTH_MIB`; what grew most comes first."""
    more = {name: size - before.get(name, 0) for name, size in after.items()}
    return [
        f"{name[:MAX_TITLE_CHARACTERS]}: {before.get(name, 0) / MIB:.0f} MiB before, {after[name] / MIB:.0f} MiB after"
        for name in sorted(more, key=lambda name: -more[name])
        if more[name] > NAMED_GROWTH_MIB * MIB
    ]


class Record:
    """Memory minute by minute.

    Attributes:
        looks: all so far.
        whose: of the GPU's memory: this test's processes where nvidia-smi knows them, else all.
    """

    def __init__(self, gpu: str | None) -> None:
        self.looks: list[Look] = []
        self._gpu, self._start, self._over = gpu, time.monotonic(), threading.Event()
        own = None if gpu is None else device_memory.used_by(descendants(os.getpid()), gpu)
        self.whose = "all processes" if own is None else "the server"
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def look(self) -> Look:
        """Now."""
        on_gpu = None
        if self._gpu is not None and self.whose == "the server":
            on_gpu = device_memory.used_by(descendants(os.getpid()), self._gpu)
        elif self._gpu is not None:
            on_gpu = device_memory.used(self._gpu)
        found = Look(round((time.monotonic() - self._start) / 60, 2), memory(), on_gpu)
        self.looks.append(found)
        return found

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.look()

    def __enter__(self) -> Record:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(timeout=30)


def soak(client: Client, seconds: float, concurrency: int) -> None:
    """Keep ``concurrency`` requests going for ``seconds``."""
    start = time.monotonic()

    def work(number: int) -> None:
        rng, done = random.Random(time.time_ns() + number), 0
        while (asked := time.monotonic() - start) < seconds:
            try:
                request = draw(rng, client.vocabulary, client.longest)
                client.ask(request, f"soak-{number}-{done}-{time.time_ns()}")
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                waited = time.monotonic() - start - asked
                fault = f"{request} after {asked:.0f} s, for {waited:.0f} s: {type(error).__name__}: {error}"
                client.count("failed", fault)
                time.sleep(0.5)
            done += 1

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(url: str, arguments: argparse.Namespace, vocabulary: int) -> bool:
    """The whole test of a running server; prints its result."""
    client = Client(url, vocabulary, longest=1024)
    before = client.probe()
    warm_up = arguments.minutes / 4
    with Record(arguments.gpu) as record:
        soak(client, 60 * warm_up, arguments.concurrency)
        client.used()
        start = record.look()
        soak(client, 60 * (arguments.minutes - warm_up), arguments.concurrency)
        used = client.used()
        end = record.look()
    client.command("/flush_cache")
    after = client.probe()
    difference = max(abs(one - other) for one, other in zip(before[1], after[1], strict=True))
    results = {
        "requests ended as they must": bool(client.ended) and not client.faults,
        "slots and tokens in use": not any(used.values()),
        "answer of the probe": before[0] == after[0] and difference <= TOLERANCE,
        "host memory": start.on_host > 0 and end.on_host - start.on_host <= arguments.growth,
    }
    if arguments.gpu is not None:
        first, last = start.on_gpu, end.on_gpu
        results["GPU memory"] = first is not None and last is not None and last - first <= arguments.gpu_growth
    ended = ", ".join(f"{count} {how}" for how, count in client.ended.most_common())
    print(f"\n{arguments.minutes:g} minutes, {arguments.concurrency} at once: {sum(client.ended.values())} requests")
    print(f"  {ended}")
    print(f"  in use afterwards: {used}")
    print(f"  probe: ids {'equal' if before[0] == after[0] else 'CHANGED'}, log-probabilities within {difference:.1e}")
    spans = f"{start.on_host} MiB after {warm_up:g} minutes, {end.on_host} MiB at the end"
    print(f"  host memory, PSS without files: {spans}")
    if arguments.gpu is not None:
        spans = f"{start.on_gpu} MiB after {warm_up:g} minutes, {end.on_gpu} MiB at the end"
        print(f"  GPU {arguments.gpu}, memory of {record.whose}: {spans}")
    rows = [(look.minutes, look.on_host, look.on_gpu) for look in record.looks]
    print(f"  minutes, host MiB, GPU MiB: {json.dumps(rows)}")
    for line in grown(start.processes, end.processes):
        print(f"  grew by more than {NAMED_GROWTH_MIB} MiB: {line}")
    for fault in client.faults[:10]:
        print(f"  FAULT {fault}")
    for name, passed in results.items():
        print(f"{'pass' if passed else 'FAIL'}  {name}")
    failed = [name for name, passed in results.items() if not passed]
    requests = f"{sum(client.ended.values())} requests in {arguments.minutes:g} minutes"
    print(f"FAIL: {', '.join(failed)}; {requests}" if failed else f"pass: {requests}", flush=True)
    return not failed


def served_on(gpu: str) -> list[str]:
    """Flags of a server on that GPU, which this process and its children see alone from now on."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    return list(ON_GPU)


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, help="served checkpoint; a tiny one is made by default")
    parser.add_argument(
        "--minutes", type=float, default=60, help="minutes of requests; the first quarter warms up (default: 60)"
    )
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once (default: 16)")
    parser.add_argument(
        "--growth",
        type=int,
        default=200,
        metavar="MIB",
        help="largest accepted growth of the server's host memory, PSS without files (default: 200)",
    )
    parser.add_argument(
        "--gpu", help="serve on this GPU, by its name in CUDA_VISIBLE_DEVICES (default: as SGLang chooses)"
    )
    parser.add_argument(
        "--gpu-growth",
        type=int,
        default=128,
        metavar="MIB",
        help="largest accepted growth of its GPU memory (default: 128)",
    )
    parser.add_argument("--flags", default="", help="further flags of the server, in one string")
    parser.add_argument("--log", type=Path, help="file for the server's log; thrown away by default")
    arguments = parser.parse_args()
    if not 0 < arguments.minutes < math.inf:
        parser.error(f"--minutes: expected a number above 0, found {arguments.minutes:g}")
    if arguments.concurrency < 1:
        parser.error(f"--concurrency: expected 1 or more, found {arguments.concurrency}")
    if arguments.checkpoint is not None and not (arguments.checkpoint / "config.json").is_file():
        parser.error(f"{arguments.checkpoint}: expected the directory of a checkpoint, found no config.json in it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server is stopped
    flags = ["--admin-api-key", ADMIN_KEY, *(served_on(arguments.gpu) if arguments.gpu else [])]
    with tempfile.TemporaryDirectory(prefix="nvfp4-sgl-soak-") as folder:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            from nvfp4_sgl.synthetic.tiny import write_tiny

            checkpoint = Path(folder) / "tiny"
            write_tiny(checkpoint, "nvfp4-full", seed=1, **(SHAPES if arguments.gpu else {}))
        vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
        flags += arguments.flags.split()
        with server(checkpoint, arguments.log or Path(folder) / "log", arguments=flags) as url:
            return 0 if run(url, arguments, vocabulary) else 1


if __name__ == "__main__":
    sys.exit(main())
