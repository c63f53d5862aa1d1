"""Runs all checks of a Hopper GPU in parts of some minutes, and keeps their results: a run that was cut off resumes.

A part is a test file in a process of its own, natively or under compute-sanitizer, or a program of ``launch``. What it
came to is written to ``build/check_gpu``, under the sources and the GPU that it ran with; a part that passed there does
not run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from first_light.outcome import ROOT, end

RESULTS = ROOT / "build" / "check_gpu"
PART_SECONDS = 480
"""A part that takes longer is ended. What it compiled stays in the caches: the next run gets further."""
CORES_A_PART = 2
"""Cores for each part that runs at a time: a test compiles and computes its reference on one."""
SOURCES = ("nvfp4_sgl", "triton_kernels", "cutedsl_kernels", "tests", "launch", "pyproject.toml", "constraints.txt")
STACK = ("torch", "triton", "nvidia-cutlass-dsl", "sglang")
"""Distributions that compile or run what is tested; an environment may have others than constraints.txt pins."""
SERVER_TESTS = (
    *("tests/gpu/test_server.py", "tests/gpu/test_server_changes.py", "tests/gpu/test_sm100_server.py"),
    *("tests/gpu/test_server_formats.py", "tests/gpu/test_sampling.py", "tests/gpu/test_crowd.py"),
    "tests/gpu/test_drafted_server.py",
)
"""SGLang with this GPU's model, twice, with SM100's up to the first launch, with other checkpoints and modes, with
every kind of sampling, with more requests than a pool holds, and with drafts.
Each takes half of the GPU's memory."""
PAIR_TESTS = (
    *("tests/gpu/test_ranks.py", "tests/gpu/test_pair_crowd.py", "tests/gpu/test_drafted_ranks.py"),
    *("tests/gpu/test_pro_ranks.py", "tests/gpu/test_inbox.py", "tests/gpu/test_pushed_ranks.py"),
)
"""Servers of two ranks on two GPUs, and of four where there are four; sums of ranks in mHC sites."""
SANITIZERS = ("memcheck", "racecheck")
STEPS = ("kernels", "decoder", "server", "pair", *SANITIZERS)
NO_TESTS = 5
"""pytest's exit status where no test was chosen."""
GPU = "{gpu}"
"""In a program's arguments, the name of the GPU that it has."""
LEFT_OUT = "not fit and not spill and not resources and not refus and not (smallest and 320)"
"""Tests of ``tests/triton`` that launch nothing, or launch often what others do, and take minutes, for a sanitizer."""
PIECES = {
    **dict.fromkeys(("quantized_attention", "attention", "hyper_connection", "routing", "topk"), 4),
    **dict.fromkeys(("attention_inputs", "attention_splits", "compressor", "indexer", "router_logits", "streams"), 2),
    "server_formats": 5,
    **dict.fromkeys(("ranks", "drafted_ranks"), 2),
    "drafted_server": 3,
}
"""Files of tests that run in so many pieces, each a part; the others are one. Compiled one after the other, the tests
of ``quantized_attention`` and ``topk`` had not ended after 415 s, with cores left (H200, 2026-11-25). A server with its
reference takes 160 s (H200, 2026-11-26)."""
SANITIZED_PIECES = {"hyper_connection": 8, "w4a16_gemms": 9, "w8a16_gemms": 5}
"""As :data:`PIECES`, under a sanitizer: a GEMM each. Seven of them had not ended within a part (H200, 2026-11-29)."""
SANITIZED_GEMMS = ("tests/gpu/test_w4a16_gemms.py", "tests/gpu/test_w8a16_gemms.py")
"""Files of which a sanitizer runs what is marked ``sanitized``."""


@dataclass(frozen=True)
class Part:
    """A test file of a step, or a program.

    Attributes:
        arguments: of a program. label: in its name.
        piece: which piece of a file's tests, and how many there are.
    """

    step: str
    file: str
    arguments: tuple[str, ...] = ()
    label: str = ""
    piece: tuple[int, int] = (1, 1)

    @property
    def name(self) -> str:
        piece = "{}of{}".format(*self.piece) if self.piece[1] > 1 else ""
        return "-".join(filter(None, (self.step, Path(self.file).stem, self.label, piece)))

    @property
    def is_program(self) -> bool:
        return self.file.startswith("launch/")

    @property
    def gpus(self) -> int:
        """GPUs on which nothing else may run beside it; 0 if it shares one with others."""
        return {"server": 1, "pair": 2}.get(self.step, 0)

    def command(self, report: Path, more: Sequence[str] = (), gpu: str = "0") -> list[str]:
        """The process; tests are named as they end, and summed up in ``report``. Programs get nothing of ``more``."""
        if self.is_program:
            module = ".".join(Path(self.file).relative_to("launch").with_suffix("").parts)
            return [sys.executable, "-m", module, *(word.replace(GPU, gpu) for word in self.arguments)]
        piece = ["--piece", "{}/{}".format(*self.piece)] if self.piece[1] > 1 else []
        test = [sys.executable, "-m", "pytest", "-v", f"--junitxml={report}", *piece, *more]
        if self.step not in SANITIZERS:
            return [*test, self.file]
        # Triton asks for more shared memory by a call that older drivers refuse, and then by another.
        options = ["--report-api-errors", "no"] if self.step == "memcheck" else []
        sanitizer = ["compute-sanitizer", "--tool", self.step, *options, "--error-exitcode", "9"]
        chosen = ["-m", "sanitized"] if self.file in SANITIZED_GEMMS else ["-m", "not gpu", "-k", LEFT_OUT]
        return [*sanitizer, *test, *chosen, self.file]


