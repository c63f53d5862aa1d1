"""Many start-ups for the price of one: imports what the launcher imports, then forks for each start-up.

``python -m sglang.launch_server`` spends some ten seconds on imports before it looks at its arguments. A start-up
that fails in the launcher is tried here in a fork that runs the same module as ``__main__`` with everything imported
(but nothing of SGLang's plugins loaded). Requests and answers are JSON lines on stdin and stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class LaunchForks:
    """The parent's side: a context manager around the forking process."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, 0
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "forks.log").open("wb"),
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
        )

    def __call__(
        self,
        model: str | Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        path: Path | None = None,
        seconds: float = 60,
    ) -> tuple[int | None, str]:
        """Exit code (``None`` if it had to be killed after ``seconds``) and output of one start-up.

        ``path`` is put first on ``sys.path``.
        """
        self._count += 1
        log = self._folder / f"fork{self._count}.log"
        request = {
            "arguments": ["--model-path", str(model), *arguments],
            "environment": dict(environment or {}),
            "log": str(log),
            "path": [str(path)] if path else [],
            "seconds": seconds,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code: int | None = json.loads(self._process.stdout.readline())
        return code, log.read_text(errors="replace")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def _start_up(request: dict[str, Any]) -> int:
    """Run the launcher in this (forked) process; its exit code."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(request["environment"])
    sys.path[:0] = request["path"]
    sys.argv = ["launch_server", *request["arguments"]]
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in (
        "sglang.launch_server",
        "sglang.srt.configs.model_config",
        "nvfp4_sgl.serving.registration",
        "nvfp4_sgl.checkpoint.inventory",
    ):
        importlib.import_module(module)

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            code = 1
            try:
                code = _start_up(request)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps(_wait(child, request["seconds"])), file=answers, flush=True)


def _wait(child: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    _main()
