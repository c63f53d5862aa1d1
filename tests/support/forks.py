"""Launchers of servers, forked from a process that has imported everything: ``tests/support/server_template.py``.

A server with a tiny checkpoint takes 4 s of CPU time until it is ready, where ``python -m sglang.launch_server`` takes
50 s. The process to fork from takes 15 s once, so that even a server whose environment no other has costs half.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

MODULES = (
    "sglang.srt.entrypoints.http_server",
    "nvfp4_sgl.serving.registration",
    "nvfp4_sgl.serving.scheduler_start",
)
"""Imported before a fork: what a server's processes import at or after the loading of plugins."""

FAULTS = Path(__file__).with_name("planted_faults")
PLANTED = "PLANTED_"
"""What the names of variables of planted faults begin with."""

POLL_SECONDS = 0.05
MOST_IDLE = 3
"""Templates that are kept while no process of theirs runs; each holds 700 MB."""


class TemplateError(RuntimeError):
    """The process to fork from has ended; the message holds what it wrote."""


class Template:
    """One such process and its environment; ``modules`` are imported in addition."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]):
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("server_template.py")), *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                cwd=self._folder.name,
                env=environment,
            )
        self.forks: list[Fork] = []

    def ask(self, **request: Any) -> Any:
        """The answer of the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            try:
                print(json.dumps(request), file=self._process.stdin, flush=True)
                answer = self._process.stdout.readline()
            except BrokenPipeError:
                answer = ""
        if not answer:
            raise TemplateError(self._log.read_text(errors="replace"))
        return json.loads(answer)

    def is_idle(self) -> bool:
        """Whether none of its forks runs."""
        self.forks = [fork for fork in self.forks if fork.poll() is None]
        return not self.forks

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._folder.cleanup()


class Fork:
    """A forked launcher: what tests use of a :class:`subprocess.Popen`."""

    def __init__(self, template: Template, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self._template, self._lock = template, threading.Lock()

    def poll(self) -> int | None:
        """The exit code, or minus the signal, once it has ended."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._template.ask(wait=self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"forked launcher {self.pid}", timeout or 0)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Templates:
    """Templates by environment and modules, started when first asked for; they end with this process."""

    def __init__(self) -> None:
        self._templates: dict[object, Template] = {}

    def fork(
        self,
        arguments: Sequence[str],
        log: Path,
        directory: Path,
        environment: Mapping[str, str],
        late: Mapping[str, str],
        modules: Sequence[str],
    ) -> Fork:
        """Fork a launcher; see :func:`launch`."""
        key = (frozenset(environment.items()), tuple(modules))
        template = self._templates.pop(key, None)
        if template is None:
            self._close_idle()
            template = Template(environment, modules)
        self._templates[key] = template  # as the latest
        pid = template.ask(
            arguments=list(arguments),
            log=str(log.resolve()),
            directory=str(directory.resolve()),
            environment=dict(late),
        )
        fork = Fork(template, pid)
        template.forks.append(fork)
        return fork

    def _close_idle(self) -> None:
        """All but the latest, so that there is place for one more."""
        idle = [key for key, template in self._templates.items() if template.is_idle()]
        for key in idle[: max(0, len(idle) - MOST_IDLE + 1)]:
            self._templates.pop(key).close()


TEMPLATES = Templates()
"""Templates of this process, which is pytest's or a pytest-xdist worker."""


def launch(
    arguments: Sequence[str],
    log: Path,
    directory: Path,
    environment: Mapping[str, str],
    *,
    late: Mapping[str, str] | None = None,
    modules: Sequence[str] = MODULES,
    fresh: bool = False,
) -> subprocess.Popen[bytes] | Fork:
    """Start a launcher that leads a session, with its output in ``log``.

    Args:
        arguments: of ``sglang.launch_server``.
        directory: where it runs, which is the first place that Python searches for modules.
        environment: all of it; modules are imported in this one.
        late: added to it; for variables that no module reads when it is imported.
        modules: that a fork has already; none for a test of what happens where they are imported.
        fresh: start it as its users do, each process in an interpreter of its own. So it is on a machine with a GPU,
            whose driver does not survive a fork, and where OMP_NUM_THREADS lets libraries start threads when they are
            imported, which do not either; ``launch/test`` sets it to 1.
    """
    has_one_thread = environment.get("OMP_NUM_THREADS") == "1"
    with log.open("wb") as output:
        if has_one_thread and not fresh and not torch.cuda.is_available():
            shared, planted = _without_faults(environment)
            return TEMPLATES.fork(arguments, log, directory, shared, {**planted, **(late or {})}, modules)
        return subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=directory,
            env={**environment, **(late or {})},
            start_new_session=True,
        )


def _without_faults(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """``environment`` without planted faults, and the variables that plant them, which a fork does by itself."""
    first, *others = environment.get("PYTHONPATH", "").split(os.pathsep)
    if Path(first).resolve() != FAULTS.resolve():
        return dict(environment), {}
    planted = {name: value for name, value in environment.items() if name.startswith(PLANTED) or name == "PYTHONPATH"}
    shared = {name: value for name, value in environment.items() if name not in planted}
    return shared | ({"PYTHONPATH": os.pathsep.join(others)} if others else {}), planted
