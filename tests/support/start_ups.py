"""Start-ups that fail in the launcher, tried in forks (:mod:`tests.support.forks`)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.forks import launch
from tests.support.server import variables


class StartUps:
    """Tries them, one after the other."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, 0

    def __call__(
        self,
        model: str | Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        seconds: float = 60,
    ) -> tuple[int | None, str]:
        """Exit code (``None`` if it had to be killed after ``seconds``) and output of one start-up.

        ``environment`` holds variables that no module reads when it is imported, the ``late`` ones of
        :func:`tests.support.forks.launch`.
        """
        self._count += 1
        log = self._folder / f"fork{self._count}.log"
        given = ["--model-path", str(model), *arguments]
        process = launch(given, log, directory or self._folder, variables({}), late=environment)
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return code, log.read_text(errors="replace")
