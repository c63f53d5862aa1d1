"""Checks this machine's GPU, behind launch/check_gpu, whose head says how to call it.

On Hopper everything runs to the end and what failed is listed. A Blackwell GPU, on which none of this has run yet, gets
the steps of ``first_light`` instead, which stop at the first thing that departs from the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from first_light import evidence
from first_light.outcome import ROOT, Outcome, run_step
from first_light.steps import EMULATED, FIRST_LIGHT, Step

HOPPER_STEPS = ("kernels", "decoder", "server")
SERVER_TESTS = ("tests/gpu/test_server.py", "tests/gpu/test_sm100_server.py")
"""On Hopper: SGLang with this GPU's model, and with SM100's up to the first launch."""
SANITIZERS = ("memcheck", "racecheck")
BLACKWELL = ((10, 0), (10, 3))
QUERY_SECONDS = 180
"""Seconds for a process that asks for the GPU's compute capability; the first on a machine may take a minute."""
USAGE_ERROR = 2
EMULATED_NOTE = (
    "EMULATED: no GPU is used. The PTX of SM100's kernels is executed by tests/sm100/emulator on the CPU;"
    " it shows what the code computes, not that a GPU computes the same."
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/check_gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--emulated", action="store_true", help="the numeric part of first light on the CPU; no GPU")
    parser.add_argument("--output", type=Path, help="where first light puts its folder (default: build/first_light)")
    parser.add_argument("what", nargs="?", default="all", help="one step instead of all")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="for pytest; of memcheck and racecheck, files of tests/")
    args = parser.parse_args(arguments)
    if args.emulated:
        return first_light(EMULATED, args.what, args.rest, args.output, note=EMULATED_NOTE)
    found = capability()
    if found is None:
        print("check_gpu: no CUDA device here; launch/check_gpu --emulated needs none", file=sys.stderr)
        return USAGE_ERROR
    if args.what in SANITIZERS:
        return in_turn({args.what: sanitizer(args.what, args.rest)})
    if found in BLACKWELL:
        return first_light(FIRST_LIGHT, args.what, args.rest, args.output)
    return hopper(args.what, args.rest)


def capability() -> tuple[int, int] | None:
    """Compute capability of the first GPU, asked by a process of its own; ``None`` if there is none."""
    code = "import torch; print(*torch.cuda.get_device_capability() if torch.cuda.is_available() else ())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=QUERY_SECONDS)
    numbers = done.stdout.split()
    return (int(numbers[0]), int(numbers[1])) if done.returncode == 0 and len(numbers) == 2 else None


def hopper(what: str, rest: Sequence[str]) -> int:
    """Each of the old steps, all to their ends; 1 if any failed."""
    left_out = [argument for file in SERVER_TESTS for argument in ("--deselect", file)]
    commands = {
        "kernels": pytest("tests/triton"),
        "decoder": pytest("tests/gpu", *left_out),
        "server": pytest(*SERVER_TESTS),
        **{tool: sanitizer(tool) for tool in SANITIZERS},
    }
    if what != "all" and what not in commands:
        return unknown(what, commands)
    return in_turn(commands if what == "all" else {what: [*commands[what], *rest]})


def unknown(what: str, known: Sequence[str] | dict[str, list[str]]) -> int:
    print(f"check_gpu: {what}: expected {', '.join(known)} or nothing", file=sys.stderr)
    return USAGE_ERROR


def extra_arguments() -> list[str]:
    return shlex.split(os.environ.get("PYTEST_ARGUMENTS", ""))


def pytest(*arguments: str) -> list[str]:
    """Each test by name as it ends: a run that is cut off has still said what failed."""
    return [sys.executable, "-m", "pytest", "-v", *extra_arguments(), *arguments]


def sanitizer(tool: str, files: Sequence[str] = ()) -> list[str]:
    """compute-sanitizer over files of tests/triton, all unless given."""
    files = files or [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "triton").glob("test_*.py"))]
    # Triton asks for more shared memory by a call that older drivers refuse, and then by another.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    left_out = "not fit and not spill and not resources and not refus"
    return [
        *("compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "9"),
        *(sys.executable, "-m", "pytest", "-q", *extra_arguments(), "-m", "not gpu", "-k", left_out, *files),
    ]


def in_turn(commands: dict[str, list[str]]) -> int:
    """Run all; 1 if any failed."""
    failed = []
    for name, command in commands.items():
        started = time.monotonic()
        print(f"== {name}", flush=True)
        environment = dict(os.environ)
        if name in SANITIZERS:
            # Every tensor its own allocation: torch's pool would hide accesses past the end of one inside another.
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - started:.0f} s\n", flush=True)
    if failed:
        print(f"failed: {' '.join(failed)}")
    return 1 if failed else 0


def first_light(
    steps: Sequence[Step], what: str, rest: Sequence[str], output: Path | None = None, note: str = ""
) -> int:
    """The steps in order, up to the first that does not pass; 1 if one did not."""
    chosen = [step for step in steps if what in ("all", step.name)]
    if not chosen:
        return unknown(what, [step.name for step in steps])
    folder = evidence.new_folder(output)
    if note:
        print(note)
    evidence.describe_machine(folder)
    cache = folder / evidence.TRITON_CACHE
    more = (*extra_arguments(), *rest)
    outcomes: list[Outcome] = []
    for number, step in enumerate(chosen, start=1):
        print(f"== {number} of {len(chosen)}, {step.name}: {step.about} (at most {step.seconds:.0f} s)", flush=True)
        step = replace(step, environment={"TRITON_CACHE_DIR": str(cache), **step.environment})
        outcome = run_step(step, folder / f"{number}_{step.name}", more)
        outcomes.append(outcome)
        evidence.keep_suspects(outcome, cache)
        print(f"== {outcome.lines()[0]}\n", flush=True)
        if not outcome.passed:
            break
    shutil.rmtree(cache, ignore_errors=True)
    text = report(outcomes, chosen, note)
    (folder / "report.txt").write_text(text + "\n")
    (folder / "report.json").write_text(json.dumps([as_json(outcome) for outcome in outcomes], indent=1) + "\n")
    print(text)
    archive = evidence.pack(folder)
    if outcomes[-1].passed:
        print(f"all passed; the record is in {archive}")
        return 0
    print(f"\nSend us this one file, which holds all that is above, the logs and the code: {archive}")
    return 1


def report(outcomes: Sequence[Outcome], chosen: Sequence[Step], note: str) -> str:
    """What each step came to; of the first that did not pass, what departs."""
    lines = [note] if note else []
    for outcome in outcomes:
        lines += outcome.lines()
    last = outcomes[-1]
    if not last.passed and not last.account.departure:
        lines += ["  the log ends:", *(f"    {line}" for line in last.tail())]
    left = [step.name for step in chosen[len(outcomes) :]]
    if left:
        lines.append(f"not run: {', '.join(left)}")
    return "\n".join(lines)


def as_json(outcome: Outcome) -> dict[str, object]:
    account = outcome.account
    return {
        "step": outcome.step.name,
        "verdict": outcome.verdict,
        "exit code": outcome.code,
        "seconds": round(outcome.seconds, 1),
        "item": outcome.item,
        "kernel": account.kernel,
        "key": account.key,
        **account.departure,
    }


if __name__ == "__main__":
    sys.exit(main())
