"""Text for a terminal: lines as wide as it is, and a line that is written over. Files and pipes get whole lines."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from nvfp4_sgl.errors import INTERRUPTED

INDENT = "    "
"""Before the second and further lines of one that is broken."""


QUIET_SECONDS = 5
"""Between two lines of a work that goes on, where they are not written over."""
CHILD_SECONDS = 5
"""How long children may take to end by themselves once they are told to."""


def guarded(name: str, main: Callable[[], int]) -> int:
    """The exit status of ``main``, run as a terminal's user expects.

    Characters that stdout and stderr cannot show are spelt out. Ctrl-C prints one line, ends the children that are
    left and gives :data:`INTERRUPTED`.
    """
    # Python sets a stream that the caller closed to None.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(f"\n{name}: interrupted", file=sys.stderr, flush=True)
        end_descendants()
        return INTERRUPTED


def end_descendants() -> None:
    """End every process that this one started, and theirs; those that do not heed SIGTERM are killed."""
    left = _descendants(os.getpid())
    for number, seconds in ((signal.SIGTERM, CHILD_SECONDS), (signal.SIGKILL, 1)):
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = [process for process in left if _parent(process) is not None]


def _descendants(root: int) -> list[int]:
    parents = {int(entry.name): _parent(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found, new = [], [root]
    while new:
        new = [process for process, parent in parents.items() if parent in new]
        found += new
    return found


def _parent(process: int) -> int | None:
    """Parent of a running process; ``None`` if it has ended."""
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(parent)


def fitted(text: str) -> str:
    """``text`` with lines broken between words where they are wider than the terminal.

    Words stay whole: paths and names can be copied. Nothing is broken where stdout is no terminal.
    """
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(_broken(line, width) for line in text.split("\n"))


class Counter:
    """A counter in one line, on a terminal alone.

    Args:
        what: the line, before the number.
        stream: where to print; stderr if ``None``.
    """

    def __init__(self, what: str, stream: TextIO | None = None):
        self._what, self._stream = what, stream or sys.stderr
        self._is_terminal, self._count = self._stream.isatty(), 0

    def advance(self) -> None:
        """Count one."""
        self._count += 1
        if self._is_terminal:
            print(f"\r{self._what} {self._count}", end="", file=self._stream, flush=True)

    def end(self) -> None:
        """Wipe the line."""
        if self._is_terminal and self._count:
            print("\r\033[K", end="", file=self._stream, flush=True)


class Status:
    """The current step of a job, in one line that is overwritten on a terminal.

    Elsewhere a line is printed at first, and then one every :data:`QUIET_SECONDS` at most.

    Args:
        name: of the command, before each line.
        stream: where to print; stderr if ``None``.
    """

    def __init__(self, name: str, stream: TextIO | None = None):
        self._name, self._stream = name, stream or sys.stderr
        self._is_terminal, self._said = self._stream.isatty(), -math.inf

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *error: object) -> None:
        """Wipe the line."""
        if self._is_terminal:
            print("\r\033[K", end="", file=self._stream, flush=True)

    def say(self, what: str) -> None:
        """Begin ``what``."""
        line, now = f"{self._name}: {what}", time.monotonic()
        if self._is_terminal:
            width = shutil.get_terminal_size().columns
            print(f"\r\033[K{line[: width - 1]}", end="", file=self._stream, flush=True)
        elif now - self._said >= QUIET_SECONDS:
            self._said = now
            print(line, file=self._stream, flush=True)


def _broken(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    first = len(line) - len(line.lstrip())
    parts = textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * first + INDENT,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )
    return "\n".join(parts)
