"""Text for a terminal: lines as wide as it is, and a line that is written over. Files and pipes get whole lines."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO

INDENT = "    "
"""Before the second and further lines of one that is broken."""


def fitted(text: str) -> str:
    """``text`` with lines broken between words where they are wider than the terminal.

    Words stay whole: paths and names can be copied. Nothing is broken where stdout is no terminal.
    """
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(_broken(line, width) for line in text.split("\n"))


class Counter:
    """One line that says how far a work is, on a terminal alone.

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