@dataclass(frozen=True)
class Result:
    """The result of a part: ``verdict`` is "passed", "failed" or "out of time"; ``failures`` name tests."""

    name: str
    fingerprint: str
    verdict: str
    seconds: float
    passed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()
    said: str = ""
    """The last line of a program, or of tests that did not begin."""

    def line(self) -> str:
        if self.said:
            return f"{self.name}: {self.verdict}, {self.seconds:.0f} s; {self.said}"
        counts = f"{self.passed} passed, {self.skipped} skipped, {len(self.failures)} failed"
        return f"{self.name}: {self.verdict}, {counts}, {self.seconds:.0f} s"


PROGRAMS = (
    Part("server", "launch/programs/soak.py", ("--minutes", "5", "--gpu", GPU)),
    Part("server", "launch/benchmarks/load.py", ("build/load", "--tp", "1")),
    Part("pair", "launch/benchmarks/ready.py", ("empty",), "empty"),
    Part("pair", "launch/benchmarks/ready.py", ("filled",), "filled"),
    Part("pair", "launch/benchmarks/load.py", ("build/load_pair", "--tp", "2")),
)
"""Each ends with a line that says what it found, and with status 1 where a goal is missed."""


def parts(steps: Iterable[str] = STEPS) -> list[Part]:
    """The parts of ``steps``, in the order in which they run."""
    kernels = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "triton").glob("test_*.py"))
    gpu = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    # Tests of resources launch nothing: a sanitizer's pytest would find no test in them, which it calls an error.
    launching = [file for file in kernels if "resources" not in file]
    files = {
        "kernels": kernels,
        "decoder": [file for file in gpu if file not in (*SERVER_TESTS, *PAIR_TESTS)],
        "server": list(SERVER_TESTS),
        "pair": list(PAIR_TESTS),
        **{tool: [*launching, *SANITIZED_GEMMS] for tool in SANITIZERS},
    }
    return [
        part
        for step in STEPS
        if step in steps
        for part in [
            *(piece for file in files[step] for piece in pieces(step, file)),
            *(one for one in PROGRAMS if one.step == step),
        ]
    ]


def pieces(step: str, file: str) -> list[Part]:
    """A test file's parts."""
    counts = PIECES | SANITIZED_PIECES if step in SANITIZERS else PIECES
    count = counts.get(Path(file).stem.removeprefix("test_"), 1)
    return [Part(step, file, piece=(number, count)) for number in range(1, count + 1)]


