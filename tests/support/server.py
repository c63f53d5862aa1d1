"""Starts and stops real SGLang servers, and says why one did not start.

A server runs in its own session with its output in a log file. Stopping ends every process of that session by its id,
and checks that none was left behind.

Most are forked from a process that has imported everything (:mod:`tests.support.forks`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.support.forks import MODULES, Fork, launch

sys.path.append(str(Path(__file__).parents[2] / "launch"))  # its scripts import each other by bare name
from programs.local_server import free_port

START_SECONDS = 300
"""Less than a test may take, so that the reason is told: what the log says and where each process stands."""

STOP_SECONDS = 20
TAIL_CHARACTERS = 4000
FATAL = re.compile(
    r"^Fatal Python error|illegal memory access|terminate called|Scheduler hit an exception", re.MULTILINE
)
"""What a process's own report of its end begins with; pages of modules' names follow it."""

ADMIN_KEY = "administrative-key-of-the-tests"


class ServerExited(RuntimeError):
    """The server ended, or did not become ready in time; the message holds the end of its log."""


def session_processes(session: int) -> list[psutil.Process]:
    """Live processes of a session, zombies not counted."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return found


def wait_for_none(session: int, seconds: float) -> list[psutil.Process]:
    """Wait until a session has no process; what is left after ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := session_processes(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@dataclass
class Server:
    """One ``python -m sglang.launch_server``; a context manager that stops it."""

    process: subprocess.Popen[bytes] | Fork
    port: int
    log: Path
    arguments: tuple[str, ...] = field(default=())

    @classmethod
    def launch(
        cls,
        model: str | Path,
        *arguments: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        late: Mapping[str, str] | None = None,
        directory: Path | None = None,
        port: int | None = None,
        admin: bool = True,
        modules: Sequence[str] = MODULES,
        fresh: bool = False,
    ) -> Server:
        """Start a server and return at once.

        Args:
            port: a free one unless given.
            admin: start it with :data:`ADMIN_KEY`, which :meth:`command` sends.
            environment: added to this process's; its PYTHONPATH is put in front of this process's, on which the
                packages may be.
            late: added, too; variables that no module reads when it is imported. Servers that differ in no others are
                forked from the same process.
            directory: where it runs; the log's folder unless given, so that no checkout is on its path.
            modules: that its processes have imported before they load plugins, unless it is ``fresh``.
            fresh: start it as its users do, each process in an interpreter of its own, and fork nothing.
        """
        port = port or free_port()
        arguments = (*(("--admin-api-key", ADMIN_KEY) if admin else ()), *arguments)
        given = ["--model-path", str(model), "--port", str(port), *arguments]
        process = launch(
            given,
            log,
            directory or log.parent,
            variables(environment or {}),
            late=late,
            modules=modules,
            fresh=fresh,
        )
        return cls(process, port, log, arguments)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def excerpt(self) -> str:
        """What of the log tells most: from the first report of a process's end on, or else its last lines."""
        text = self.text()
        fatal = FATAL.search(text)
        start = max(fatal.start() - TAIL_CHARACTERS // 4, 0) if fatal else max(len(text) - TAIL_CHARACTERS, 0)
        return text[start : start + TAIL_CHARACTERS]

    def is_ready(self) -> bool:
        """Whether ``/health`` answers 200: the warm-up request has been served."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return int(answer.status) == 200
        except OSError:
            return False

    def wait_ready(self, seconds: float = START_SECONDS) -> Server:
        """Wait for :meth:`is_ready`; :class:`ServerExited` as soon as the process ends."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerExited(f"exit code {self.process.returncode}:\n{self.excerpt()}")
            if self.is_ready():
                return self
            time.sleep(0.25)
        stacks = self.stacks()
        self.stop()
        raise ServerExited(f"not ready after {seconds} s:\n{self.excerpt()}\n{stacks}")

    def stacks(self) -> str:
        """Where each thread of its processes stands, as py-spy sees it."""
        dumps = [
            subprocess.run(["py-spy", "dump", "--pid", str(process.pid)], capture_output=True, text=True, timeout=60)
            for process in session_processes(self.process.pid)
        ]
        return "\n".join(dump.stdout or dump.stderr for dump in dumps)

    def wait_exit(self, seconds: float = START_SECONDS) -> int:
        """Exit code of a server that is expected to end by itself and to leave no process behind."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if self.is_ready():
                self.stop()
                raise AssertionError("the server became ready")
            time.sleep(0.25)
        code = self.process.poll()
        orphans = wait_for_none(self.process.pid, STOP_SECONDS)
        self.stop()
        assert code is not None, f"still running after {seconds} s:\n{self.excerpt()}"
        assert not orphans, f"left behind: {orphans}"
        return code

    def ask_to_end(self) -> None:
        """Tell the launcher to end the server."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the server: ask its launcher, then kill by id what is left of its session."""
        if self.process.poll() is None:
            self.ask_to_end()
            deadline = time.monotonic() + STOP_SECONDS
            while self.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        for process in session_processes(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(STOP_SECONDS)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- requests -------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        """The JSON that ``GET path`` answers."""
        with urllib.request.urlopen(self.url + path, timeout=120) as answer:
            return json.load(answer)

    def post(self, path: str, body: Mapping[str, Any], seconds: float = 300) -> Any:
        """The JSON that ``POST path`` answers; :class:`urllib.error.HTTPError` for 4xx and 5xx."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return json.load(answer)
        except ConnectionError as error:
            error.add_note(f"the server's log:\n{self.excerpt()}")
            raise

    def command(self, path: str, body: Mapping[str, Any]) -> None:
        """A ``POST`` to an administrative path that answers 200, with or without JSON."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60):
            pass

    def status(self, path: str, body: Mapping[str, Any]) -> int:
        """Status code of ``POST path``."""
        try:
            self.post(path, body)
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def generate(self, ids: Sequence[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        """Greedy ``/generate`` of exactly ``tokens`` tokens after ``ids``, with their log-probabilities."""
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
        body = {"input_ids": list(ids), "return_logprob": True, "sampling_params": parameters}
        answer: dict[str, Any] = self.post("/generate", body)
        return answer

    def info(self) -> dict[str, Any]:
        """What our package says of itself in ``/server_info``."""
        info: dict[str, Any] = self.get("/server_info")["internal_states"][0]["nvfp4_sgl"]
        return info


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``environment`` added, without the name of the running test."""
    merged = {**os.environ, **environment}
    merged.pop("PYTEST_CURRENT_TEST", None)
    paths = [environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    if any(paths):
        merged["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return merged


class ServerPool:
    """At most one running server, reused by whoever asks for the same model and arguments, and one that is ending."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, 0
        self._running: Server | None = None
        self._ending: Server | None = None
        self._key: object = None

    def __call__(
        self,
        model: str | Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        late: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> Server:
        """A ready server for ``model``; one with another model, arguments or environment is stopped."""
        both = [tuple(sorted((given or {}).items())) for given in (environment, late)]
        key = (str(model), arguments, *both, fresh)
        if self._running is not None and key == self._key and self._running.process.poll() is None:
            return self._running
        self._end_running()
        if torch.cuda.is_available():
            self._stop_ending()  # the next one counts what memory is free
        self._count += 1
        log = self._folder / f"server{self._count}.log"
        self._running = Server.launch(model, *arguments, log=log, environment=environment, late=late, fresh=fresh)
        self._key = key
        return self._running.wait_ready()

    def _end_running(self) -> None:
        """Ask the running server to end, which takes it 5 s, most of them asleep; nobody waits for it yet."""
        self._stop_ending()
        if self._running is not None:
            self._running.ask_to_end()
        self._ending, self._running = self._running, None

    def _stop_ending(self) -> None:
        if self._ending is not None:
            self._ending.stop()
            self._ending = None

    def close(self) -> None:
        self._end_running()
        self._stop_ending()
