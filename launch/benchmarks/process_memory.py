"""Reads the memory of processes from /proc, and watches it while commands run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

SECONDS = 0.05
"""Between two looks at a process's memory."""


@dataclass
class Peak:
    """Peak memory of a process.

    Attributes:
        own: peak of bytes allocated. resident: the same with the pages of files that it maps.
    """

    seconds: float = 0.0
    own: int = 0
    resident: int = 0


def measured(commands: Mapping[Path, Sequence[str]], environments: Sequence[Mapping[str, str]] = ()) -> list[Peak]:
    """Run ``python -m COMMAND`` of each log file at once, to the end of all.

    Args:
        environments: added to this process's, for each command.

    Raises:
        SystemExit: one has failed; names its log.
    """
    started, peaks = time.monotonic(), [Peak() for _ in commands]
    more = environments or [{} for _ in commands]
    with ExitStack() as stack:
        processes = []
        for (log, command), values in zip(commands.items(), more, strict=True):
            out = stack.enter_context(log.open("wb"))
            environment = {**os.environ, **values}
            process = subprocess.Popen([sys.executable, "-m", *command], stdout=out, stderr=out, env=environment)
            processes.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)
        while running := [place for place, process in enumerate(processes) if process.poll() is None]:
            for place in running:
                found, peak = status(processes[place].pid), peaks[place]
                peak.own = max(peak.own, found.get("RssAnon", 0))
                peak.resident = max(peak.resident, found.get("VmRSS", 0))
                peak.seconds = time.monotonic() - started
            time.sleep(SECONDS)
    for process, (log, command) in zip(processes, commands.items(), strict=True):
        if process.returncode:
            raise SystemExit(f"python -m {' '.join(command)} ended with {process.returncode}: see {log}")
    return peaks


def status(pid: int | str) -> dict[str, int]:
    """Sizes in /proc/PID/status, in bytes; empty once the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(value) * 1024 for name, value, _ in fields}
