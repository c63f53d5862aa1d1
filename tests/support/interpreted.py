"""Hooks for folders of Triton tests: on the GPU if there is one, else under Triton's interpreter.

The interpreter is chosen by an environment variable that must be set before triton is imported, for the whole process,
and no compiled kernel works in such a process. So without a GPU these tests are collected here and run in a process of
its own (:mod:`tests.support.interpreter_process`), one for all files. It is not needed where the whole session
interprets, as that of a debugger must::

    TRITON_INTERPRET=1 python -m pytest --pdb tests/triton/test_quantize.py

The same tests also judge what Triton compiles for SM100: with ``NVFP4_SGL_EMULATED=1`` each launch's PTX for sm_100a
runs in the emulator of ``tests/sm100``, on CPU tensors (hours for all of them). Launches that no SM100 could load, such
as those of another architecture's tiling, are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tests.support import interpreter_speed
from tests.support.interpreter_process import InterpreterError, InterpreterProcess

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED = not INTERPRETED and os.environ.get("NVFP4_SGL_EMULATED") == "1"
if INTERPRETED:
    interpreter_speed.install()
ON_GPU = not INTERPRETED and not EMULATED and torch.cuda.is_available()


PROCESS = pytest.StashKey[InterpreterProcess]()


class InterpretedModule(pytest.Module):
    """A file whose tests run in the process with the interpreter."""


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if INTERPRETED or ON_GPU or EMULATED:
        return None
    return InterpretedModule.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Have the process run the test; its reports count as if they came from here."""
    if item.getparent(InterpretedModule) is None:
        return None
    if item.config.pluginmanager.hasplugin("timeout"):
        item.config.hook.pytest_timeout_cancel_timer(item=item)  # the process has its own
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
    calls: list[pytest.CallInfo[None]] = []
    failure = ""
    try:
        yield from _process(item.session).run(item, nextitem)
    except InterpreterError as error:
        failure = str(error)

    def fail() -> None:
        pytest.fail(failure, pytrace=False)

    if failure:
        calls.append(pytest.CallInfo.from_call(fail, "call"))
    # Of this session, what tests before this one set up and those after it do not share.
    calls.append(pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown"))
    for call in calls:
        if call.excinfo is not None:
            yield item.ihook.pytest_runtest_makereport(item=item, call=call)


def _process(session: pytest.Session) -> InterpreterProcess:
    stash = session.config.stash
    if PROCESS not in stash:
        files = dict.fromkeys(item.path for item in session.items if item.getparent(InterpretedModule))
        stash[PROCESS] = process = InterpreterProcess(session.config, list(files))
        session.config.add_cleanup(process.close)
    return stash[PROCESS]


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
