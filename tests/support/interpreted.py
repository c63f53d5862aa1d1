"""Hooks for folders of Triton tests: on the GPU if there is one, else under Triton's interpreter.

The interpreter is chosen by an environment variable that must be set before triton is imported, for the whole process,
and no compiled kernel works in such a process. So without a GPU each file becomes a single item, ``interpreted``, which
runs the file in a process of its own. To select single tests set the variable yourself::

    TRITON_INTERPRET=1 python -m pytest tests/triton/test_quantize.py -k ragged

The same tests also judge what Triton compiles for SM100: with ``NVFP4_SGL_EMULATED=1`` each launch's PTX for sm_100a
runs in the emulator of ``tests/sm100``, on CPU tensors (hours for all of them). Launches that no SM100 could load, such
as those of another architecture's tiling, are skipped.
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
from triton.runtime.errors import OutOfResources

from tests.support import interpreter_speed

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED = not INTERPRETED and os.environ.get("NVFP4_SGL_EMULATED") == "1"
if INTERPRETED:
    interpreter_speed.install()
ON_GPU = not INTERPRETED and not EMULATED and torch.cuda.is_available()


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
    if INTERPRETED or ON_GPU or EMULATED:
        return None
    return InterpretedFile.from_parent(parent, path=module_path)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("needs a GPU")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    except OutOfResources as error:
        if EMULATED:
            pytest.skip(f"no SM100 could load it: {error}")
        raise


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    """Launches run in the emulator where that is asked for."""
    if not EMULATED:
        yield
        return
    from tests.sm100.support.triton_launch import emulated_triton

    with emulated_triton():
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors go."""
    return "cuda" if ON_GPU else "cpu"
