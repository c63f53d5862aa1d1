"""Checks this machine's GPU, behind launch/check_gpu, whose head says how to call it.

On Hopper everything runs to the end, in parts that are kept, and what failed is listed (``resumable_tests``). A
Blackwell GPU, on which none of this has run yet, gets the steps of ``first_light`` instead, which stop at the first
thing that departs from the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from first_light import evidence
from first_light.outcome import Outcome, run_step
from first_light.steps import EMULATED, FIRST_LIGHT, Step

from programs import resumable_tests

HOPPER = (9, 0)
BLACKWELL = ((10, 0), (10, 3))
QUERY_SECONDS = 180
"""Seconds for a process that asks for the GPU's compute capability; the first on a machine may take a minute."""
USAGE_ERROR = 2
PAIR = 2
"""GPUs of the step ``pair``."""
EMULATED_NOTE = (
    "EMULATED: no GPU is used. The PTX of SM100's kernels is executed by tests/sm100/emulator on the CPU;"
    " it shows what the code computes, not that a GPU computes the same."
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/check_gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--emulated", action="store_true", help="the numeric part of first light on the CPU; no GPU")
    parser.add_argument(
        "--output", type=Path, metavar="OUT", help="where first light puts its folder (default: build/first_light)"
    )
    parser.add_argument("--again", action="store_true", help="on Hopper: also what has passed with this code")
    parser.add_argument("--report", action="store_true", help="print the results of Hopper's parts; runs nothing")
    parser.add_argument("what", nargs="?", default="all", help="one step instead of all")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="for pytest; of memcheck and racecheck, files of tests/")
    args = parser.parse_args(arguments)
    if args.emulated:
        return first_light(EMULATED, args.what, args.rest, args.output, note=EMULATED_NOTE)
    if args.report:
        return hopper(args.what, args.rest, again=False, only_report=True)
    found = capability()
    if found is None:
        print("check_gpu: no CUDA device here; launch/check_gpu --emulated needs none", file=sys.stderr)
        return USAGE_ERROR
    if found not in (HOPPER, *BLACKWELL):
        print(
            f"check_gpu: expected a GPU of capability 9.0, 10.0 or 10.3, found {found[0]}.{found[1]}", file=sys.stderr
        )
        return USAGE_ERROR
    if found in BLACKWELL and args.what not in resumable_tests.SANITIZERS:
        return first_light(FIRST_LIGHT, args.what, args.rest, args.output)
    return hopper(args.what, args.rest, again=args.again)


def gpu_name() -> str:
    """Name of the first GPU, asked by a process of its own."""
    code = "import torch; print(torch.cuda.get_device_name())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=QUERY_SECONDS)
    return done.stdout.strip()


def gpu_names() -> list[str]:
    """All GPUs, as ``CUDA_VISIBLE_DEVICES`` names them; asked by a process of its own."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=QUERY_SECONDS)
    count = int(done.stdout) if done.stdout.strip().isdigit() else 1
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] or [str(number) for number in range(count)]


def capability() -> tuple[int, int] | None:
    """Compute capability of the first GPU, asked by a process of its own; ``None`` if there is none."""
    code = "import torch; print(*torch.cuda.get_device_capability() if torch.cuda.is_available() else ())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=QUERY_SECONDS)
    numbers = done.stdout.split()
    return (int(numbers[0]), int(numbers[1])) if done.returncode == 0 and len(numbers) == 2 else None


def hopper(what: str, rest: Sequence[str], *, again: bool, only_report: bool = False) -> int:
    """A step's parts, or all; files among the arguments choose parts, the rest goes to pytest. 1 if any failed."""
    if what != "all" and what not in resumable_tests.STEPS:
        return unknown(what, resumable_tests.STEPS)
    files = [argument for argument in rest if argument.endswith(".py")]
    more = [argument for argument in rest if argument not in files]
    gpus = [] if only_report else gpu_names()
    if not only_report and what == "pair" and len(gpus) < PAIR:
        print(f"check_gpu: pair needs two GPUs, this machine shows {len(gpus)}", file=sys.stderr)
        return USAGE_ERROR
    chosen = resumable_tests.parts(resumable_tests.STEPS if what == "all" else [what])
    if not only_report and len(gpus) < PAIR:
        chosen = [part for part in chosen if part.gpus < PAIR]
    if files:
        chosen = [part for part in chosen if part.file in files]
        if missing := set(files) - {part.file for part in chosen}:
            return unknown(" ".join(sorted(missing)), [part.file for part in resumable_tests.parts([what])])
    if only_report:
        return resumable_tests.report(chosen)
    return resumable_tests.run(chosen, gpu_name(), gpus, again=again, more=(*extra_arguments(), *more))


def unknown(what: str, known: Sequence[str]) -> int:
    print(f"check_gpu: {what}: expected {', '.join(known)} or nothing", file=sys.stderr)
    return USAGE_ERROR


def extra_arguments() -> list[str]:
    return shlex.split(os.environ.get("PYTEST_ARGUMENTS", ""))


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
    """The result of each step; of the first that did not pass, what departs."""
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
