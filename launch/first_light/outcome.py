"""Runs a step as a process with a time limit, and says in one word how it ended and what it ended at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from first_light.journal import FOLDER_VARIABLE, Account
from first_light.steps import Step

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 20
"""Seconds for a killed process to be gone; one that waits for a GPU may never be."""
LOG = "log.txt"
TAIL_LINES = 25


@dataclass(frozen=True)
class Outcome:
    """The end of a step.

    Attributes:
        verdict: "passed", "departs" (a wrong result), "failed" (another exit code), "crashed" (a signal) or
            "out of time".
        code: the exit code, negative for a signal.
        account: what its journal says.
    """

    step: Step
    folder: Path
    verdict: str
    code: int
    seconds: float
    account: Account

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"

    @property
    def item(self) -> str:
        """The item that it ended at."""
        return self.account.departure.get("item") or self.account.open

    def lines(self) -> list[str]:
        """Lines that tell a person of it."""
        if self.passed:
            return [f"{self.step.name}: passed, {self.account.ended} items in {self.seconds:.0f} s"]
        told = {"at": self.item or "nothing in particular: see the log", "kernel": self.account.kernel}
        told |= {name: self.account.departure.get(name, "") for name in ("tensor", "expected", "found", "detail")}
        if self.verdict == "crashed":
            told["found"] = f"the process ended by {signal.Signals(-self.code).name}"
        elif self.verdict == "out of time":
            told["found"] = f"no end within {self.step.seconds:.0f} s: a hang, or a slow host"
        elif self.verdict == "failed":
            told["found"] = f"exit code {self.code}"
        told["compiled for"] = self.account.key
        told["log"] = str(self.folder / LOG)
        rows = [f"  {name:<12} {_indented(text)}" for name, text in told.items() if text]
        return [f"{self.step.name}: {self.verdict.upper()} after {self.seconds:.0f} s", *rows]

    def tail(self) -> list[str]:
        """The end of the log, where nothing was told by name."""
        return (self.folder / LOG).read_text(errors="replace").splitlines()[-TAIL_LINES:]


def _indented(text: str) -> str:
    return text.replace("\n", "\n" + 15 * " ")


def run_step(step: Step, folder: Path, more: tuple[str, ...] = ()) -> Outcome:
    """Run a step to its end or its limit, its output on the terminal and in the folder's log.

    Args:
        folder: of the step; made here.
        more: arguments for pytest, where that is what the step runs.
    """
    folder.mkdir(parents=True)
    paths = [str(ROOT / "launch"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **step.environment,
        FOLDER_VARIABLE: str(folder),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    started = time.monotonic()
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            step.arguments(more),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        copier = threading.Thread(target=_copy, args=(process, log), daemon=True)
        copier.start()
        try:
            code = process.wait(step.seconds)
            late = False
        except subprocess.TimeoutExpired:
            late, code = True, -signal.SIGKILL
        finally:
            end(process)
        copier.join(END_SECONDS)
    account = Account.read(folder)
    if account.departure:
        verdict = "departs"
    elif late:
        verdict = "out of time"
    else:
        verdict = "passed" if code == 0 else "crashed" if code < 0 else "failed"
    return Outcome(step, folder, verdict, code, time.monotonic() - started, account)


def _copy(process: subprocess.Popen[bytes], log: object) -> None:
    """Copies what the process says to the terminal and to the log at once."""
    assert process.stdout is not None
    for line in process.stdout:
        log.write(line)  # type: ignore[attr-defined]
        log.flush()  # type: ignore[attr-defined]
        sys.stdout.write(line.decode(errors="replace"))
        sys.stdout.flush()


def end(process: subprocess.Popen[Any]) -> None:
    """End what is left of a process and of those it started, servers with sessions of their own among them."""
    if process.poll() is not None:
        return
    try:
        left = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in left:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, END_SECONDS)
    process.poll()
