"""Hooks for folders of Triton tests: on the GPU if there is one, else under Triton's interpreter.

The interpreter is chosen by an environment variable that must be set before triton is imported, for the whole process,
and no compiled kernel works in such a process. So without a GPU each file becomes a single item, ``interpreted``, which
runs the file in a process of its own. To select single tests set the variable yourself::

    TRITON_INTERPRET=1 python -m pytest tests/triton/test_quantize.py -k ragged
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = not INTERPRETED and torch.cuda.is_available()


class InterpretedRunError(Exception):
    """A file's process failed; holds its output."""


class InterpretedRun(pytest.Item):
    """All tests of one file, in a process with the interpreter."""

    def runtest(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(self.path)]
        done = subprocess.run(command, cwd=self.config.rootpath, env=environment, capture_output=True, text=True)
        self.add_report_section("call", "interpreted", done.stdout)
        if done.returncode:
            raise InterpretedRunError(done.stdout + done.stderr)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, InterpretedRunError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name} under the interpreter"


class InterpretedFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield InterpretedRun.from_parent(self, name="interpreted")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if INTERPRETED or ON_GPU:
        return None
    return InterpretedFile.from_parent(parent, path=module_path)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors go."""
    return "cuda" if ON_GPU else "cpu"
