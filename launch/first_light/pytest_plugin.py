"""pytest plugin: keeps the journal of a step whose items are tests, and notes the GEMM that is launched last."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from first_light.journal import Journal

JOURNAL = Journal.of_this_process()


def pytest_configure(config: pytest.Config) -> None:
    """Have every launch of a GEMM noted, so that a kernel that hangs is known."""
    from nvfp4_sgl.cutedsl_kernels.launcher import CudaLauncher

    original = CudaLauncher.launch

    def noted(self: Any, key: Any, call: Any, clusters: int) -> None:
        JOURNAL.launch(key.name, repr(key))
        original(self, key, call, clusters)

    CudaLauncher.launch = noted  # type: ignore[method-assign]


def pytest_runtest_logstart(nodeid: str) -> None:
    JOURNAL.begin(nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    outcome: Any = yield
    if call.excinfo is not None and outcome.get_result().failed:
        JOURNAL.departs(item.nodeid, call.excinfo.value)


def pytest_runtest_logfinish(nodeid: str) -> None:
    JOURNAL.end(nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported."""
    if report.failed:
        lines = re.findall(r"^E\s+(.*)$", report.longreprtext, re.M)
        JOURNAL.departs(report.nodeid, RuntimeError("; ".join(lines[-2:]) or "cannot be collected"))
