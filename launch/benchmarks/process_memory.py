"""Reads the memory of processes from /proc, and watches it while commands run, or a server starts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

SECONDS = 0.05
"""Between two looks at a process's memory."""


RANK = "sglang::scheduler"
"""Title of a rank's process."""
SERVER_SECONDS = 0.5
"""Between two looks at all processes of a server."""


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


class HostMemory:
    """Peak memory of a server's processes, from :meth:`watch` until :meth:`found` or the block's end.

    RSS counts a page in every process that maps it, PSS once, shared among them.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._ranks = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self.found()

    def watch(self, leader: int) -> None:
        """Begin with the processes of the session that the process ``leader`` has made."""
        self._thread = threading.Thread(target=self._sample, args=(leader,), daemon=True)
        self._thread.start()

    def found(self) -> dict[str, float | int | None]:
        """GB at the peak of each sum; PSS is ``None`` where the kernel does not say it."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=30)
        names = ("RSS of ranks", "PSS of ranks", "RSS of all", "PSS of all")
        sizes = {name: round(self._peaks[name] / 1e9, 2) if self._peaks.get(name) else None for name in names}
        return {"ranks": self._ranks, **sizes}

    def _sample(self, leader: int) -> None:
        while True:
            ids = session(leader)
            ranks = [pid for pid in ids if RANK in title(pid)]
            self._ranks = max(self._ranks, len(ranks))
            shown = {pid: rollup(pid) for pid in ids}
            for which, chosen in (("ranks", ranks), ("all", ids)):
                for name in ("Rss", "Pss"):
                    total = sum(shown[pid].get(name, 0) for pid in chosen)
                    key = f"{name.upper()} of {which}"
                    self._peaks[key] = max(self._peaks.get(key, 0), total)
            if self._over.wait(SERVER_SECONDS):
                return


def session(leader: int) -> list[int]:
    """Processes of the session that ``leader`` has made."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            # The name, in parentheses, may hold any character.
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(entry.name))
        except (OSError, IndexError):
            continue  # it has ended meanwhile
    return found


def title(pid: int) -> str:
    """A process's command line, in place of which SGLang puts a title."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def rollup(pid: int) -> dict[str, int]:
    """Sizes in /proc/PID/smaps_rollup, in bytes; where there is none, ``Rss`` alone, which is 0 of an ended process."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {"Rss": status(pid).get("VmRSS", 0)}
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(value) * 1024 for name, value, _ in fields}