def fingerprint(how: str) -> str:
    """Hash of all that is tested, of what compiles and runs it, and of ``how``, the GPU's name for instance."""
    digest = hashlib.sha256(how.encode())
    for name in STACK:
        digest.update(f"\0{name} {installed(name)}".encode())
    for name in SOURCES:
        top = ROOT / name
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top] if top.exists() else []:
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def installed(distribution: str) -> str:
    """Version of a distribution; "absent" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def last(part: Part) -> Result | None:
    """The part's result when it last ran, with whatever code."""
    try:
        held = json.loads((RESULTS / f"{part.name}.json").read_text())
        return Result(**{**held, "failures": tuple(held["failures"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def kept(part: Part, code: str) -> Result | None:
    """The part's result with this code, if it passed; tests that were all skipped may have lacked GPUs."""
    result = last(part)
    if result is None or result.verdict != "passed" or result.fingerprint != code:
        return None
    return result if result.passed or part.is_program else None


def report(chosen: Sequence[Part]) -> int:
    """Sum up the parts' last results; 1 if one has not passed, or not run. Needs no GPU."""
    results = [result for part in chosen if (result := last(part)) is not None]
    codes = sorted({result.fingerprint for result in results})
    for code in codes:
        print(f"with code and GPU {code}:")
        for result in results:
            if result.fingerprint == code:
                print(f"    {result.line()}")
    bad = summed_up(results)
    missing = [part.name for part in chosen if last(part) is None]
    if missing:
        print(f"not run: {', '.join(missing)}")
    return 1 if bad or missing or len(codes) > 1 else 0


def run_part(
    part: Part, code: str, more: Sequence[str] = (), seconds: float = PART_SECONDS, gpu: str | None = None
) -> Result:
    """Run a part to its end or its limit, and keep its result; its output is ``build/check_gpu/<name>.txt``.

    Args:
        gpu: the only one that it sees, by its name in ``CUDA_VISIBLE_DEVICES``; all of this process's unless given.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    report, log = RESULTS / f"{part.name}.xml", RESULTS / f"{part.name}.txt"
    report.unlink(missing_ok=True)
    # One thread a process, as in launch/test: with 32 in each of some twenty parts, CPU references that take one thread
    # a few seconds had not ended after 470 s (32 cores, 2026-11-25).
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    if part.is_program:
        paths = [str(ROOT / "launch"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    if part.step in SANITIZERS:
        # Every tensor its own allocation: torch's pool would hide accesses past the end of one inside another.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    started = time.monotonic()
    # With further arguments for pytest a part may be left without a test, which is not its fault.
    fine = (0, NO_TESTS) if more and not part.is_program else (0,)
    with log.open("w") as output:
        command = part.command(report, more, gpu or "0")
        try:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}; add its folder to PATH", file=output)
            verdict = "failed"
        else:
            try:
                verdict = "passed" if process.wait(seconds) in fine else "failed"
            except subprocess.TimeoutExpired:
                verdict = "out of time"
            finally:
                end(process)
    passed, skipped, failures = counts(report)
    seconds_taken = round(time.monotonic() - started, 1)
    said = last_line(log) if part.is_program or (verdict == "failed" and not report.exists()) else ""
    result = Result(part.name, code, verdict, seconds_taken, passed, skipped, failures, said)
    (RESULTS / f"{part.name}.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    print(result.line(), flush=True)
    return result


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def counts(report: Path) -> tuple[int, int, tuple[str, ...]]:
    """Tests of a JUnit report that passed, were skipped, and the names of those that failed."""
    if not report.exists():
        return 0, 0, ()
    passed, skipped, failures = 0, 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = {child.tag for child in case}
        if outcome & {"failure", "error"}:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in outcome:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, tuple(failures)


def run(
    chosen: Sequence[Part], gpu: str, gpus: Sequence[str] = ("0",), *, again: bool = False, more: Sequence[str] = ()
) -> int:
    """Run what has not passed yet and sum up; 1 if anything has not passed at the end.

    Parts that share a GPU run on the first one, meanwhile tests that need one for themselves on the others. Then come
    what is left of those, on all; the programs, whose rates others would disturb; and parts that need two.

    Args:
        gpu: its name. gpus: those that there are, by their names in ``CUDA_VISIBLE_DEVICES``.
        again: run also what has passed.
        more: arguments for pytest; with some, whatever has passed without them runs, too.
    """
    code = fingerprint(f"{gpu} {list(more)}")
    done = {} if again else {part: result for part in chosen if (result := kept(part, code))}
    left = [part for part in chosen if part not in done]
    print(f"{gpu}: {len(chosen)} parts, {len(done)} of which have passed before; logs: {RESULTS}", flush=True)
    free: queue.Queue[str] = queue.Queue()
    for name in gpus[1:]:
        free.put(name)

    def on_a_free_one(part: Part) -> Result:
        name = free.get()
        try:
            return run_part(part, code, more, gpu=name)
        finally:
            free.put(name)

    at_once = max(1, len(os.sched_getaffinity(0)) // CORES_A_PART)
    with ThreadPoolExecutor(at_once) as shared, ThreadPoolExecutor(len(gpus)) as own:
        together = {part: shared.submit(run_part, part, code, more) for part in left if not part.gpus}
        alone = {part: own.submit(on_a_free_one, part) for part in left if part.gpus == 1 and not part.is_program}
        wait(together.values())
        free.put(gpus[0])
        done |= {part: future.result() for part, future in (together | alone).items()}
        programs = [part for part in left if part.gpus == 1 and part.is_program]
        done |= dict(zip(programs, own.map(on_a_free_one, programs), strict=True))
    for part in left:
        if part.gpus > 1:
            done[part] = run_part(part, code, more)
    return summed_up([done[part] for part in chosen])


def summed_up(results: Sequence[Result]) -> int:
    """Print all parts' results together; 1 if one did not pass."""
    bad = [result for result in results if result.verdict != "passed"]
    print(
        f"\n{len(results) - len(bad)} of {len(results)} parts passed: {sum(result.passed for result in results)} tests"
        f" passed, {sum(result.skipped for result in results)} skipped"
    )
    for result in bad:
        print(f"NOT PASSED  {result.line()}; {RESULTS / result.name}.txt")
        for failure in result.failures:
            print(f"    {failure}")
    return 1 if bad else 0
