"""A process in which Triton interprets, run by a pytest session in which it compiles; this file is both of its sides.

The session's side is :class:`InterpreterProcess`, the process's a pytest plugin: it collects the same files, runs each
test when it is asked for, and sends back the test's reports as they come.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

LINK = "NVFP4_SGL_INTERPRETER_LINK"
"""Environment variable: the file descriptor over which the process is asked."""


class InterpreterError(Exception):
    """The process ended, or lacks a test; says which, and what the process printed."""


class InterpreterProcess:
    """pytest under Triton's interpreter, started when the first test is asked for, and again when it has died."""

    def __init__(self, config: pytest.Config, files: Sequence[Path]) -> None:
        self.config = config
        self.files = files
        self.process: subprocess.Popen[bytes] | None = None
        self.shows_output = config.option.capture == "no"
        self.output = tempfile.TemporaryFile()  # noqa: SIM115

    def run(self, item: pytest.Item, following: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """The reports of ``item``; what ``following`` shares with it stays set up.

        Raises:
            InterpreterError: the process ended, or its collection lacks the test.
        """
        if self.process is None or self.process.poll() is not None:
            self.start()
        try:
            self.link.send((item.nodeid, following and following.nodeid))
            while (answer := self.link.recv()) is not None:
                if isinstance(answer, str):
                    raise InterpreterError(answer)
                yield self.config.hook.pytest_report_from_serializable(config=self.config, data=answer)
        except (EOFError, OSError) as error:
            assert self.process is not None
            status = self.process.wait()
            self.output.seek(0)
            printed = self.output.read().decode(errors="replace")
            raise InterpreterError(
                f"the process with Triton's interpreter ended with status {status} at {item.nodeid}\n{printed}"
            ) from error

    def start(self) -> None:
        option = self.config.option
        command = [
            *(sys.executable, "-m", "pytest", "-p", __name__, "-p", "no:cacheprovider", "--full"),
            *(f"--tb={option.tbstyle}", f"--capture={option.capture}", f"--verbosity={option.verbose}"),
            *["--showlocals"] * option.showlocals,
            *["--runxfail"] * option.runxfail,
        ]
        if (seconds := self.config.getoption("timeout", None)) is not None:
            command.append(f"--timeout={seconds}")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}  # such as further options
        self.output.truncate(0)
        self.link, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [*command, *map(str, self.files)],
                cwd=self.config.rootpath,
                env=environment | {"TRITON_INTERPRET": "1", LINK: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdout=None if self.shows_output else self.output,
                stderr=None if self.shows_output else self.output,
            )

    def close(self) -> None:
        """Let the process tear down what is set up, and end."""
        if self.process is not None:
            self.link.close()
            self.process.wait()
        self.output.close()


class Answers:
    """Plugin of the process: tests are run when asked for, until the link closes."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self.config = config
        self.link = link
        self.not_collected = ""
        """What collecting the files failed with."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.not_collected += f"{report.nodeid}: {report.longreprtext}\n"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        try:
            while True:
                nodeid, following = self.link.recv()
                if nodeid in items:
                    item = items[nodeid]
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=items.get(following))
                    self.link.send(None)
                else:
                    self.link.send(f"under Triton's interpreter there is no test {nodeid}\n{self.not_collected}")
        except (EOFError, BrokenPipeError):
            return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.link.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """In the process, the session's terminal shows results."""
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(Answers(config, Connection(int(os.environ.pop(LINK)))))
