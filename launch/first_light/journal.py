"""Lines of JSON that survive a step's process: what it has begun, launched, ended and found wrong."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.departure import Departure

FOLDER_VARIABLE = "NVFP4_SGL_FIRST_LIGHT"
"""Environment variable: the folder of the step that a process runs."""
NAME = "journal.jsonl"
MESSAGE_LINES = 6
"""Lines of an error's message that a report repeats."""


def code_folder(step: Path, kernel: str) -> Path:
    """The folder where a step keeps the code of a kernel."""
    return step / "code" / re.sub(r"\W+", "_", kernel)


class Journal:
    """Appends to the journal of a step; does nothing without a folder."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._kernel = ""

    @classmethod
    def of_this_process(cls) -> Journal:
        """The journal of the step that this process runs, if it runs one."""
        folder = os.environ.get(FOLDER_VARIABLE)
        return cls(Path(folder) if folder else None)

    def _write(self, **line: Any) -> None:
        if self.folder is None:
            return
        with (self.folder / NAME).open("a") as file:
            file.write(json.dumps({"time": time.time(), **line}) + "\n")

    def begin(self, item: str) -> None:
        self._kernel = ""
        self._write(event="begin", item=item)

    def end(self, item: str) -> None:
        self._write(event="end", item=item)

    def launch(self, kernel: str, key: str) -> None:
        """Note a kernel that is about to be launched: its name, and all it was compiled for."""
        if kernel != self._kernel:
            self._kernel = kernel
            self._write(event="launch", kernel=kernel, key=key)

    def departs(self, item: str, error: BaseException) -> None:
        """Note what is wrong with an item."""
        if isinstance(error, Departure):
            told = {"tensor": error.tensor, "expected": error.expected, "found": error.found, "detail": error.detail}
        else:
            lines = f"{type(error).__name__}: {error}".splitlines()[:MESSAGE_LINES]
            told = {"found": "\n".join(lines)}
        self._write(event="departs", item=item, **told)

    def keep_code(self, kernel: str) -> str:
        """CuTeDSL's options that leave a kernel's PTX and cubin in the step's folder, in a folder of that name."""
        if self.folder is None:
            return ""
        folder = code_folder(self.folder, kernel)
        folder.mkdir(parents=True, exist_ok=True)
        return f"--keep-ptx --keep-cubin --dump-dir {folder}"

    @contextmanager
    def item(self, name: str) -> Iterator[None]:
        """Begin, and end unless something is raised, which is noted."""
        self.begin(name)
        try:
            yield
        except Exception as error:
            self.departs(name, error)
            raise
        self.end(name)


@dataclass
class Account:
    """A journal read back.

    Attributes:
        ended: items that ended.
        open: the item that was begun last and has not ended; empty if there is none.
        since: when it began, in seconds since the epoch.
        kernel, key: launched last within it.
        departure: what was noted of the first wrong item; empty if nothing was.
    """

    ended: int = 0
    open: str = ""
    since: float = 0.0
    kernel: str = ""
    key: str = ""
    departure: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Account:
        account = cls()
        path = folder / NAME
        for text in path.read_text().splitlines() if path.exists() else []:
            try:
                line = json.loads(text)
            except ValueError:
                continue  # cut off in the middle
            if not account.departure:
                account._add(line)
        return account

    def _add(self, line: dict[str, Any]) -> None:
        if line["event"] == "begin":
            self.open, self.since, self.kernel, self.key = line["item"], line["time"], "", ""
        elif line["event"] == "end":
            self.ended, self.open = self.ended + 1, ""
        elif line["event"] == "launch":
            self.kernel, self.key = line["kernel"], line["key"]
        else:
            self.departure = {name: value for name, value in line.items() if name not in ("event", "time")}
