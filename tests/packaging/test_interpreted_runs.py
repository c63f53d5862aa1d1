"""Triton's tests without a GPU: selected and reported like others, though a process with the interpreter runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.packaging.checkout import ROOT
from tests.support.interpreted import EMULATED, INTERPRETED, ON_GPU

pytest_plugins = "pytester"
pytestmark = pytest.mark.skipif(INTERPRETED or ON_GPU or EMULATED, reason="this process runs Triton's tests itself")

HOOKS = "device, pytest_pycollect_makemodule, pytest_runtest_protocol, pytest_runtest_setup"
TESTS = """
import os
import pytest
from triton import knobs

@pytest.fixture(scope="module")
def interpreting():
    print("set up once")
    return knobs.runtime.interpret

@pytest.mark.parametrize("size", [1, 20])
def test_size(interpreting, size):
    assert interpreting

def test_wrong(interpreting):
    print("printed by the test")
    left = [4, 5]
    assert left == [4, 6]

@pytest.mark.gpu
def test_native():
    raise AssertionError

@pytest.mark.full
def test_exhaustive(interpreting):
    assert interpreting

def test_dies():
    os._exit(7)

def test_behind(interpreting):
    assert interpreting
"""


@pytest.fixture
def checkout(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.Pytester]:
    """A folder with hooks as those of tests/triton, and ``test_it.py``."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)
    pytester.makeconftest(
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems, pytest_xdist_make_scheduler\n"
        f"from tests.support.interpreted import {HOOKS}\n"
    )
    pytester.makeini("[pytest]\nmarkers =\n  gpu: needs one\n  full: takes long\naddopts = -ra --import-mode=importlib")
    pytester.makepyfile(test_it=TESTS)
    yield pytester


def selected(run: pytest.HookRecorder) -> list[str]:
    """Names of the tests that a run chose."""
    return [item.name for item in run.getcall("pytest_collection_finish").session.items]


def test_each_test_counts_with_its_own_result(checkout: pytest.Pytester) -> None:
    run = checkout.inline_run("test_it.py")
    passed, skipped, failed = run.listoutcomes()
    assert [report.nodeid for report in passed if report.when == "call"] == [
        *("test_it.py::test_size[1]", "test_it.py::test_size[20]", "test_it.py::test_behind"),
    ]
    assert [report.nodeid for report in skipped] == ["test_it.py::test_native"]
    wrong, dead = failed
    assert "assert [4, 5] == [4, 6]" in wrong.longreprtext and "left = [4, 5]" in wrong.longreprtext
    assert wrong.capstdout == "printed by the test\n" and passed[0].capstdout == "set up once\n"
    assert dead.nodeid == "test_it.py::test_dies"
    assert "interpreter ended with status 7 at test_it.py::test_dies" in dead.longreprtext
    assert selected(checkout.inline_run("--last-failed", "--collect-only")) == ["test_wrong", "test_dies"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["test_it.py::test_size"], ["test_size[1]", "test_size[20]"]),
        (["test_it.py::test_size[20]", "test_it.py::test_native"], ["test_size[20]", "test_native"]),
        (["-k", "size and not 20"], ["test_size[1]"]),
        (["-m", "gpu"], ["test_native"]),
        (["-k", "exhaustive", "--full"], ["test_exhaustive"]),
        (["-k", "size", "--piece", "2/2"], ["test_size[20]"]),
    ],
    ids=str,
)
def test_selection(checkout: pytest.Pytester, arguments: list[str], names: list[str]) -> None:
    assert selected(checkout.inline_run("--collect-only", *arguments)) == names


def test_a_worker_of_xdist_runs_them_until_the_first_failure(checkout: pytest.Pytester) -> None:
    chosen = [f"test_it.py::test_{name}" for name in ("size[20]", "wrong", "behind")]
    run = checkout.inline_run("--numprocesses=1", "--exitfirst", *chosen)
    assert run.countoutcomes() == [1, 0, 1]
